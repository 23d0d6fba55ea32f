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
from tpkernels.overlap.sequence_parts import with_size


class Gathering:
    """``part`` [..., s, ..., K] of every rank, gathered along ``dim`` in ``chunks`` parts each.

    Attributes:
        whole: [..., S, ..., K]; the rows of a cut may be read once :meth:`cuts` gave it.
        blocks: where they lie.

    Collective over a group of several: all ranks start their transfers in one order.
    """

    def __init__(
        self, part: Tensor, dim: int, sizes: list[int], group_name: str, chunks: int, operation: str
    ) -> None:
        self._messages = messages_of(group_name, part.device)
        rank, world = self._messages.rank, self._messages.size
        part = part.contiguous()
        self.whole = part.new_empty(with_size(part, dim, sum(sizes)))
        self.blocks = Blocks(part.shape, dim, sizes)
        split = [self.blocks.cuts(owner, chunks) for owner in range(world)]
        for cut in self.blocks.cuts(rank, 1):
            places = self.blocks.views(self.whole, cut)
            for place, own in zip(places, self.blocks.part_views(part, cut), strict=True):
                place.copy_(own)
        # In parts too where the computing thread is what moves messages.
        self._own = split[rank] if self._messages.driven else self.blocks.cuts(rank, 1)
        ring = [(rank + step) % world for step in range(1, world)]
        self._steps: list[tuple[list[Cut], Transfer]] = []
        for step in range(max(map(len, split))):
            sent = [v for cut in split[rank][step : step + 1] for v in self._own_rows(part, cut)]
            come = {owner: split[owner][step : step + 1] for owner in ring}
            receives = {
                owner: [v for cut in cuts for v in self.blocks.views(self.whole, cut)]
                for owner, cuts in come.items()
            }
            transfer = self._messages.start(dict.fromkeys(ring, sent), receives, part, operation)
            self._steps.append(([cut for cuts in come.values() for cut in cuts], transfer))

    def _own_rows(self, part: Tensor, cut: Cut) -> list[Tensor]:
        return self.blocks.part_views(part, cut)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:  # an exception between two parts leaves nothing pending
            self._messages.abandon([transfer for _, transfer in self._steps], error)

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
