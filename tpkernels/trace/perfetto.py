"""The timelines as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

A process for each rank; in it a thread for the operations of each lane, one for what it computes
and waits for, and for communications as many as run at once: events of one thread must nest.
"""

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the format)

from __future__ import annotations

from typing import Any

import tpkernels
from tpkernels.trace.timeline import Timeline, rows_of

_LANES = {"operation": 1000, "compute": 2000, "exposed": 2000, "communication": 3000}
_TITLES = {1000: "operations", 2000: "compute and waits", 3000: "communication"}


def chrome_trace(timelines: list[Timeline]) -> dict[str, Any]:
    """A JSON object; ``ts`` and ``dur`` in microseconds by rank 0's clock."""
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _events(timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"tpkernels": tpkernels.__version__, "clock": "rank 0"},
    }


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    rank = timeline.recording.rank
    sent = [i for i, each in enumerate(timeline.intervals) if each.kind == "communication"]
    spans = [(timeline.intervals[i].begin, timeline.intervals[i].end) for i in sent]
    rows = dict(zip(sent, rows_of(spans), strict=True))
    used: set[tuple[int, int]] = set()
    events = []
    for index, each in enumerate(timeline.intervals):
        base, row = _LANES[each.kind], rows.get(index, each.lane)
        used.add((base, row))
        args = {key: value for key, value in each.details.items() if value not in (None, -1, "")}
        if timeline.outermost[index] not in (-1, index):
            args["of"] = timeline.intervals[timeline.outermost[index]].name
        waits = each.kind == "exposed"
        events.append(
            {
                "ph": "X",
                "name": f"wait for {each.name}" if waits else each.name,
                "cat": each.kind,
                "pid": rank,
                "tid": base + row,
                "ts": each.begin / 1e3,
                "dur": (each.end - each.begin) / 1e3,
                "args": args,
            }
        )
    named = [_name("process_name", rank, 0, f"rank {rank} on {timeline.recording.host}")]
    for base, row in sorted(used):
        title = _TITLES[base] + (f" {row}" if row else "")
        named.append(_name("thread_name", rank, base + row, title))
    return [*named, *events]


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
