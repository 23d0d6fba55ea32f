"""``TPMLP``: the tensor-parallel MLP, plain or gated; one all-reduce each way.

    plain   Y = act(X A + a) B + b                    A column-split, B row-split
    gated   Y = (act(X G + g) * (X U + u)) D + d      G, U column-split, D row-split

Source: arXiv:1909.08053; gated forms arXiv:2002.05202.
"""

# M tokens, K hidden size, F intermediate size, R ranks

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules.arguments import OWN_FORWARD, ReplacedForward
from tpkernels.modules.class_swap import swap_class
from tpkernels.modules.dropout import probability, sharded_dropout
from tpkernels.modules.gated_product import gated_product
from tpkernels.modules.linear import ColumnParallelLinear, RowParallelLinear, linear_sizes
from tpkernels.modules.sequence import SEQUENCE, SequenceShards, active, shards_of
from tpkernels.modules.style import SwapStyle
from tpkernels.overlap import (
    all_gather_gemm,
    column_gemm_act,
    gemm_all_reduce,
    gemm_reduce_scatter,
    mlp,
)
from tpkernels.reference.activation import check_activation
from tpkernels.shard_spec import Chunk, chunk_sizes, layout_from_blocks


@dataclass
class MLPSplit:
    """How a :class:`TPMLP` is split; one attribute, so that no name of the user's is taken.

    ``dropout`` (on the split intermediate) and ``outer_dropout`` (on the replicated output): a
    probability, or the name of the ``nn.Dropout`` that has it.
    """

    group: Group
    activation: str
    up: str
    gate: str | None
    down: str
    fused: bool = False  # ``up`` computes gate and up, stacked
    gate_first: bool = True  # of a fused projection: which half is activated
    dropout: float | str = 0.0
    outer_dropout: float | str = 0.0
    reduce_dtype: torch.dtype | None = None
    replaced: ReplacedForward = OWN_FORWARD
    check: InputCheck = field(default_factory=InputCheck)
    layer: str = ""
    sequence: SequenceShards | None = None


class TPMLP(nn.Module):
    """A transformer's MLP, split over ranks.

    Equivalent to ``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))`` with ``gated``.

    Args:
        hidden_size: K, width of input and output.
        intermediate_size: F, need not divide by the ranks.
        activation: none, gelu, gelu_tanh, silu, relu or relu2.
        gated: SwiGLU and its kin; adds ``gate_proj``.
        bias: of every projection; the down projection's is added once.
        dropout: on the intermediate activation (its mask differs per rank).
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.
        reduce_dtype: dtype of the partial sums on the wire (None: the input's).
        sequence_parallel: input and output are this rank's shard [..., s_r, K] of the sequence;
            a :class:`SequenceShards` says how many tokens each rank holds (True: all as many).
        device, dtype: as for ``nn.Linear``.

    Submodules ``up_proj``, ``gate_proj`` and ``down_proj`` hold the weights. Input [..., K], the
    same on all ranks -> [..., K], the same on all ranks. Forward: one all-reduce; backward: one
    (sequence-parallel: a gather and a reduce-scatter instead; backward gathers x once more).
    """

    _tp: MLPSplit

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        group: GroupLike = None,
        reduce_dtype: torch.dtype | None = None,
        sequence_parallel: bool | SequenceShards = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout!r} must be at least 0 and less than 1")
        group = resolve_group(group)
        options = {"group": group, "device": device, "dtype": dtype}
        if gated:
            self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **options)
        self._tp = MLPSplit(
            group,
            activation,
            "up_proj",
            "gate_proj" if gated else None,
            "down_proj",
            dropout=dropout,
            reduce_dtype=reduce_dtype,
            sequence=shards_of(sequence_parallel),
        )

    @classmethod
    def shard_(
        cls,
        module: nn.Module,
        group: GroupLike,
        *,
        up: str,
        down: str,
        gate: str | None = None,
        activation: str = "gelu",
        fused: bool = False,
        gate_first: bool = True,
        dropout: float | str = 0.0,
        outer_dropout: float | str = 0.0,
        reduce_dtype: torch.dtype | None = None,
        sequence_parallel: bool | SequenceShards = False,
        name: str = "mlp",
    ) -> None:
        """Turn a dense MLP into this, in place: its linear layers keep their names and keys.

        ``up``, ``gate``, ``down`` name them; ``fused``: ``up`` computes gate and up in one, of
        which the first half is activated (``gate_first``) or the second. ``dropout`` and
        ``outer_dropout``: a probability or the name of the ``nn.Dropout`` that has it.
        """
        check_activation(activation)
        group = resolve_group(group)
        in_features, out_features = linear_sizes(module, up, name)
        layout = fused_layout(out_features, group, f"{name}.{up}") if fused else None
        width = out_features // 2 if fused else out_features
        taken, _ = linear_sizes(module, down, name)
        gated_alike = gate is None or linear_sizes(module, gate, name) == (in_features, width)
        if taken != width or not gated_alike:
            raise UnsupportedModuleError(
                f"{name}: {up!r} turns {in_features} features into {width}, but {down!r} takes "
                f"{taken}" + ("" if gated_alike else f" and {gate!r} has other sizes")
            )
        split = MLPSplit(
            group,
            activation,
            up,
            gate,
            down,
            fused,
            gate_first,
            dropout,
            outer_dropout,
            reduce_dtype,
            ReplacedForward.of(module),
            sequence=shards_of(sequence_parallel),
        )
        swap_class(module, cls, _AsReplaced, _tp=split)
        for leaf in (up, gate):
            if leaf is not None:
                ColumnParallelLinear.shard_(
                    module.get_submodule(leaf), group, name=f"{name}.{leaf}", layout=layout
                )
        # F splits as torch.chunk does on both sides, so the halves meet the down projection.
        RowParallelLinear.shard_(
            module.get_submodule(down), group, name=f"{name}.{down}", reduce_dtype=reduce_dtype
        )

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    @property
    def group(self) -> Group:
        """The ranks this module is split over."""
        return self._tp.group

    def _leaf(self, name: str) -> Any:
        """The linear layer of that dotted name."""
        return self._modules.get(name) or self.get_submodule(name)

    def _projections(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(w_up, b_up, w_gate, b_gate) of this rank."""
        tp = self._tp
        up = self._leaf(tp.up)
        weight, bias = up.local_weight(), up.local_bias()
        if not tp.fused:
            if tp.gate is None:
                return weight, bias, None, None
            gate = self._leaf(tp.gate)
            return weight, bias, gate.local_weight(), gate.local_bias()
        halves = weight.chunk(2) if weight.shape[0] else (weight, weight)
        biases = (None, None) if bias is None else bias.chunk(2) if bias.shape[0] else (bias, bias)
        first, second = (0, 1) if tp.gate_first else (1, 0)
        return halves[second], biases[second], halves[first], biases[first]

    def forward(self, x: Tensor) -> Tensor:
        tp, shards = self._tp, active(self._tp.sequence)
        if shards is None:
            tp.check({"input": x}, tp.group, "TPMLP")
        else:
            shards.check(x, tp.check, tp.group, "TPMLP")
        w_up, b_up, w_gate, b_gate = self._projections()
        down = self._leaf(tp.down)
        w_down, b_down = down.local_weight(), down.local_bias()
        p = probability(self, tp.dropout)
        options: dict[str, Any] = {"reduce_dtype": tp.reduce_dtype, "layer": tp.layer}
        if shards is None and p == 0.0:
            y = mlp(
                x,
                w_up,
                b_up,
                w_down,
                b_down,
                act=tp.activation,
                group_name=tp.group.name,
                w_gate=w_gate,
                b_gate=b_gate,
                **options,
            )
        else:
            h = self._intermediate(x, w_up, b_up, w_gate, b_gate)
            h = sharded_dropout(h, p, True, tp.group)
            if shards is None:
                y = gemm_all_reduce(h, w_down, b_down, tp.group.name, **options)
            else:
                options |= {"dim": SEQUENCE, "sizes": shards.of_whole(h)}
                y = gemm_reduce_scatter(h, w_down, b_down, tp.group.name, **options)
        outer = probability(self, tp.outer_dropout)
        if shards is not None:
            return sharded_dropout(y, outer, True, tp.group)
        return nn.functional.dropout(y, outer, True) if outer else y

    def _intermediate(
        self,
        x: Tensor,
        w_up: Tensor,
        b_up: Tensor | None,
        w_gate: Tensor | None,
        b_gate: Tensor | None,
    ) -> Tensor:
        """The activation between the projections, [..., S, F_r] also of a shard x."""
        if w_gate is None:
            return self._column(x, [w_up], [b_up], self._tp.activation)[0]
        gate, up = self._column(x, [w_gate, w_up], [b_gate, b_up], "none")
        return gated_product(gate, up, self._tp.activation)

    def _column(
        self, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str
    ) -> list[Tensor]:
        name, layer, shards = self._tp.group.name, self._tp.layer, active(self._tp.sequence)
        if shards is None:
            return column_gemm_act(x, weights, biases, act, name, layer=layer)
        sizes = shards.of_part(x, self._tp.group.rank)
        where: dict[str, Any] = {"dim": SEQUENCE, "sizes": sizes, "layer": layer}
        return all_gather_gemm(x, weights, biases, act, name, **where)[1]

    def extra_repr(self) -> str:
        tp = self._tp
        gated = tp.fused or tp.gate is not None
        return f"activation={tp.activation}, gated={gated}, rank {tp.group.rank} of {tp.group.size}"


class _AsReplaced(nn.Module):
    """Takes what the replaced forward took. Of that, only the input is read in an MLP."""

    _tp: MLPSplit

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        named = self._tp.replaced.bind(args, kwargs, "TPMLP")
        return super().forward(self._tp.replaced.first(named, "TPMLP"))


def fused_layout(out_features: int, group: Group, name: str) -> tuple[tuple[Chunk, ...], ...]:
    """The layout of a projection that stacks gate and up: each half is split by itself."""
    if out_features % 2:
        raise ConfigError(f"{name}: a fused gate and up projection needs an even out_features")
    half = out_features // 2
    sizes, start, rows = chunk_sizes(half, group.size), 0, []
    for size in sizes:
        rows.append((start, size))
        start += size
    return layout_from_blocks([(rows, half), (rows, half)])
