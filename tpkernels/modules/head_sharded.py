"""Attention modules whose forward is kept: their projections are split by heads around it.

For modules that shape heads with ``-1`` (Hugging Face's) the forward runs unchanged on this
rank's heads, with its caches, masks and attention implementations.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tpkernels.comm.group import Group
from tpkernels.comm.rng import rank_stream
from tpkernels.modules.class_swap import set_attributes, swap_class
from tpkernels.modules.head_partition import HeadPartition
from tpkernels.modules.linear import ColumnParallelLinear, JointProjection

WIDTHS = ("q_heads", "kv_heads", "q_width", "kv_width", "kv_groups")


class HeadShardedAttention(nn.Module):
    """Mixed into an attention module's class: its forward, on this rank's heads.

    Attention dropout draws from the rank's own stream until the output projection, whose result
    is replicated again.
    """

    group: Group
    heads: HeadPartition
    head_dropout: float | str | None
    joint_projection: JointProjection | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.joint_projection is None:
            return self._run(args, kwargs)
        with self.joint_projection.region():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.training or self._dropout_probability() == 0.0:
            return super().forward(*args, **kwargs)
        device = next(self.parameters()).device
        with rank_stream(self.group, device):
            return super().forward(*args, **kwargs)

    def _dropout_probability(self) -> float:
        value = self.head_dropout
        if isinstance(value, str):
            found: Any = self
            for part in value.split("."):
                found = getattr(found, part)
            value = found.p if isinstance(found, nn.Dropout) else found
        return float(value or 0.0)


def shard_heads_(
    module: nn.Module,
    group: Group,
    heads: HeadPartition,
    *,
    widths: dict[str, str],
    dropout: float | str | None,
    projections: list[ColumnParallelLinear],
) -> None:
    """Give ``module`` this rank's head counts and join its (already split) projections, in place.

    ``widths``: attribute -> which of :data:`WIDTHS` it is; ``projections`` read one input.
    """
    rank = group.rank
    local = {
        "q_heads": heads.local_heads(rank),
        "kv_heads": heads.local_kv_heads(rank),
        "q_width": heads.local_heads(rank) * heads.head_dim,
        "kv_width": heads.local_kv_heads(rank) * heads.head_dim,
        "kv_groups": heads.local_heads(rank) // max(1, heads.local_kv_heads(rank)),
    }
    joint = JointProjection(projections) if len(projections) > 1 else None
    for leaf in projections if joint is not None else ():
        set_attributes(leaf, joint=joint)
    swap_class(
        module,
        HeadShardedAttention,
        group=group,
        heads=heads,
        head_dropout=dropout,
        joint_projection=joint,
    )
    set_attributes(module, **{name: local[meaning] for name, meaning in widths.items()})
