"""Recordings on one clock, and what each interval is part of."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpkernels.trace.clock import ClockMap
from tpkernels.trace.recording import Interval, Recording
from tpkernels.trace.spans import Span, union, without

OUTSIDE = -1


@dataclass
class Timeline:
    """One rank's intervals in nanoseconds since the first rank began, by rank 0's clock.

    Attributes:
        outermost: for each interval the operation it is part of, the outermost, by its index;
            :data:`OUTSIDE`: none. An operation that is in no other is its own.
        alone: of each compute and exposed interval, what no interval inside it takes away: of two
            that nest in one lane, the inner one says what the rank does.
        computing: when the rank computes, in any lane.
    """

    recording: Recording
    clock: ClockMap
    begun: int
    ended: int
    intervals: list[Interval]
    outermost: list[int] = field(init=False)
    alone: dict[int, list[Span]] = field(init=False)
    computing: list[Span] = field(init=False)

    def __post_init__(self) -> None:
        self.outermost = outermost(self.intervals)
        self.alone = alone(self.intervals)
        self.computing = union(
            span
            for index, spans in self.alone.items()
            if self.intervals[index].kind == "compute"
            for span in spans
        )

    def exposed(self, indices: list[int]) -> list[Span]:
        """When the rank waits in one of these intervals and computes nothing."""
        waiting = union(span for index in indices for span in self.alone[index])
        return without(waiting, self.computing)

    @property
    def wall(self) -> int:
        """Nanoseconds that the rank recorded."""
        return self.ended - self.begun


def aligned(recordings: list[Recording]) -> list[Timeline]:
    """All ranks on rank 0's clock, which shows 0 when the first of them began."""
    clocks = [ClockMap(tuple(recording.clock)) for recording in recordings]
    zero = min(
        (clock.to_rank0(each.begun) for each, clock in zip(recordings, clocks, strict=True)),
        default=0,
    )
    timelines = []
    for recording, clock in zip(recordings, clocks, strict=True):
        moved = [
            each._replace(
                begin=clock.to_rank0(each.begin) - zero, end=clock.to_rank0(each.end) - zero
            )
            for each in recording.intervals
        ]
        begun, ended = clock.to_rank0(recording.begun), clock.to_rank0(recording.ended)
        timelines.append(Timeline(recording, clock, begun - zero, ended - zero, moved))
    return timelines


def outermost(intervals: list[Interval]) -> list[int]:
    """For each interval the outermost operation that it is part of."""
    found: list[int] = []
    for index, each in enumerate(intervals):
        if each.operation >= 0:  # begun before, so known
            found.append(found[each.operation])
        else:
            found.append(index if each.kind == "operation" else OUTSIDE)
    return found


def alone(intervals: list[Interval]) -> dict[int, list[Span]]:
    """Of each compute and exposed interval the moments in which none inside it goes on."""
    by_lane: dict[int, list[int]] = {}
    for index, each in enumerate(intervals):
        if each.kind in ("compute", "exposed"):
            by_lane.setdefault(each.lane, []).append(index)
    left: dict[int, list[Span]] = {}
    for indices in by_lane.values():
        indices.sort(key=lambda index: (intervals[index].begin, -intervals[index].end))
        inside: dict[int, list[Span]] = {index: [] for index in indices}
        stack: list[int] = []
        for index in indices:
            begin, end = intervals[index].begin, intervals[index].end
            while stack and intervals[stack[-1]].end <= begin:
                stack.pop()
            if stack:
                inside[stack[-1]].append((begin, end))
            stack.append(index)
        for index in indices:
            whole = [(intervals[index].begin, intervals[index].end)]
            left[index] = without(union(whole), union(inside[index]))
    return left


def busy(timeline: Timeline, kind: str) -> list[Span]:
    """When any interval of that kind goes on."""
    return union((each.begin, each.end) for each in timeline.intervals if each.kind == kind)


def rows_of(spans: list[Span]) -> list[int]:
    """A row for each span such that those of one row do not overlap; the lowest that is free."""
    ends: list[int] = []
    rows = [0] * len(spans)
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[index]
        row = next((row for row, free in enumerate(ends) if free <= begin), len(ends))
        ends[row : row + 1] = [end]
        rows[index] = row
    return rows
