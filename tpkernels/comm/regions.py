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

Source: arXiv:1909.08053 (f and g), arXiv:2205.05198 (g bar and its conjugate).
"""

# R ranks, S the split dimension's size, s_r what rank r holds of it

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import collectives
from tpkernels.comm.group import group_by_name
from tpkernels.errors import ConfigError
from tpkernels.library import define
from tpkernels.shard_spec import chunk_sizes


def _rank(group_name: str) -> int:
    group = group_by_name(group_name)
    return 0 if group is None else dist.get_rank(group)


def _own_slice(x: Tensor, sizes: list[int], dim: int, group_name: str) -> Tensor:
    rank = _rank(group_name)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def _with_size(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def split_sizes(total: int, group_name: str) -> list[int]:
    """How many of ``total`` rows each rank of the group holds (as ``torch.chunk`` splits)."""
    group = group_by_name(group_name)
    return [total] if group is None else chunk_sizes(total, group.size())


# --- ops ------------------------------------------------------------------------------------


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


_all_reduce = define(
    "all_reduce",
    "(Tensor x, str group_name) -> Tensor",
    collectives.all_reduce,
    lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=lambda ctx, grad: (grad, None),
    setup_context=_all_reduce_setup,
    autocast=False,
)


def _split_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sizes, ctx.dim, ctx.group_name = inputs


_all_gather = define(
    "all_gather",
    "(Tensor x, int[] sizes, int dim, str group_name) -> Tensor",
    collectives.all_gather,
    lambda x, sizes, dim, group_name: _with_size(x, dim, sum(sizes)),
    backward=lambda ctx, grad: (
        _own_slice(grad, ctx.sizes, ctx.dim, ctx.group_name),
        None,
        None,
        None,
    ),
    setup_context=_split_setup,
    autocast=False,
)

_reduce_scatter = define(
    "reduce_scatter",
    "(Tensor x, int[] sizes, int dim, str group_name) -> Tensor",
    collectives.reduce_scatter,
    lambda x, sizes, dim, group_name: _with_size(x, dim, sizes[_rank(group_name)]),
    backward=lambda ctx, grad: (
        _all_gather(grad, ctx.sizes, ctx.dim, ctx.group_name),
        None,
        None,
        None,
    ),
    setup_context=_split_setup,
    autocast=False,
)


# --- forms whose forward is local, or whose backward differs from the op's --------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group_name), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], dim: int, group_name: str) -> Tensor:
        ctx.sizes, ctx.dim, ctx.group_name = sizes, dim, group_name
        return _own_slice(x, sizes, dim, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_gather(grad, ctx.sizes, ctx.dim, ctx.group_name), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], dim: int, group_name: str) -> Tensor:
        ctx.sizes, ctx.dim, ctx.group_name = sizes, dim, group_name
        return _all_gather(x, sizes, dim, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, ctx.sizes, ctx.dim, ctx.group_name), None, None, None


def _checked_sizes(
    x: Tensor, sizes: list[int] | None, dim: int, name: str, held: bool
) -> list[int]:
    """``sizes`` of all ranks; ``held``: x is this rank's part, else the whole."""
    group = group_by_name(name)
    world, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    if sizes is None:
        return [x.shape[dim]] * world if held else split_sizes(x.shape[dim], name)
    expected = sizes[rank] if held and len(sizes) == world else sum(sizes)
    if len(sizes) != world or x.shape[dim] != expected:
        raise ConfigError(
            f"sizes={sizes} must name one size for each of {world} ranks and fit dimension {dim} "
            f"of {tuple(x.shape)}, which has {x.shape[dim]}"
        )
    return list(sizes)


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
    sizes = _checked_sizes(x, sizes, dim, group_name, held=True)
    return _all_gather(x, sizes, dim, group_name) if group_name else x


def scatter_to_tensor_model_parallel_region(
    x: Tensor, group_name: str, dim: int = -1, sizes: list[int] | None = None
) -> Tensor:
    """[..., S] -> [..., s_r]: one's own part along ``dim``; backward gathers all."""
    sizes = _checked_sizes(x, sizes, dim, group_name, held=False)
    return _Scatter.apply(x, sizes, dim, group_name) if group_name else x


def gather_from_sequence_parallel_region(
    x: Tensor, group_name: str, dim: int = 0, sizes: list[int] | None = None
) -> Tensor:
    """[s_r, ...] -> [S, ...]; backward reduce-scatters, since each rank used all of it."""
    sizes = _checked_sizes(x, sizes, dim, group_name, held=True)
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
    sizes = _checked_sizes(x, sizes, dim, group_name, held=False)
    return _reduce_scatter(x, sizes, dim, group_name) if group_name else x
