"""Which rows each rank holds where a dimension (the sequence) is sharded between regions.

Sizes may be uneven, and are the same list on every rank.
"""

# R ranks, S the whole length of the dimension, s_r what rank r holds of it

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tpkernels.comm.group import group_by_name
from tpkernels.errors import ConfigError


def sequence_sizes(total: int, world: int) -> list[int]:
    """Rows of each of ``world`` ranks when a sequence of ``total`` is sharded: as even as can be.

    Ranks differ by one row at most (10 over 4: 3, 3, 2, 2), so that none is empty while there are
    as many rows as ranks; ``torch.chunk`` would give 3, 3, 3, 1.
    """
    return [total // world + (rank < total % world) for rank in range(world)]


def place_in(group_name: str) -> tuple[int, int]:
    """(number of ranks, this rank) of the group."""
    group = group_by_name(group_name)
    return (1, 0) if group is None else (group.size(), dist.get_rank(group))


def part_sizes(op: str, x: Tensor, dim: int, sizes: list[int] | None, group_name: str) -> list[int]:
    """Every rank's rows where ``x`` is this rank's part; None: all hold as many as this one."""
    world, rank = place_in(group_name)
    _check_dim(op, x, dim)
    if sizes is None:
        return [x.shape[dim]] * world
    return _checked(op, x, dim, sizes, world, sizes[rank] if len(sizes) == world else -1)


def whole_sizes(
    op: str, x: Tensor, dim: int, sizes: list[int] | None, group_name: str
) -> list[int]:
    """Every rank's rows where ``x`` is the whole; None: as :func:`sequence_sizes` shards it."""
    world, _ = place_in(group_name)
    _check_dim(op, x, dim)
    if sizes is None:
        return sequence_sizes(x.shape[dim], world)
    return _checked(op, x, dim, sizes, world, sum(sizes))


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(
            f"{op}: dim={dim} is not a dimension of x {tuple(x.shape)}; allowed: {-x.dim()} to "
            f"{x.dim() - 1}"
        )


def _checked(
    op: str, x: Tensor, dim: int, sizes: list[int], world: int, expected: int
) -> list[int]:
    if len(sizes) != world or x.shape[dim] != expected or min(sizes) < 0:
        raise ConfigError(
            f"{op}: sizes={list(sizes)} must name the rows of each of {world} ranks and fit "
            f"dimension {dim} of {tuple(x.shape)}, which has {x.shape[dim]}. Fix: give every rank "
            "the same list, with this rank's own size in its place"
        )
    return list(sizes)


def with_size(x: Tensor, dim: int, size: int) -> list[int]:
    """The shape of ``x`` with ``size`` along ``dim``."""
    shape = list(x.shape)
    shape[dim] = size
    return shape
