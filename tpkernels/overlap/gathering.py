"""An all-gather whose rows are used as they come: one's own at once, the others' in ring order.

comm:    [rank+1, part 0][rank+2, part 0][rank+1, part 1]...
compute: [own rows       ][rank+1, part 0][rank+2, part 0]...
"""

# R ranks, S the length of the gathered dimension, s what one rank holds of it, K features

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torch import Tensor

from tpkernels.comm.messages import Transfer, messages_of
from tpkernels.overlap.blocks import Blocks, Cut
from tpkernels.overlap.plan import falling_cut
from tpkernels.overlap.sequence_parts import with_size

_OPERATION = "all_gather"


class Gathering:
    """``part`` [..., s, ..., K] of every rank, gathered along ``dim`` in ``chunks`` parts each.

    Attributes:
        whole: [..., S, ..., K]; the rows of a cut may be read once :meth:`cuts` gave it.
        blocks: where they lie.

    Entering starts all of it. Collective over a group of several: all ranks start their transfers
    in one order.
    """

    def __init__(
        self, part: Tensor, dim: int, sizes: list[int], group_name: str, chunks: int
    ) -> None:
        self._messages = messages_of(group_name, part.device)
        rank, world = self._messages.rank, self._messages.size
        self._part = part.contiguous()
        self.whole = part.new_empty(with_size(part, dim, sum(sizes)))
        self.blocks = Blocks(part.shape, dim, sizes)
        self._split = [self.blocks.cuts(owner, chunks, falling_cut) for owner in range(world)]
        # In parts too where the computing thread is what moves messages.
        self._own = self._split[rank] if self._messages.driven else self.blocks.cuts(rank, 1)
        self._ring = [(rank + step) % world for step in range(1, world)]
        self._steps: list[tuple[list[Cut], Transfer]] = []

    def __enter__(self) -> Self:
        try:
            for step in range(max(map(len, self._split))):
                self._start(step)
            for cut in self.blocks.cuts(self._messages.rank, 1):
                places = self.blocks.views(self.whole, cut)
                own_rows = self.blocks.part_views(self._part, cut)
                for place, own in zip(places, own_rows, strict=True):
                    place.copy_(own)
        except BaseException as error:
            self._abandon(error)
            raise
        return self

    def _start(self, step: int) -> None:
        """Send part ``step`` of one's own rows to all, and ask all for theirs."""
        cuts = [split[step : step + 1] for split in self._split]
        sent = [v for cut in cuts[self._messages.rank] for v in self._part_rows(cut)]
        receives = {
            owner: [v for cut in cuts[owner] for v in self.blocks.views(self.whole, cut)]
            for owner in self._ring
        }
        size = sum(cut.size for each in cuts for cut in each)
        whole = size * self.whole.shape[-1] * self.whole.element_size()
        transfer = self._messages.start(
            dict.fromkeys(self._ring, sent), receives, self._part, _OPERATION, whole
        )
        self._steps.append(([cut for owner in self._ring for cut in cuts[owner]], transfer))

    def _part_rows(self, cut: Cut) -> list[Tensor]:
        return self.blocks.part_views(self._part, cut)

    def _abandon(self, error: BaseException) -> None:
        """An exception between two parts leaves nothing pending."""
        self._messages.abandon([transfer for _, transfer in self._steps], error, _OPERATION)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon(error)
            return
        try:
            self.finish()
        except BaseException as failed:
            self._abandon(failed)
            raise

    def cuts(self) -> Iterator[Cut]:
        """Every part of every rank, when its rows are there: one's own, then as the ring brings."""
        for cut in self._own:
            self._messages.progress()
            yield cut
        for cuts, transfer in self._steps:
            transfer.wait_received()
            for cut in cuts:
                yield cut
                self._messages.progress()

    def wait_received(self) -> Tensor:
        """``whole``, when all of it is there."""
        for _, transfer in self._steps:
            transfer.wait_received()
        return self.whole

    def finish(self) -> None:
        """Wait until all is gathered, and all that the others want of it is sent."""
        for _, transfer in self._steps:
            transfer.wait()
