"""Clocks that are seconds apart and drift: corrected within the bound that is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import CommunicationError
from tpkernels.trace.channel import Channel
from tpkernels.trace.clock import ClockMap, SyncPoint, compare

SECOND = 10**9


class ShiftedClock:
    """`offset` seconds off the true one and `ppm` millionths too fast."""

    def __init__(self, offset: float, ppm: float) -> None:
        self.offset, self.ppm = offset, ppm
        self.start = time.perf_counter_ns()

    def __call__(self) -> int:
        return self.at(time.perf_counter_ns())

    def at(self, true: int) -> int:
        """What it shows at that true time."""
        elapsed = true - self.start
        return true + round(self.offset * SECOND) + round(elapsed * self.ppm / 1e6)


def on_ranks(count, function, seconds=10.0):
    """`function(channel)` on each rank, in threads that share a store."""
    store = dist.HashStore()
    with ThreadPoolExecutor(count) as threads:
        started = [
            threads.submit(function, Channel(store, rank, count, seconds)) for rank in range(count)
        ]
        return [each.result() for each in started]


def test_shifted_and_drifting_clocks_are_corrected_within_the_bound():
    clocks = [ShiftedClock(0, 0), ShiftedClock(3.25, 400), ShiftedClock(-1e4, -900)]
    meeting = threading.Barrier(3)

    def rank(channel):
        clock = clocks[channel.rank]
        points = compare(channel, "start", clock)
        meeting.wait()
        time.sleep(0.2)
        middle = time.perf_counter_ns()
        meeting.wait()
        return middle, ClockMap((*points, *compare(channel, "end", clock)))

    found = on_ranks(3, rank)
    assert found[0][1].points == ()
    for (middle, clock_map), clock in zip(found[1:], clocks[1:], strict=True):
        assert 0 < clock_map.bound < SECOND / 10
        error = clock_map.to_rank0(clock.at(middle)) - clocks[0].at(middle)
        assert abs(error) <= clock_map.bound + 1
        first, last = clock_map.points
        # The offset alone would be wrong by what the clock drifted in 0.2 s: it is seen.
        assert abs(clock_map.drift_ppm + clock.ppm) * (last.local - first.local) / 1e6 <= (
            first.bound + last.bound + abs(clock.ppm)
        )


def test_one_point_is_a_constant_and_none_is_no_correction():
    assert ClockMap((SyncPoint(100, 7, 2),)).to_rank0(1000) == 1007
    assert ClockMap((SyncPoint(100, 7, 2),)).bound == 2
    assert ClockMap(()).to_rank0(1000) == 1000 and ClockMap(()).bound is None


@given(
    st.integers(-(10**12), 10**12),
    st.integers(-(10**6), 10**6),
    st.integers(1, 10**10),
    st.integers(0, 10**10),
)
def test_between_two_points_the_offset_is_linear(offset, change, length, at):
    clock_map = ClockMap((SyncPoint(0, offset, 5), SyncPoint(length, offset + change, 9)))
    at = min(at, length)
    assert clock_map.offset_at(0) == offset and clock_map.offset_at(length) == offset + change
    assert abs(clock_map.offset_at(at) - (offset + change * at / length)) <= 1
    assert clock_map.bound == 9


def test_a_rank_that_does_not_come_is_named():
    def rank(channel):
        if channel.rank == 1:
            return None
        with pytest.raises(CommunicationError, match=r"rank 1 did not come within 0\.3 s"):
            compare(channel, "start", time.perf_counter_ns)

    on_ranks(2, rank, seconds=0.3)


def test_a_rank_that_failed_is_not_waited_for():
    def rank(channel):
        if channel.rank == 1:
            return channel.fail("ValueError: it broke")
        with pytest.raises(CommunicationError, match=r"rank 1 left .* early: ValueError: it broke"):
            channel.wait("never", 1)

    began = time.monotonic()
    on_ranks(2, rank, seconds=60)
    assert time.monotonic() - began < 10


def test_megabytes_arrive_whole_and_leave_nothing():
    text = "".join(map(chr, range(32, 1000))) * 12_000  # 11 M characters, not compressible to 4 MiB
    store = dist.HashStore()
    Channel(store, 1, 2).send("recording", text)
    before = store.num_keys()
    assert Channel(store, 0, 2, 5).receive("recording", 1) == text
    assert store.num_keys() < before
