"""Gradients of a flat buffer on their way: collected whole, reduced, handed to the shards.

whole gradients    [ rank 0's part | rank 1's part ]      collected as backward makes them
                        |               |
received           [ my part of rank 0 | my part of rank 1 ]    every byte sent once
                        \\______ sum / R ______/
shard.grad         [S], in the master dtype: set, or added to what is there
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.group import Group
from tpkernels.zero.flat_buffer import FlatBuffer


class GradientBuffer:
    """The whole gradients of one :class:`FlatBuffer`, and what becomes of them.

    Args:
        dtype: in which they are sent (they are added up in the master dtype).
        keep: keep the memory of the whole between steps (ZeRO-1).
    """

    def __init__(self, buffer: FlatBuffer, dtype: torch.dtype, keep: bool) -> None:
        self.buffer, self.dtype, self._keep = buffer, dtype, keep
        self.whole: Tensor | None = None
        self._kept: Tensor | None = None
        self.filled: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole gradients."""
        return self.buffer.layout.numel * self.dtype.itemsize

    def open(self, empty: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """The whole gradients; if there are none, made by ``empty`` or kept from before."""
        if self.whole is None:
            self.whole, self._kept = self._kept, None
            if self.whole is None:
                self.whole = empty(self.buffer.layout.numel, self.dtype)
        return self.whole

    def add(self, index: int, gradient: Tensor) -> None:
        """Put the gradient of parameter ``index`` in its place, or add it to what is there."""
        assert self.whole is not None
        shape, offset = self.buffer.layout.shapes[index], self.buffer.layout.offsets[index]
        place = self.whole[offset : offset + self.buffer.layout.numel_of(index)].view(shape)
        with torch.no_grad():
            if index in self.filled:
                place.add_(_plain(gradient))
            else:
                place.copy_(_plain(gradient))
        self.filled.add(index)

    def take(self) -> tuple[Tensor, set[int]]:
        """(the whole gradients, which parameters have one); zero elsewhere; then there are none."""
        whole, filled = self.whole, self.filled
        assert whole is not None
        covered = 0
        for index, offset in enumerate(self.buffer.layout.offsets):
            if index in filled:
                whole[covered:offset].zero_()
                covered = offset + self.buffer.layout.numel_of(index)
        whole[covered:].zero_()
        self.whole, self.filled = None, set()
        return whole, filled

    def give_back(self, whole: Tensor) -> bool:
        """The reduction of ``whole`` is complete; whether its memory is kept."""
        keeps = self._keep and self.whole is None
        if keeps:
            self._kept = whole
        return keeps

    def drop(self) -> list[Tensor]:
        """Forget what was collected; the memory that was held."""
        held = [each for each in (self.whole, self._kept) if each is not None]
        self.whole, self._kept, self.filled = None, None, set()
        return held

    def install(self, parts: Tensor, filled: Iterable[int], world: int) -> None:
        """Sum ``parts`` [R, S] over R, divide by ``world``, and give each shard its gradient."""
        buffer = self.buffer
        slots = [(index, buffer.slots[index].shard) for index in sorted(filled)]
        fresh = [(index, shard) for index, shard in slots if shard.grad is None]
        if buffer.gradient is None:
            # Unfilled places are never seen; zeroed, since a norm may read what an optimizer left.
            buffer.gradient = torch.zeros_like(buffer.master)
        with torch.no_grad():
            total = buffer.gradient if len(fresh) == len(slots) == len(buffer.slots) else None
            total = mean(
                parts, world, buffer.gradient if total is not None else None, buffer.master
            )
            for index, shard in slots:
                place = buffer.shard_range(index)
                if shard.grad is None:
                    if total is not buffer.gradient:
                        buffer.gradient[place].copy_(total[place])
                    shard.grad = buffer.gradient[place]
                else:
                    _plain(shard.grad).add_(total[place])
        for _, shard in slots:
            for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(shard)


def mean(parts: Tensor, world: int, out: Tensor | None, like: Tensor) -> Tensor:
    """``parts.sum(0) / world`` of [R, S] in the dtype of ``like``, ranks added in order."""
    if out is None:
        out = torch.empty_like(like)
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
    return out.div_(world)


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.plain() if isinstance(tensor, ChunkedTensor) else tensor


def group_size(*groups: Group | None) -> int:
    """Ranks that a gradient is the mean of."""
    size = 1
    for group in groups:
        size *= group.size if group is not None else 1
    return size
