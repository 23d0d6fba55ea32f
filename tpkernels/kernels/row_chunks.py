"""Which chunk of a GEMM's rows a row is in: two divisions tell, on the host and in a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowChunks:
    """Chunks of consecutive rows, of one length up to a row and of another one after it.

    Attributes:
        rows: of each of the first ``count`` chunks; 0: those have none.
        rest: rows of each chunk after them; 0: there are none.
    """

    rows: int
    count: int
    rest: int = 0

    @property
    def boundary(self) -> int:
        """The first row of the chunks of ``rest`` rows."""
        return self.rows * self.count

    def of_row(self, row: int) -> int:
        """The chunk that holds ``row``; as the kernel finds it."""
        if row < self.boundary:
            return row // self.rows
        return self.count + (row - self.boundary) // max(1, self.rest)

    def arguments(self) -> tuple[int, int, int, int]:
        """What ``tile_counters.count_tile`` takes: no divisor is 0."""
        return self.boundary, max(1, self.rows), self.count, max(1, self.rest)
