"""Calls that several ranks make together, timed in turns: so that all variants meet the same noise.

    variant A   [w][w][batch of calls]
    variant B                         [w][w][batch of calls]
    ...                                                     then again, beginning with B

The calls `w` are not timed: they bring the ranks together, and code and data into the caches. A
sample is a batch's time over its number of calls, on the slowest rank.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice

from tpkernels.benchmarks.core_use import CoreUse
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.timers import percentile

_WARM_UP = 2  # calls before each batch, at the most
# A batch is far longer than what the clock and the loop cost, 0.1 us, and short enough that a
# variant is not alone with a disturbance of milliseconds.
_BATCH_US = 1000.0
_MOST_CALLS = 200
_FIRST_CALLS = 32  # before anything is timed: each copy of a module is used once


def _nothing() -> None:
    pass


@dataclass
class Timed:
    """One variant.

    Attributes:
        calls: the same call on one or several sets of buffers, which are used in turn.
        refresh: puts all buffers back; not timed.
        lasting: how often all buffers may be used before that.
        alone: rank 0 runs it, and the others sleep in a barrier.
        us: the samples. batch: calls in each.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    refresh: Callable[[], None] = _nothing
    lasting: int | None = None
    alone: bool = False
    us: list[float] = field(default_factory=list)
    batch: int = 1
    _used: int = 0
    _ring: Iterator[Callable[[], object]] | None = None

    @property
    def percentiles(self) -> tuple[float, float, float]:
        """p20, p50 and p80."""
        return percentile(self.us, 20), percentile(self.us, 50), percentile(self.us, 80)

    def most_calls(self) -> int:
        """In one batch."""
        if self.lasting is None:
            return _MOST_CALLS
        return max(1, min(_MOST_CALLS, self.lasting * len(self.calls) - _WARM_UP))

    def take(self, count: int) -> list[Callable[[], object]]:
        """The next `count` calls, on buffers that last for them."""
        if self.lasting is not None:
            if self._used + count > self.lasting * len(self.calls):
                self.refresh()
                self._used = 0
            self._used += count
        self._ring = self._ring or cycle(self.calls)
        return list(islice(self._ring, count))


@dataclass(frozen=True)
class Turns:
    """How often: as many turns as `seconds` allow, from `least` to `most`.

    Attributes:
        warm_up: calls before each batch, at most `_WARM_UP`; fewer where calls are long.
    """

    seconds: float = 2.0
    least: int = 7
    most: int = 300
    warm_up: int = _WARM_UP


def measure(variants: Sequence[Timed], ranks: Ranks, turns: Turns) -> float | None:
    """Fill in `us` and `batch` of all; collective, the same calls on every rank.

    Returns:
        The share of the cores that other programs took meanwhile, where the system says it.
    """
    for variant in variants:
        most = variant.most_calls()
        _sample(variant, ranks, min(len(variant.calls), most, _FIRST_CALLS), turns.warm_up)
        few = _sample(variant, ranks, min(3, most), turns.warm_up)
        (us,) = ranks.largest([few])
        variant.batch = int(max(1, min(most, _BATCH_US / max(us, 0.1))))
    with _without_collector():
        start = time.perf_counter()
        for variant in variants:
            _sample(variant, ranks, variant.batch, turns.warm_up)
        (seconds,) = ranks.largest([time.perf_counter() - start])
        count = int(max(turns.least, min(turns.most, turns.seconds / seconds)))
        use = CoreUse(ranks)
        for number in range(count):
            first = number % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                variant.us.append(_sample(variant, ranks, variant.batch, turns.warm_up))
        others = use.others_share()
    for variant in variants:
        variant.us[:] = ranks.largest(variant.us)
    return others


def _sample(variant: Timed, ranks: Ranks, count: int, warm_up: int) -> float:
    """Microseconds a call on this rank; 0 where another runs it."""
    if variant.alone and ranks.rank != 0:
        ranks.barrier()
        return 0.0
    calls = variant.take(warm_up + count)
    for call in calls[:warm_up]:
        call()
    timed = calls[warm_up:]
    ranks.synchronize()
    start = time.perf_counter_ns()
    for call in timed:
        call()
    ranks.synchronize()
    us = (time.perf_counter_ns() - start) / 1e3 / count
    if variant.alone:
        ranks.barrier()
    return us


@contextmanager
def _without_collector() -> Iterator[None]:
    """No pause for garbage in the middle of a batch."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
