"""Where the parameters of a unit lie in its flat buffer, and which range of it a rank holds.

    flat buffer   [ weight 0..511 | bias 0..7 | pad ]        P elements, P = R * S
    rank 0 of 2   [ weight 0..263 ]                          its shard: elements 0 .. S - 1
    rank 1 of 2                   [ weight 264..511 | bias | pad ]

So the gathered buffer holds every parameter whole and in place: views of it need no copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpkernels.shard_spec import Chunk

ALIGNMENT = 16  # bytes; what vectorised loads and the GPU's copy engine want of an address


@dataclass(frozen=True)
class FlatLayout:
    """``len(shapes)`` parameters one after another, each aligned, padded to ``world`` equal shards.

    Attributes:
        shapes: of the parameters (of this rank's part, where tensor parallelism split them).
        offsets: in elements, of each parameter's first one.
        shard_numel: S, elements a rank holds.
        world: R, number of ranks.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world: int

    @property
    def numel(self) -> int:
        """P = R * S, elements of the flat buffer."""
        return self.shard_numel * self.world

    def numel_of(self, index: int) -> int:
        """Elements of one parameter."""
        return math.prod(self.shapes[index])

    def chunk(self, index: int, rank: int) -> Chunk:
        """The range of parameter ``index``, flattened, that ``rank`` holds; may be empty."""
        offset, size = self.offsets[index], self.numel_of(index)
        first, last = rank * self.shard_numel, (rank + 1) * self.shard_numel
        start, stop = max(offset, first), min(offset + size, last)
        if stop <= start:
            return Chunk(size if first >= offset + size else 0, 0, 0)
        return Chunk(start - offset, stop - start, 0)

    def shard_start(self, index: int, rank: int) -> int:
        """Where in the shard of ``rank`` its range of parameter ``index`` begins."""
        within = self.offsets[index] - rank * self.shard_numel
        return min(max(within, 0), self.shard_numel)


def flat_layout(shapes: Sequence[Sequence[int]], itemsize: int, world: int) -> FlatLayout:
    """Lay out parameters of ``shapes``, of ``itemsize`` bytes an element, over ``world`` ranks."""
    step = max(1, ALIGNMENT // itemsize)
    offsets, end = [], 0
    for shape in shapes:
        offsets.append(end)
        end += -(-math.prod(shape) // step) * step
    shard = -(-end // (world * step)) * step
    return FlatLayout(tuple(tuple(s) for s in shapes), tuple(offsets), shard, world)
