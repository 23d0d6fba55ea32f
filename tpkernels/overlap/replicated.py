"""Gradients of rows that several ranks hold: summed over the holders, whoever used them.

With fewer key-value heads than ranks, a key-value head's weights are held by several ranks and
each computes a part of their gradient. Forward is the identity; backward adds the parts up. Rows
that one rank holds alone are not sent.
"""

# R ranks, N_rep rows of the global weight held by more than one rank

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels.comm.collectives import all_reduce_async
from tpkernels.library import define
from tpkernels.shard_spec import ShardSpec


def _run(
    grad: Tensor, local: list[int], place: list[int], size: list[int], rows: int, group_name: str
) -> Tensor:
    total = grad.new_zeros((rows, *grad.shape[1:]))
    for start, target, count in zip(local, place, size, strict=True):
        total[target : target + count] = grad[start : start + count]
    all_reduce_async(total, group_name).wait()
    result = grad.clone(memory_format=torch.contiguous_format)
    for start, target, count in zip(local, place, size, strict=True):
        result[start : start + count] = total[target : target + count]
    return result


def _fake(
    grad: Tensor, local: list[int], place: list[int], size: list[int], rows: int, group_name: str
) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


_sum_replicated = define(
    "sum_replicated",
    "(Tensor grad, int[] local, int[] place, int[] size, int rows, str group_name) -> Tensor",
    _run,
    _fake,
    autocast=False,
)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, *plan: Any) -> Tensor:
        ctx.plan = plan
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        local, place, size, rows, dim, group_name = ctx.plan
        summed = _sum_replicated(grad.movedim(dim, 0), local, place, size, rows, group_name)
        return (summed.movedim(0, dim), *([None] * len(ctx.plan)))


def sum_replicated_gradient(weight: Tensor, spec: ShardSpec | None, group_name: str) -> Tensor:
    """``weight`` itself; in backward, rows that several ranks hold get the sum of their gradients.

    ``weight`` is the local tensor that ``spec`` describes. Collective in backward, over the whole
    group, of the replicated rows only.
    """
    if spec is None or not group_name or not spec.is_replicated or not weight.requires_grad:
        return weight
    places: dict[int, int] = {}  # global offset of a replicated chunk -> row in the wire buffer
    rows = 0
    for chunk in sorted({c for held in spec.layout for c in held}, key=lambda c: c.offset):
        if spec.replicas(chunk) > 1 and chunk.offset not in places:
            places[chunk.offset] = rows
            rows += chunk.size
    mine = [c for c in spec.chunks if c.offset in places and c.size]
    return _Identity.apply(
        weight,
        [c.local_offset for c in mine],
        [places[c.offset] for c in mine],
        [c.size for c in mine],
        rows,
        spec.dim,
        group_name,
    )
