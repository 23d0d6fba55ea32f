"""How much of the cores other programs took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tpkernels.benchmarks.ranks import Ranks

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, iowait, among the fields of the line `cpu`: proc(5)
_TIMES = 8  # user to steal; guest time is within user time


class CoreUse:
    """From its making on, of all ranks that share this host."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._start = _now()

    def others_share(self) -> float | None:
        """From 0 to 1, of all cores; None where the system does not say. Collective."""
        before, after = self._start, _now()
        own = self._ranks.total(round(1e6 * (after[1] - before[1]))) / 1e6
        if before[2] is None or after[2] is None:
            return None
        available = (after[0] - before[0]) * (os.cpu_count() or 1)
        (share,) = self._ranks.largest([(after[2] - before[2] - own) / available])
        return min(1.0, max(0.0, share))


def _now() -> tuple[float, float, float | None]:
    """Seconds: of the clock, that this process ran, that all cores were busy."""
    busy = None
    if _STAT.exists():
        times = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:]][:_TIMES]
        ticks = sum(ticks for index, ticks in enumerate(times) if index not in _IDLE)
        busy = ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), busy
