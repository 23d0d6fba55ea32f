"""Megatron's differentiable collectives, by group name, under Megatron's names.

A rank's gradient is that of its own loss, which is the same replicated value on every rank:

===============================================  ==============  ==============
function                                         forward         backward
===============================================  ==============  ==============
copy_to_tensor_model_parallel_region             identity        all-reduce
reduce_from_tensor_model_parallel_region         all-reduce      identity
gather_from_tensor_model_parallel_region         all-gather      own slice
scatter_to_tensor_model_parallel_region          own slice       all-gather
gather_from_sequence_parallel_region             all-gather      reduce-scatter
scatter_to_sequence_parallel_region              own slice       all-gather
reduce_scatter_to_sequence_parallel_region       reduce-scatter  all-gather
===============================================  ==============  ==============

The backward of each is its conjugate from the same table, so that second derivatives are right too.
Source: arXiv:1909.08053 (f and g), arXiv:2205.05198 (g bar and its conjugate).
"""

# R ranks, S the split dimension's size, s_r what rank r holds of it

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import collectives
from tpkernels.comm.direct import sum_in_place
from tpkernels.comm.group import group_by_name
from tpkernels.errors import ConfigError
from tpkernels.library import define
from tpkernels.shard_spec import chunk_sizes


def split_sizes(total: int, group_name: str) -> list[int]:
    """How many of ``total`` rows each rank of the group holds (as ``torch.chunk`` splits)."""
    group = group_by_name(group_name)
    return [total] if group is None else chunk_sizes(total, group.size())


# --- ops: `sizes`, s_r of every rank, may be None and is checked inside -----------------------


def _place(group_name: str) -> tuple[int, int]:
    """(number of ranks, this rank)."""
    group = group_by_name(group_name)
    return (1, 0) if group is None else (group.size(), dist.get_rank(group))


def _part_sizes(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> list[int]:
    """The ranks' sizes where x is this rank's part; by default all parts are alike."""
    world, rank = _place(group_name)
    if sizes is None:
        return [x.shape[dim]] * world
    return _checked(x, sizes, dim, world, sizes[rank] if len(sizes) == world else -1)


def _whole_sizes(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> list[int]:
    """The ranks' sizes where x is the whole; by default as ``torch.chunk`` splits."""
    if sizes is None:
        return split_sizes(x.shape[dim], group_name)
    return _checked(x, sizes, dim, _place(group_name)[0], sum(sizes))


def _checked(x: Tensor, sizes: list[int], dim: int, world: int, expected: int) -> list[int]:
    if len(sizes) != world or x.shape[dim] != expected:
        raise ConfigError(
            f"sizes={list(sizes)} must name one size for each of {world} ranks and fit dimension "
            f"{dim} of {tuple(x.shape)}, which has {x.shape[dim]}"
        )
    return list(sizes)


def _with_size(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _part_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sizes, ctx.dim, ctx.group_name = inputs
    ctx.sizes = _part_sizes(x, sizes, ctx.dim, ctx.group_name)


def _whole_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sizes, ctx.dim, ctx.group_name = inputs
    ctx.sizes = _whole_sizes(x, sizes, ctx.dim, ctx.group_name)


def _all_gather_run(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
    return collectives.all_gather(x, _part_sizes(x, sizes, dim, group_name), dim, group_name)


def _all_gather_fake(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
    return _with_size(x, dim, sum(_part_sizes(x, sizes, dim, group_name)))


def _reduce_scatter_run(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
    return collectives.reduce_scatter(x, _whole_sizes(x, sizes, dim, group_name), dim, group_name)


def _own_part_run(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
    sizes, rank = _whole_sizes(x, sizes, dim, group_name), _place(group_name)[1]
    part = x.narrow(dim, sum(sizes[:rank]), sizes[rank])
    return part.clone(memory_format=torch.contiguous_format)


def _own_part_fake(x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
    rank = _place(group_name)[1]
    return _with_size(x, dim, _whole_sizes(x, sizes, dim, group_name)[rank])


def _all_reduce_run(x: Tensor, group_name: str) -> Tensor:
    return sum_in_place(x.clone(memory_format=torch.contiguous_format), group_name)


_SPLIT_SIGNATURE = "(Tensor x, SymInt[]? sizes, int dim, str group_name) -> Tensor"

_all_reduce = define(
    "all_reduce",
    "(Tensor x, str group_name) -> Tensor",
    _all_reduce_run,
    lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=lambda ctx, grad: (_Copy.apply(grad, ctx.group_name), None),
    setup_context=_all_reduce_setup,
    autocast=False,
)

_all_gather = define(
    "all_gather",
    _SPLIT_SIGNATURE,
    _all_gather_run,
    _all_gather_fake,
    backward=lambda ctx, grad: (
        _own_part(grad, ctx.sizes, ctx.dim, ctx.group_name),
        None,
        None,
        None,
    ),
    setup_context=_part_setup,
    autocast=False,
)

_own_part: Any = define(
    "own_part",
    _SPLIT_SIGNATURE,
    _own_part_run,
    _own_part_fake,
    backward=lambda ctx, grad: (
        _all_gather(grad, ctx.sizes, ctx.dim, ctx.group_name),
        None,
        None,
        None,
    ),
    setup_context=_whole_setup,
    autocast=False,
)

_reduce_scatter = define(
    "reduce_scatter",
    _SPLIT_SIGNATURE,
    _reduce_scatter_run,
    _own_part_fake,
    backward=lambda ctx, grad: (
        _GatherSequence.apply(grad, ctx.sizes, ctx.dim, ctx.group_name),
        None,
        None,
        None,
    ),
    setup_context=_whole_setup,
    autocast=False,
)


# --- forms whose forward is the identity, or whose backward differs from the op's -------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group_name), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int] | None, dim: int, group_name: str) -> Tensor:
        ctx.sizes, ctx.dim, ctx.group_name = sizes, dim, group_name
        return _all_gather(x, sizes, dim, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.sizes, ctx.dim, ctx.group_name), None, None, None


def copy_to_tensor_model_parallel_region(x: Tensor, group_name: str) -> Tensor:
    """Identity forward, all-reduce of the gradient backward (Megatron's f)."""
    return _Copy.apply(x, group_name) if group_name else x


def reduce_from_tensor_model_parallel_region(x: Tensor, group_name: str) -> Tensor:
    """All-reduce forward, identity backward (Megatron's g); x is not modified."""
    return _all_reduce(x, group_name) if group_name else x


def gather_from_tensor_model_parallel_region(
    x: Tensor, group_name: str, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """[..., s_r] -> [..., S]: all ranks' parts along ``dim``; backward keeps one's own part.

    ``sizes``: s_r of every rank; None: all hold as much as this one.
    """
    return _all_gather(x, sizes, dim, group_name) if group_name else x


def scatter_to_tensor_model_parallel_region(
    x: Tensor, group_name: str, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """[..., S] -> [..., s_r]: one's own part along ``dim``; backward gathers all."""
    return _own_part(x, sizes, dim, group_name) if group_name else x


def gather_from_sequence_parallel_region(
    x: Tensor, group_name: str, dim: int = 0, sizes: list[int] | None = None
) -> Tensor:
    """[s_r, ...] -> [S, ...]; backward reduce-scatters, since each rank used all of it."""
    return _GatherSequence.apply(x, sizes, dim, group_name) if group_name else x


def scatter_to_sequence_parallel_region(
    x: Tensor, group_name: str, dim: int = 0, sizes: list[int] | None = None
) -> Tensor:
    """[S, ...] -> [s_r, ...]; backward gathers."""
    return scatter_to_tensor_model_parallel_region(x, group_name, dim, sizes)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, group_name: str, dim: int = 0, sizes: list[int] | None = None
) -> Tensor:
    """[S, ...] partial sums -> [s_r, ...] of their total; backward gathers."""
    return _reduce_scatter(x, sizes, dim, group_name) if group_name else x
