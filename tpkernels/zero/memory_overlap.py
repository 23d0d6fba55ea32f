"""Parameters that share memory without being one: shards of their own would untie them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.chunked_tensor import local_values
from tpkernels.errors import UnsupportedModuleError


class _Extent(NamedTuple):
    """Where the elements of a parameter lie: ``begin`` up to ``end``, with gaps perhaps."""

    device: str
    begin: int
    end: int
    name: str
    values: Tensor
    trained: bool


def refuse_overlaps(parameters: list[tuple[str, Tensor]]) -> None:
    """Raise where elements of two of ``parameters``, one of them trained, lie in one place.

    Parts of one memory that do not overlap, as those of an RNN's flat weights, are allowed.

    Raises:
        UnsupportedModuleError: naming both.
    """
    nearby: list[_Extent] = []
    for each in sorted(_extents(parameters), key=lambda each: each[:3]):
        nearby = [o for o in nearby if o.device == each.device and o.end > each.begin]
        for other in nearby:
            if (each.trained or other.trained) and _overlap(other, each):
                raise UnsupportedModuleError(
                    f"{other.name} and {each.name} share memory and are two parameters: zero() "
                    "would give each a shard of its own, and they would train apart. Fix: make "
                    f"them one nn.Parameter before zero(), as model.{each.name} = "
                    f"model.{other.name} does; or give one of them memory of its own (.clone())"
                )
        nearby.append(each)


def _extents(parameters: list[tuple[str, Tensor]]) -> list[_Extent]:
    found = []
    for name, parameter in parameters:
        values = local_values(parameter).detach()
        if values.is_meta or not values.numel():
            continue
        begin = values.data_ptr()
        end = begin + _reach(values) * values.element_size()
        found.append(_Extent(str(values.device), begin, end, name, values, parameter.requires_grad))
    return found


def _reach(values: Tensor) -> int:
    """Elements from the first to the last, gaps counted."""
    steps = zip(values.shape, values.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _overlap(first: _Extent, second: _Extent) -> bool:
    """Of extents that overlap: whether their elements do (columns of one matrix need not)."""
    size = first.values.element_size()
    ahead = second.begin - first.begin
    if size != second.values.element_size() or ahead % size:
        return True
    reach = max(_reach(first.values), ahead // size + _reach(second.values))
    if all(each.values.numel() == _reach(each.values) for each in (first, second)):
        return True
    taken = torch.zeros(reach, dtype=torch.bool)
    taken.as_strided(first.values.shape, first.values.stride()).fill_(True)
    view = taken.as_strided(second.values.shape, second.values.stride(), ahead // size)
    return bool(view.any())
