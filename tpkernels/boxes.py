"""The boxes of a whole tensor that a rank holds: what checkpoints, copies and norms go through.

A range of a flattened [N, K] tensor is no box of it, but at most three: the rest of a row, whole
rows, the start of a row. Elements 2 to 10 of a [4, 3] tensor:

    .  .  a        a: offsets (0, 2), sizes (1, 1)
    b  b  b        b: offsets (1, 0), sizes (2, 3)
    b  b  b        c: offsets (3, 0), sizes (1, 2)
    c  c  .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from tpkernels.shard_spec import ShardSpec

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one number a dimension


@dataclass(frozen=True)
class Box:
    """A box of the whole tensor, and where it lies in this rank's local tensor.

    Attributes:
        offsets, sizes: its place in the whole tensor.
        start, shape: the range of the local tensor, which is 1-D, that holds it, and the shape to
            view that range in; ``shape=None`` is the local tensor as it is.
        corner: where it begins in that view.
        replicas: how many ranks hold each of its elements.
        written_elsewhere: whether a lower rank of a group that the tensor was split over before
            holds it too (and cuts it otherwise), so that this rank must not save it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    shape: tuple[int, ...] | None
    corner: tuple[int, ...]
    replicas: int = 1
    written_elsewhere: bool = False

    def view(self, local: Tensor) -> Tensor:
        """The box within this rank's ``local`` tensor: N-D, sharing storage."""
        if self.shape is not None:
            local = local.narrow(0, self.start, math.prod(self.shape)).view(self.shape)
        return _narrowed(local, self.corner, self.sizes)

    def of(self, whole: Tensor) -> Tensor:
        """The box within the ``whole`` tensor: N-D, sharing storage."""
        return _narrowed(whole, self.offsets, self.sizes)


def _narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Place]:
    """The fewest boxes that are elements [start, stop) of the flattened tensor, in their order.

    At most ``2 * (len(shape) - 1) + 1`` of them.
    """
    if stop <= start:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner  # rows that hold any of it

    def within_row(row: int, low: int, high: int) -> list[Place]:
        return [
            ((row, *offsets), (1, *sizes))
            for offsets, sizes in boxes_of_range(shape[1:], low, high)
        ]

    if first == last:
        return within_row(first, start - first * inner, stop - first * inner)
    boxes: list[Place] = []
    if start % inner:
        boxes += within_row(first, start % inner, inner)
        first += 1
    whole_rows = stop // inner - first
    if whole_rows:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((first, *zeros), (whole_rows, *shape[1:])))
    if stop % inner:
        boxes += within_row(last, 0, stop % inner)
    return boxes


def boxes_of(spec: ShardSpec) -> tuple[Box, ...]:
    """Every box of the whole tensor that the rank of ``spec`` holds; none of them is empty."""
    boxes = list(_own_boxes(spec))
    outer = spec.within
    while outer is not None:
        boxes = [moved for box in boxes for moved in _moved_through(outer, box)]
        outer = outer.within
    return tuple(boxes)


def _own_boxes(spec: ShardSpec) -> Iterator[Box]:
    """The boxes of the tensor that ``spec`` itself splits."""
    zeros = (0,) * len(spec.global_shape)
    for chunk in spec.chunks:
        if chunk.size == 0 or math.prod(spec.global_shape) == 0:
            continue
        held_by = spec.replicas(chunk)
        if spec.dim is None:
            start = chunk.local_offset
            for offsets, sizes in boxes_of_range(
                spec.global_shape, chunk.offset, chunk.offset + chunk.size
            ):
                yield Box(offsets, sizes, start, sizes, zeros, held_by)
                start += math.prod(sizes)
        else:
            offsets, sizes = _with(zeros, spec.dim, chunk.offset), spec.global_shape
            corner = _with(zeros, spec.dim, chunk.local_offset)
            yield Box(offsets, _with(sizes, spec.dim, chunk.size), 0, None, corner, held_by)


def _moved_through(outer: ShardSpec, box: Box) -> Iterator[Box]:
    """``box`` of the tensor that ``outer``'s rank holds, as boxes of the one that it splits."""
    dim = outer.dim or 0
    for chunk in outer.chunks:
        low = max(box.offsets[dim], chunk.local_offset)
        high = min(box.offsets[dim] + box.sizes[dim], chunk.local_offset + chunk.size)
        if high <= low:
            continue
        holders = outer.owners(chunk.offset)
        known = replace(
            box,
            replicas=box.replicas * len(holders),
            written_elsewhere=box.written_elsewhere or holders[0] != outer.rank,
        )
        skipped, moved = low - box.offsets[dim], low - chunk.local_offset + chunk.offset
        if outer.dim is not None:
            yield replace(
                known,
                offsets=_with(box.offsets, dim, moved),
                sizes=_with(box.sizes, dim, high - low),
                corner=_with(box.corner, dim, box.corner[dim] + skipped),
            )
            continue
        start = box.start + box.corner[0] + skipped  # a box of a flat tensor is a range
        for offsets, sizes in boxes_of_range(outer.global_shape, moved, moved + high - low):
            zeros = (0,) * len(sizes)
            yield replace(
                known, offsets=offsets, sizes=sizes, start=start, shape=sizes, corner=zeros
            )
            start += math.prod(sizes)


def _with(numbers: Sequence[int], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
