"""What each operation of each layer cost, by rank and over all ranks: numbers for the table.

What every number means is said once, in ``summary.schema.json``; the page shows the same texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tpkernels
from tpkernels.trace.recording import Interval
from tpkernels.trace.spans import common, length, union
from tpkernels.trace.timeline import OUTSIDE, Timeline, busy

SCHEMA_FILE = Path(__file__).with_name("summary.schema.json")
VERSION = 1
TIMES = ("wall", "compute", "communication", "exposed")


@dataclass(frozen=True)
class Call:
    """One operation with all that is part of it; times in nanoseconds.

    ``wall`` is None for what ran outside of any operation: then this is all of that name.
    """

    layer: str
    phase: str
    operation: str
    wall: int | None
    compute: int
    communication: int
    exposed: int
    bytes: int
    plan: str | None = None
    implementation: str | None = None
    error: str | None = None
    calls: int = 1

    @property
    def overlap(self) -> float | None:
        """``(T_gemm + T_comm - T_fused) / min(T_gemm, T_comm)``; None where there is no such."""
        least = min(self.compute, self.communication)
        if self.wall is None or self.error is not None or least == 0:
            return None
        return (self.compute + self.communication - self.wall) / least


def phase_of(operation: str) -> str:
    """``forward`` or ``backward`` by the operation's name; ``other``: ZeRO's, in both."""
    if operation.startswith("zero."):
        return "other"
    is_backward = operation.endswith(".backward") or operation == "column_backward"
    return "backward" if is_backward else "forward"


def calls_of(timeline: Timeline) -> list[Call]:
    """Every outermost operation of a rank, in order; last, what ran outside of any."""
    parts: dict[int, list[int]] = {}
    outside: dict[str, list[int]] = {}
    for index, owner in enumerate(timeline.outermost):
        if owner == OUTSIDE:
            outside.setdefault(timeline.intervals[index].name, []).append(index)
        else:
            parts.setdefault(owner, []).append(index)
    calls = []
    for owner, indices in parts.items():
        each = timeline.intervals[owner]
        details = [timeline.intervals[i].details for i in indices if _is_operation(timeline, i)]
        calls.append(
            Call(
                each.details.get("layer") or each.name,
                phase_of(each.name),
                each.name,
                each.end - each.begin,
                *_times(timeline, indices),
                plan=_first(details, "plan"),
                implementation=_first(details, "implementation"),
                error=each.details.get("error", "not ended" if "open" in each.details else None),
            )
        )
    for name, indices in sorted(outside.items()):
        number = sum(timeline.intervals[index].kind == "communication" for index in indices)
        calls.append(Call(name, "other", name, None, *_times(timeline, indices), calls=number))
    return calls


def _is_operation(timeline: Timeline, index: int) -> bool:
    return timeline.intervals[index].kind == "operation"


def _first(details: Iterable[dict[str, Any]], key: str) -> str | None:
    """Of the operation or, where it says nothing, of the first inside it that does."""
    return next((each[key] for each in details if each.get(key)), None)


def _times(timeline: Timeline, indices: list[int]) -> tuple[int, int, int, int]:
    """(compute, communication, exposed, bytes) of these intervals."""

    def of(kind: str) -> list[int]:
        return [index for index in indices if timeline.intervals[index].kind == kind]

    compute = union(span for index in of("compute") for span in timeline.alone[index])
    sent = [timeline.intervals[index] for index in of("communication")]
    return (
        length(compute),
        length(union((each.begin, each.end) for each in sent)),
        length(timeline.exposed(of("exposed"))),
        sum(_bytes(each) for each in sent),
    )


def _bytes(sent: Interval) -> int:
    known = sent.details.get("sent_bytes", -1)
    return known if known >= 0 else sent.details.get("bytes", 0)


def rows_of_calls(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """A row for each (layer, operation), in the order of their first calls."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.layer, call.operation), []).append(call)
    return [_row(group) for group in groups.values()]


def _row(group: list[Call]) -> dict[str, Any]:
    first = group[0]
    row: dict[str, Any] = {
        "layer": first.layer,
        "phase": first.phase,
        "operation": first.operation,
        "calls": sum(call.calls for call in group),
        "errors": sum(call.error is not None for call in group),
    }
    for name in TIMES:
        values = [getattr(call, name) for call in group]
        known = [value for value in values if value is not None]
        is_call = first.wall is not None
        row[f"{name}_ns"] = {
            "median": median(known) if known and is_call else None,
            "total": sum(known),
        }
    overlaps = [call.overlap for call in group if call.overlap is not None]
    row["overlap"] = {"median": median(overlaps) if overlaps else None, "calls": len(overlaps)}
    row["bytes"] = sum(call.bytes for call in group)
    served = Counter((call.plan, call.implementation) for call in group)
    row["served"] = [
        {"plan": plan, "implementation": implementation, "calls": count}
        for (plan, implementation), count in served.most_common()
    ]
    return row


def summarize(timelines: list[Timeline], world_size: int) -> dict[str, Any]:
    """The summary, as ``summary.schema.json`` has it."""
    recorded = {timeline.recording.rank for timeline in timelines}
    by_rank = [calls_of(timeline) for timeline in timelines]
    return {
        "schema": f"tpkernels.trace.summary/{VERSION}",
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tpkernels": tpkernels.__version__,
        "torch": torch.__version__,
        "command": timelines[0].recording.command if timelines else None,
        "world_size": world_size,
        "missing_ranks": [rank for rank in range(world_size) if rank not in recorded],
        "ranks": [_rank(each, calls) for each, calls in zip(timelines, by_rank, strict=True)],
        "rows": rows_of_calls(call for calls in by_rank for call in calls),
    }


def _rank(timeline: Timeline, calls: list[Call]) -> dict[str, Any]:
    recording, clock = timeline.recording, timeline.clock
    sent = busy(timeline, "communication")
    waits = [i for i, each in enumerate(timeline.intervals) if each.kind == "exposed"]
    return {
        "rank": recording.rank,
        "host": recording.host,
        "device": recording.device,
        "error": recording.error,
        "exit_status": recording.exit_status,
        "intervals": len(timeline.intervals),
        "left_out": recording.left_out,
        "clock": {
            "offset_ns": clock.offset_at(recording.begun),
            "drift_ppm": clock.drift_ppm,
            "bound_ns": 0 if recording.rank == 0 else clock.bound,
        },
        "wall_ns": timeline.wall,
        "compute_ns": length(timeline.computing),
        "communication_ns": length(sent),
        "hidden_ns": length(common(sent, timeline.computing)),
        "exposed_ns": length(timeline.exposed(waits)),
        "bytes": sum(call.bytes for call in calls),
        "rows": rows_of_calls(calls),
    }


@lru_cache
def schema() -> dict[str, Any]:
    """The published schema of the summary."""
    return json.loads(SCHEMA_FILE.read_text())


def definitions() -> dict[str, str]:
    """What the numbers mean, by their names."""
    texts = {}
    for part in ("rank", "row"):
        for name, said in schema()["$defs"][part]["properties"].items():
            if "description" in said:
                texts[f"{part}.{name.removesuffix('_ns')}"] = said["description"]
    return texts
