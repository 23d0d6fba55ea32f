"""Dropout whose mask differs per rank on split activations, and modules fused away."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.comm.rng import rank_stream
from tpkernels.modules.class_swap import set_attributes, swap_class


def probability(module: nn.Module, dropout: float | str | None) -> float:
    """The dropout probability in force: a number, or ``p`` of what the dotted name leads to.

    0 outside training. The name may lead to an ``nn.Dropout`` or to a number.
    """
    if not module.training or dropout is None:
        return 0.0
    value: Any = dropout
    if isinstance(dropout, str):
        value = module
        for part in dropout.split("."):
            value = getattr(value, part)
    return float(value.p if isinstance(value, nn.Dropout) else value)


def sharded_dropout(x: Tensor, p: float, training: bool, group: Group) -> Tensor:
    """``F.dropout(x, p, training)`` on an activation of which each rank holds another part."""
    if not training or p == 0.0:
        return x
    with rank_stream(group, x.device):
        return F.dropout(x, p, True)


class ShardedDropout(nn.Module):
    """An ``nn.Dropout`` that acts on a split activation: every rank draws its own mask."""

    group: Group
    p: float

    @classmethod
    def shard_(cls, module: nn.Module, group: GroupLike) -> None:
        """Turn an ``nn.Dropout`` into this, in place."""
        swap_class(module, cls, group=resolve_group(group))

    def forward(self, x: Tensor) -> Tensor:
        return sharded_dropout(x, self.p, self.training, self.group)


class FusedActivation(nn.Module):
    """An activation module whose work the GEMM before it does: the identity.

    While someone hooks that layer, to see or change what comes before the activation, the layer
    leaves the activation out and this module applies it as it did.
    """

    fused_into: Any

    @classmethod
    def fuse_(cls, module: nn.Module, leaf: nn.Module) -> None:
        """Turn an activation module that follows the column-parallel ``leaf`` into this."""
        set_attributes(leaf, activation_follows=True)
        swap_class(module, cls, fused_into=leaf)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.fused_into.is_hooked else x
