"""Splitting an attention's projections by heads, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tpkernels.comm.group import Group
from tpkernels.modules.class_swap import set_attributes
from tpkernels.modules.head_partition import HeadPartition, rows_layout
from tpkernels.modules.joint_projection import JointProjection
from tpkernels.modules.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.modules.sequence import SequenceShards
from tpkernels.shard_spec import layout_from_blocks


def split_projections_(
    leaves: list[nn.Module], heads: HeadPartition, group: Group, name: str, joint: int = 3
) -> None:
    """Split separate Q, K, V projections by heads, in place, sharing one backward all-reduce.

    ``joint``: how many of the last leaves read one input (3: self-attention; 2: K and V only).
    """
    rows = [heads.q_rows(), heads.kv_rows(), heads.kv_rows()]
    leaf: Any
    for leaf, leaf_rows in zip(leaves, rows, strict=True):
        ColumnParallelLinear.shard_(leaf, group, name=name, layout=rows_layout(leaf_rows))
        leaf.check.enabled = False  # the attention's own input check covers them
    shared = JointProjection(leaves[3 - joint :])  # type: ignore[arg-type]
    for leaf in leaves[3 - joint :]:
        set_attributes(leaf, joint=shared)


def split_qkv_(leaf: Any, heads: HeadPartition, group: Group, name: str) -> None:
    """Split a fused [Q | K | V] projection by heads, in place: each block by itself."""
    ColumnParallelLinear.shard_(leaf, group, name=name, layout=qkv_layout(heads))
    set_attributes(leaf, joint=JointProjection([leaf]))
    leaf.check.enabled = False


def qkv_layout(heads: HeadPartition) -> Any:
    """The layout of stacked [Q | K | V] rows."""
    q_total = heads.num_heads * heads.head_dim
    kv_total = heads.num_kv_heads * heads.head_dim
    return layout_from_blocks(
        [(heads.q_rows(), q_total), (heads.kv_rows(), kv_total), (heads.kv_rows(), kv_total)]
    )


def split_output_(
    leaf: nn.Module,
    heads: HeadPartition,
    group: Group,
    name: str,
    reduce_dtype: torch.dtype | None = None,
    sequence: SequenceShards | None = None,
) -> None:
    """Split an output projection's in features by query heads, in place."""
    RowParallelLinear.shard_(
        leaf,
        group,
        name=name,
        layout=rows_layout(heads.q_rows()),
        reduce_dtype=reduce_dtype,
        sequence_parallel=sequence or False,
    )
