"""What a trace says of `off` and `ours`, against the clock: is the gain what is no longer exposed?

Both run in turns inside one `tpkernels.trace.record`, each under its name as the layer's; the
clock around each call knows nothing of the trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tpkernels import trace
from tpkernels.benchmarks.overlap_variants import OFF, OURS, Call
from tpkernels.benchmarks.ranks import Ranks

TRACED = (OFF, OURS)
_TURNS = 11


@dataclass(frozen=True)
class Traced:
    """Medians of a call on rank 0, in microseconds.

    Attributes:
        us: by the clock, while traced; exposed_us: that it waited and computed nothing, by the
            trace.
    """

    us: float
    exposed_us: float


def trace_variants(
    calls: Mapping[str, Call], page: Path, ranks: Ranks, turns: int = _TURNS
) -> dict[str, Traced] | None:
    """Record both on all ranks, and leave the page; on rank 0 what it says, else None; collective.

    Args:
        calls: of ops that have the variant's name as their layer.
    """
    for name in TRACED:
        calls[name]()
    times: dict[str, list[float]] = {name: [] for name in TRACED}
    with trace.record(page) as recorded:
        for number in range(turns):
            for name in TRACED if number % 2 else TRACED[::-1]:
                start = time.perf_counter_ns()
                calls[name]()
                times[name].append((time.perf_counter_ns() - start) / 1e3)
    if ranks.rank != 0:
        return None
    summary = json.loads(recorded.paths[-1].read_text())
    return traced_of(summary, times)


def traced_of(
    summary: Mapping[str, Any], times: Mapping[str, list[float]]
) -> dict[str, Traced] | None:
    """What rank 0's rows of the summary say; None where a variant is not in it."""
    (rank,) = [each for each in summary["ranks"] if each["rank"] == 0]
    exposed: dict[str, float] = {}
    for row in rank["rows"]:
        if row["layer"] in times and row["exposed_ns"]["median"] is not None:
            ns = row["exposed_ns"]["median"]
            exposed[row["layer"]] = exposed.get(row["layer"], 0.0) + ns / 1e3
    if set(exposed) != set(times):
        return None
    return {name: Traced(median(times[name]), exposed[name]) for name in times}
