"""What ``signaled`` sends and when: chunks of rows, the tiles of each, their order, the targets.

    rows    [chunk 0   ][chunk 1   ][chunk 2   ]        contiguous, they cover the matrix
    tiles   [t 0 ][t 1 ][t 2 ][t 3 ][t 4 ][t 5 ]        t 1 counts for chunk 0 and for chunk 1
    order   1, 2, 0        own rows last; the tiles start with those of chunk 1

Plain Python: a CUDA device counts by the same rules (``tpkernels.kernels.tile_counters``).
"""

# M rows, N columns, R ranks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tpkernels.kernels.row_chunks import RowChunks

_WRAP = 2**32  # counts and targets are 32 bits


@dataclass(frozen=True)
class SignalPlan:
    """The chunks of one GEMM's output.

    Attributes:
        bounds: [start, end) rows of each chunk, one after another from row 0 on.
        chunks: the same, as the kernel is told.
        order: in which they are sent, each once; the same steps on every rank.
        first_row: the GEMM begins with the tiles of this row.
    """

    bounds: tuple[tuple[int, int], ...]
    chunks: RowChunks
    order: tuple[int, ...]
    first_row: int = 0

    @property
    def rows(self) -> int:
        """M."""
        return self.bounds[-1][1] if self.bounds else 0

    def expected(self, columns: int, tile: tuple[int, int]) -> list[int]:
        """Tiles of (rows, columns) that touch each chunk of an output of ``columns`` columns."""
        across = -(-columns // tile[1])
        counts = []
        for start, end in self.bounds:
            down = (end - 1) // tile[0] - start // tile[0] + 1 if end > start else 0
            counts.append(across * down)
        return counts

    def tiles(self, tile_rows: int) -> Iterator[tuple[int, int]]:
        """[start, end) rows of the tiles, in the order in which they are computed."""
        count = -(-self.rows // tile_rows)
        for index in range(count):
            start = (index + self.first_row // tile_rows) % count * tile_rows
            yield start, min(start + tile_rows, self.rows)

    def touched(self, start: int, end: int) -> range:
        """The chunks that the tile of rows [start, end) counts for."""
        return range(self.chunks.of_row(start), self.chunks.of_row(end - 1) + 1)


def by_rows(bounds: Sequence[tuple[int, int]]) -> SignalPlan:
    """Chunks of one length, the last may be shorter (``OverlapPlan.rows``), from the first on."""
    length = bounds[0][1] - bounds[0][0] if bounds else 1
    order = tuple(range(len(bounds)))
    return SignalPlan(tuple(bounds), RowChunks(length, len(bounds)), order)


def by_owners(sizes: Sequence[int], rank: int) -> SignalPlan:
    """Each rank's rows are a chunk; the next rank's are first, ``rank``'s own last.

        rank 1 of 4:   2, 3, 0, 1

    Step s is an exchange: to rank + s, from rank - s. So no rank is sent to by two at a time.
    Raises ValueError where :func:`owners_refusal` gives a reason.
    """
    refused = owners_refusal(sizes)
    if refused is not None:
        raise ValueError(refused)
    ends = list(accumulate(sizes))
    bounds = tuple(zip((0, *ends[:-1]), ends, strict=True))
    world, first = len(sizes), sizes[0]
    longs = next((r for r, size in enumerate(sizes) if size != first), world)
    chunks = RowChunks(first, longs, sizes[-1] if longs < world else 0)
    order = tuple((rank + step) % world for step in range(1, world + 1))
    return SignalPlan(bounds, chunks, order, bounds[order[0]][0] if ends[-1] else 0)


def owners_refusal(sizes: Sequence[int]) -> str | None:
    """Why rows of such sizes cannot be counted apart; None if they can, on every rank alike.

    The kernel finds a row's chunk by two divisions: sizes of one kind, and then of another.
    ``sequence_sizes`` gives such, and two ranks always have them.
    """
    changes = sum(a != b for a, b in pairwise(sizes))
    if changes > 1:
        return f"the ranks' rows {list(sizes)} are not of one size, or of two one after the other"
    return None


class Targets:
    """What the counts of a lane will be at: they grow by what each launched GEMM will count.

    Kept by the host, whether or not anybody waits: after an error they are as true as before.
    """

    def __init__(self, capacity: int) -> None:
        self._values = [0] * capacity

    def advance(self, expected: Sequence[int]) -> list[int]:
        """Another GEMM was launched that counts ``expected`` tiles; the targets of its chunks."""
        for chunk, count in enumerate(expected):
            self._values[chunk] = (self._values[chunk] + count) % _WRAP
        return self._values[: len(expected)]


def reached(count: int, target: int) -> bool:
    """Whether ``count`` is at ``target`` or beyond, both modulo 2^32, less than 2^31 apart."""
    return (count - target) % _WRAP < _WRAP // 2
