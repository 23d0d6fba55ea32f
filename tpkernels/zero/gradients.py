"""Gradients of a flat buffer on their way: collected whole, reduced, handed to the shards.

whole gradients    [ rank 0's part | rank 1's part ]      collected as backward makes them
                        |               |
received           [ my part of rank 0 | my part of rank 1 ]    every byte sent once
                        \\______ sum / R ______/
shard.grad         [S], in the master dtype: set, or added to what is there
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from tpkernels.chunked_tensor import ChunkedTensor, local_values
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError
from tpkernels.shard_spec import spec_of
from tpkernels.zero.flat_buffer import FlatBuffer, Slot

_HOLDERS = 2  # of the memory of all shards' gradients: the flat tensor, and its storage in Python


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
        self._missed: set[int] = set()  # filled with zeros, since this rank brought none
        self._doubtful: dict[int, Tensor] = {}  # reduced, of these: perhaps no rank brought any
        self._marks: dict[int, tuple[Tensor, int]] = {}  # what was shown after collecting, version

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
                place.add_(local_values(gradient))
            else:
                place.copy_(local_values(gradient))
        self.filled.add(index)

    def fill(self, index: int) -> None:
        """Parameter ``index`` got no gradient here, and counts as zero if it did elsewhere."""
        self.add(index, torch.zeros(()))
        self._missed.add(index)

    def take(self) -> tuple[Tensor, set[int], set[int]]:
        """(the whole gradients, which parameters have one, which of them by :meth:`fill`).

        Zero where there is none; then there are no gradients any more.
        """
        whole, filled, missed = self.whole, self.filled, self._missed
        assert whole is not None
        covered = 0
        for index, offset in enumerate(self.buffer.layout.offsets):
            if index in filled:
                whole[covered:offset].zero_()
                covered = offset + self.buffer.layout.numel_of(index)
        whole[covered:].zero_()
        self.whole, self.filled, self._missed = None, set(), set()
        self._marks.clear()
        return whole, filled, missed

    def give_back(self, whole: Tensor) -> bool:
        """The reduction of ``whole`` is complete; whether its memory is kept."""
        keeps = self._keep and self.whole is None
        if keeps:
            self._kept = whole
        return keeps

    def mark_collected(self) -> None:
        """Show each shard whose gradient was only collected a gradient of zeros, if it has none.

        So that ``zero_grad`` is noticed: it forgets what was collected, too.
        """
        self._leave_held_memory()
        for index in self.filled:
            shard = self.buffer.slots[index].shard
            if shard.grad is None:
                self._shard_gradient(index).zero_()
                shard.grad = self._as_part(index, self._shard_gradient(index))
            self._marks[index] = (shard.grad, shard.grad._version)

    def forget_zeroed(self) -> None:
        """Forget what was collected for shards whose gradient was zeroed or removed since.

        Raises:
            ConfigError: one was changed otherwise, which what was collected would not follow.
        """
        for index, (shown, version) in list(self._marks.items()):
            slot = self.buffer.slots[index]
            now = slot.shard.grad
            if now is shown and now._version == version:
                continue
            if now is not None and getattr(now, "zeroed_version", -1) <= version:
                raise ConfigError(
                    f"the gradient of {slot.name} was changed (scaled, clipped) while what "
                    "no_sync() collected of it waits to be reduced, and would not follow. Fix: "
                    "change gradients after the backward outside no_sync(), which reduces them; "
                    "zero_grad() drops them"
                )
            self.filled.discard(index)
            del self._marks[index]

    def waiting(self) -> list[Slot]:
        """The parameters whose gradients were collected and not yet reduced."""
        self.forget_zeroed()
        return [self.buffer.slots[index] for index in sorted(self.filled)]

    def _leave_held_memory(self) -> None:
        """What somebody keeps of earlier gradients stays as it is: new ones go elsewhere."""
        if (own := self.buffer.gradient) is None:
            return
        storage = own.untyped_storage()
        gradients = (slot.shard.grad for slot in self.buffer.slots)
        shown = sum(
            each is not None and local_values(each).untyped_storage()._cdata == storage._cdata
            for each in gradients
        )
        if torch._C._storage_Use_Count(storage._cdata) > _HOLDERS + shown:
            self.buffer.gradient = None

    def _shard_gradient(self, index: int) -> Tensor:
        """Where the shard's gradient of one parameter is kept, with a version of its own."""
        if self.buffer.gradient is None:
            # Unfilled places are never seen; zeroed, since a norm may read what an optimizer left.
            self.buffer.gradient = torch.zeros_like(self.buffer.master)
        return self.buffer.gradient.data[self.buffer.shard_range(index)]

    def _as_part(self, index: int, values: Tensor) -> ChunkedTensor:
        spec = spec_of(self.buffer.slots[index].shard)
        assert spec is not None
        return ChunkedTensor.wrap(values, spec)

    def drop(self) -> list[Tensor]:
        """Forget what was collected; the memory that was held."""
        held = [each for each in (self.whole, self._kept) if each is not None]
        self.whole, self._kept, self.filled, self._missed = None, None, set(), set()
        self._marks.clear()
        self._doubtful.clear()
        return held

    def install(
        self, parts: Tensor, filled: Iterable[int], missed: Collection[int], world: int
    ) -> None:
        """Sum ``parts`` [R, S] over R, divide by ``world``, and give each shard its gradient.

        Those of ``missed`` wait for :meth:`install_doubtful`.
        """
        buffer = self.buffer
        self._leave_held_memory()
        given = [index for index in sorted(filled) if index not in missed]
        in_place = len(given) == len(buffer.slots) and all(
            slot.shard.grad is None for slot in buffer.slots
        )
        with torch.no_grad():
            if in_place and buffer.gradient is None:
                buffer.gradient = torch.empty_like(buffer.master)
            total = mean(parts, world, buffer.gradient if in_place else None, buffer.master)
            for index in given:
                self._give(index, total[buffer.shard_range(index)], in_place)
            for index in missed:
                new = total[buffer.shard_range(index)]
                before = self._doubtful.get(index)
                self._doubtful[index] = new.clone() if before is None else before.add_(new)
        self._call_hooks(given)

    def install_doubtful(self, used: Collection[int]) -> None:
        """Give the shards of :meth:`fill` their gradients, where a rank brought one (``used``)."""
        doubtful, self._doubtful = self._doubtful, {}
        given = [index for index in sorted(doubtful) if index in used]
        with torch.no_grad():
            for index in given:
                self._give(index, doubtful[index], False)
        self._call_hooks(given)

    def _give(self, index: int, new: Tensor, in_place: bool) -> None:
        """The gradient ``new`` to one shard; ``in_place``: it lies where it is kept."""
        shard = self.buffer.slots[index].shard
        for hook in (shard._backward_hooks or {}).values():
            if (changed := hook(self._as_part(index, new))) is not None:
                new.copy_(local_values(changed))
        if shard.grad is not None:
            local_values(shard.grad).add_(new)
            return
        place = self._shard_gradient(index)
        if not in_place:
            place.copy_(new)
        shard.grad = self._as_part(index, place)

    def _call_hooks(self, given: list[int]) -> None:
        for index in given:
            shard = self.buffer.slots[index].shard
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


def group_size(*groups: Group | None) -> int:
    """Ranks that a gradient is the mean of."""
    size = 1
    for group in groups:
        size *= group.size if group is not None else 1
    return size
