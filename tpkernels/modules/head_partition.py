"""Which query and key-value heads each rank holds: MHA, GQA and MQA, even or not.

Query heads follow their key-value group, so that on each rank every local key-value head serves
equally many local query heads and no rank reads another's keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.errors import UnsupportedModuleError
from tpkernels.shard_spec import Chunk, balanced_sizes


@dataclass(frozen=True)
class HeadPartition:
    """Heads of every rank as (start, count); key-value heads may be held by several ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q: tuple[tuple[int, int], ...]
    kv: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        num_heads: int, num_kv_heads: int, head_dim: int, world: int, name: str
    ) -> HeadPartition:
        """Split over ``world`` ranks.

        With at least as many key-value heads as ranks, whole key-value groups are split (9 query
        and 3 key-value heads over 2 ranks: 6 + 2 and 3 + 1). With fewer, each key-value head is
        held by world / num_kv_heads ranks that share its query heads.

        Raises:
            UnsupportedModuleError: naming ``name``, the counts and the sizes that would work.
        """
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise UnsupportedModuleError(
                f"{name}: {num_heads} query heads cannot share {num_kv_heads} key-value heads "
                "evenly"
            )
        per_kv = num_heads // num_kv_heads
        if num_kv_heads >= world:
            counts = balanced_sizes(num_kv_heads, world)
            kv = _spans(counts)
            q = _spans([count * per_kv for count in counts])
            return HeadPartition(num_heads, num_kv_heads, head_dim, q, kv)
        share = world // num_kv_heads
        if world % num_kv_heads or per_kv < share:
            raise UnsupportedModuleError(
                f"{name}: {num_heads} query heads with {num_kv_heads} key-value heads cannot be "
                f"split over {world} ranks. Allowed: {_allowed(num_heads, num_kv_heads)}. "
                "Fix: choose such a tp size"
            )
        q_counts = [count for _ in range(num_kv_heads) for count in balanced_sizes(per_kv, share)]
        kv = tuple((rank // share, 1) for rank in range(world))
        return HeadPartition(num_heads, num_kv_heads, head_dim, _spans(q_counts), kv)

    def local_heads(self, rank: int) -> int:
        """Query heads on ``rank``."""
        return self.q[rank][1]

    def local_kv_heads(self, rank: int) -> int:
        """Key-value heads on ``rank``."""
        return self.kv[rank][1]

    def q_rows(self) -> list[tuple[int, int]]:
        """(start, size) of each rank in a query projection's out features."""
        return [(start * self.head_dim, count * self.head_dim) for start, count in self.q]

    def kv_rows(self) -> list[tuple[int, int]]:
        """(start, size) of each rank in a key or value projection's out features."""
        return [(start * self.head_dim, count * self.head_dim) for start, count in self.kv]

    def describe(self) -> str:
        """As shown in the report: ``6+6 heads`` or ``6+3 heads, 2+1 KV heads``."""
        heads = "+".join(str(count) for _, count in self.q) + " heads"
        if self.num_kv_heads == self.num_heads:
            return heads
        return f"{heads}, {'+'.join(str(count) for _, count in self.kv)} KV heads"


def rows_layout(rows: list[tuple[int, int]]) -> tuple[tuple[Chunk, ...], ...]:
    """The layout of one projection split as ``rows`` says, replicas included."""
    return tuple((Chunk(start, size, 0),) for start, size in rows)


def _spans(counts: list[int]) -> tuple[tuple[int, int], ...]:
    spans, start = [], 0
    for count in counts:
        spans.append((start, count))
        start += count
    return tuple(spans)


def _allowed(num_heads: int, num_kv_heads: int) -> str:
    per_kv = num_heads // num_kv_heads
    more = [num_kv_heads * share for share in range(2, per_kv + 1)]
    text = f"any tp size from 1 to {num_kv_heads}"
    return text + (f", or {', '.join(map(str, more))}" if more else "")
