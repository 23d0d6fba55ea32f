"""Attention modules whose forward is kept: their projections are split by heads around it.

For modules that shape heads with ``-1`` (Hugging Face's) the forward runs unchanged on this
rank's heads, with its caches, masks and attention implementations.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group
from tpkernels.comm.regions import gather_from_tensor_model_parallel_region as gather_from_region
from tpkernels.comm.rng import rank_stream
from tpkernels.errors import ConfigError
from tpkernels.modules.arguments import ReplacedForward
from tpkernels.modules.class_swap import set_attributes, swap_class
from tpkernels.modules.dropout import probability
from tpkernels.modules.head_partition import HeadPartition
from tpkernels.modules.joint_projection import JointProjection
from tpkernels.modules.linear import ColumnParallelLinear
from tpkernels.modules.sequence import SequenceShards, active

WIDTHS = ("q_heads", "kv_heads", "q_width", "kv_width", "kv_groups")


@dataclass
class HeadSplit:
    """How a :class:`HeadShardedAttention` is split; one attribute, so that no name is taken.

    ``joint``: the projections that read one input; ``dropout`` of the attention weights: a
    probability, or the name of the ``nn.Dropout`` or number that has it. ``forward``: the names of
    its forward's arguments, of which the first is the input.
    """

    group: Group
    heads: HeadPartition
    dropout: float | str | None
    joint: JointProjection | None
    check: InputCheck = field(default_factory=InputCheck)
    forward: ReplacedForward | None = None
    layer: str = ""
    sequence: SequenceShards | None = None


class HeadShardedAttention(nn.Module):
    """Mixed into an attention module's class: its forward, on this rank's heads.

    Attention dropout draws from the rank's own stream until the output projection, whose result
    is replicated again. Attention weights in the result, [B, H, S, T], are gathered: an
    implementation that returns none (``sdpa``, the default) saves that traffic.

    On a sharded sequence the forward sees the gathered input, of which the projections' outputs
    are already computed; the output projection scatters again.
    """

    _tp: HeadSplit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        joint, shards = self._tp.joint, active(self._tp.sequence)
        with contextlib.nullcontext() if joint is None else joint.region(self._tp.layer):
            if shards is not None:
                args, kwargs = self._gathered(shards, args, kwargs)
            if probability(self, self._tp.dropout) == 0.0:
                result = super().forward(*args, **kwargs)
            else:
                with rank_stream(self._tp.group, next(self.parameters()).device):
                    result = super().forward(*args, **kwargs)
        return self._with_all_weights(result)

    def _gathered(
        self, shards: SequenceShards, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with all tokens of the input."""
        tp = self._tp
        first = tp.forward.names[0] if tp.forward is not None and tp.forward.names else ""
        x = args[0] if args else kwargs.get(first)
        if tp.joint is None or not isinstance(x, Tensor):
            raise ConfigError(
                f"{tp.layer or 'attention'}: on a sharded sequence, attention whose keys and "
                "values come from elsewhere is not supported. Fix: sequence_parallel=False"
            )
        gathered = tp.joint.gather(x, shards)
        return ((gathered, *args[1:]), kwargs) if args else (args, kwargs | {first: gathered})

    def _with_all_weights(self, result: Any) -> Any:
        """The result with its attention weights (eager attention returns them) of all heads."""
        tp = self._tp
        weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if not isinstance(weights, Tensor) or weights.dim() != 4 or tp.group.size == 1:
            return result
        if weights.shape[1] != tp.heads.local_heads(tp.group.rank):
            return result
        counts = [count for _, count in tp.heads.q]
        weights = gather_from_region(weights, tp.group.name, 1, counts)
        return (result[0], weights, *result[2:])


def shard_heads_(
    module: nn.Module,
    group: Group,
    heads: HeadPartition,
    *,
    widths: dict[str, str],
    dropout: float | str | None,
    projections: list[ColumnParallelLinear],
    out: nn.Module,
) -> None:
    """Give ``module`` this rank's head counts and join its (already split) projections, in place.

    ``widths``: attribute -> which of :data:`WIDTHS` it is; ``projections`` read one input; what
    follows ``out`` is replicated, also where ``module``'s own forward goes on after it.
    """
    rank = group.rank
    local = {
        "q_heads": heads.local_heads(rank),
        "kv_heads": heads.local_kv_heads(rank),
        "q_width": heads.local_heads(rank) * heads.head_dim,
        "kv_width": heads.local_kv_heads(rank) * heads.head_dim,
        "kv_groups": heads.local_heads(rank) // max(1, heads.local_kv_heads(rank)),
    }
    joint = JointProjection(projections) if projections else None
    for leaf in projections:
        set_attributes(leaf, joint=joint)
    if dropout not in (None, 0.0):
        set_attributes(out, ends_rank_stream=True)
    forward = ReplacedForward.of(module)
    split = HeadSplit(group, heads, dropout, joint, forward=forward)
    swap_class(module, HeadShardedAttention, _tp=split)
    set_attributes(module, **{name: local[meaning] for name, meaning in widths.items()})
