"""A reduce-scatter whose partial sums leave as they are computed: the others' first, own last.

    compute: [rank+1's rows][rank+2's rows][own rows][+ what came]
    comm:                   [to rank+1    ][to rank+2]

Every rank's partial sums go straight to the rows' owner, which adds them in rank order, in fp32 at
least, and rounds once.
"""

# R ranks, S the length of the scattered dimension, s what one rank keeps of it, N columns

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torch import Tensor

from tpkernels.comm.messages import Transfer, messages_of
from tpkernels.comm.row_sums import sum_in_rank_order
from tpkernels.overlap.blocks import Blocks, Cut
from tpkernels.overlap.plan import rising_cut

_OPERATION = "reduce_scatter"


class Scattering:
    """Partial sums of a whole [..., S, ..., N], computed cut by cut, summed for their owners.

    Args:
        shape: of the whole; ``dim``: the dimension that ``sizes`` scatter.
        like: has the dtype and device of the partial sums.
        chunks: parts that each rank's rows are sent in.

    Collective over a group of several: all ranks start their transfers in one order.
    """

    def __init__(
        self,
        shape: list[int],
        dim: int,
        sizes: list[int],
        like: Tensor,
        group_name: str,
        chunks: int,
    ) -> None:
        self._messages = messages_of(group_name, like.device)
        self._like = like
        self._rank, world = self._messages.rank, self._messages.size
        self.blocks = Blocks(shape, dim, sizes)
        self._split = [self.blocks.cuts(owner, chunks, rising_cut) for owner in range(world)]
        own = self.blocks.rows_of(self._rank)
        self._computed = [
            like.new_empty((self.blocks.rows_of(owner), shape[-1])) for owner in range(world)
        ]
        self._come = [
            self._computed[source] if source == self._rank else like.new_empty((own, shape[-1]))
            for source in range(world)
        ]
        self._transfers: list[Transfer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # an exception between two parts leaves nothing pending
            self._messages.abandon(self._transfers, error, _OPERATION)

    def cuts(self) -> Iterator[tuple[Cut, Tensor]]:
        """What to compute next, and where to, [size, N]; it leaves when the next is asked for."""
        rank, world = self._rank, self._messages.size
        for index in range(max(map(len, self._split))):
            size = sum(cut.size for split in self._split for cut in split[index : index + 1])
            whole = size * self._computed[rank].shape[-1] * self._like.element_size()
            for distance in range(1, world):
                # Part i goes to the rank at this distance, and comes from the one at its opposite.
                owner, source = (rank + distance) % world, (rank - distance) % world
                sent = []
                for cut in self._split[owner][index : index + 1]:
                    sent.append(self._rows(self._computed[owner], cut))
                    yield cut, sent[-1]
                own = self._split[rank][index : index + 1]
                come = [self._rows(self._come[source], cut) for cut in own]
                transfer = self._messages.start(
                    {owner: sent}, {source: come}, self._like, _OPERATION, whole
                )
                self._transfers.append(transfer)
                whole = 0  # said once for the part that all of these begin
        # In parts too where the computing thread is what moves messages.
        count = len(self._split[rank]) if self._messages.driven else 1
        for cut in self.blocks.cuts(rank, count):
            yield cut, self._rows(self._computed[rank], cut)
            self._messages.progress()

    def _rows(self, rows: Tensor, cut: Cut) -> Tensor:
        first = cut.lo * self.blocks.between
        return rows[first : first + cut.size]

    @property
    def driven(self) -> bool:
        """Whether messages move only while :meth:`progress` or a wait is called."""
        return self._messages.driven

    def progress(self) -> None:
        """Move what can be moved without waiting; for callers that compute other things."""
        self._messages.progress()

    def finish(self, out: Tensor, bias: Tensor | None = None) -> Tensor:
        """``out`` [..., s, ..., N], contiguous, filled with the sum over ranks plus ``bias``."""
        for transfer in self._transfers:
            transfer.wait()
        if out.numel():
            sum_in_rank_order(self._come, out.view(-1, out.shape[-1]), bias)
        return out
