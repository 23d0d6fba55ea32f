"""Ranks' clocks on one scale: rank 0's.

    rank r   sent |----------------------> ... <-------------------| received
    rank 0                       answered |

Rank 0's reading lies between the two of rank r, so the offset between the clocks is known to half
the round trip: ``answered - (sent + received) / 2``, off by at most ``(received - sent) / 2``. The
quickest of some exchanges is kept, at the start of a recording and at its end; in between the
offset is taken to change linearly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tpkernels.trace.channel import Channel

EXCHANGES = 20  # of which the quickest counts


@dataclass(frozen=True)
class SyncPoint:
    """At ``local`` ns of a rank's clock rank 0's showed ``local + offset``, within ``bound``."""

    local: int
    offset: int
    bound: int


@dataclass(frozen=True)
class ClockMap:
    """From a rank's clock to rank 0's; ``points`` by time, none: it is rank 0's, or unknown."""

    points: tuple[SyncPoint, ...]

    def to_rank0(self, local: int) -> int:
        """What rank 0's clock shows when this rank's shows ``local``."""
        return local + self.offset_at(local)

    def offset_at(self, local: int) -> int:
        """Nanoseconds to add; beyond the points as in between."""
        if len(self.points) < 2:
            return self.points[0].offset if self.points else 0
        first, last = self.points[0], self.points[-1]
        elapsed = max(1, last.local - first.local)
        return first.offset + round((last.offset - first.offset) * (local - first.local) / elapsed)

    @property
    def drift_ppm(self) -> float:
        """By how many millionths rank 0's clock is faster than this one."""
        if len(self.points) < 2:
            return 0.0
        first, last = self.points[0], self.points[-1]
        return (last.offset - first.offset) / max(1, last.local - first.local) * 1e6

    @property
    def bound(self) -> int | None:
        """By how much ``offset_at`` may be wrong between the points; None: never compared."""
        return max(point.bound for point in self.points) if self.points else None


def compare(
    channel: Channel, label: str, clock: Callable[[], int], exchanges: int = EXCHANGES
) -> list[SyncPoint]:
    """This rank's clock against rank 0's: one point, none on rank 0. Collective.

    Raises:
        CommunicationError: a rank does not come.
    """
    if channel.rank == 0:
        for rank in range(1, channel.world_size):
            for number in range(exchanges):
                channel.wait(f"{label}/ping/{rank}/{number}", rank)
                channel.set(f"{label}/pong/{rank}/{number}", str(clock()))
                channel.delete(f"{label}/ping/{rank}/{number}")
        return []
    best: SyncPoint | None = None
    for number in range(exchanges):
        sent = clock()
        channel.set(f"{label}/ping/{channel.rank}/{number}", "")
        channel.wait(f"{label}/pong/{channel.rank}/{number}", 0)
        received = clock()
        answered = int(channel.get(f"{label}/pong/{channel.rank}/{number}"))
        channel.delete(f"{label}/pong/{channel.rank}/{number}")
        middle, bound = (sent + received) // 2, (received - sent + 1) // 2
        if best is None or bound < best.bound:
            best = SyncPoint(middle, answered - middle, bound)
    assert best is not None
    return [best]
