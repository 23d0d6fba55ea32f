"""``TPMLP``: the tensor-parallel MLP, plain or gated; one all-reduce each way.

    plain   Y = act(X A + a) B + b                    A column-split, B row-split
    gated   Y = (act(X G + g) * (X U + u)) D + d      G, U column-split, D row-split

Source: arXiv:1909.08053; gated forms arXiv:2002.05202.
"""

# M tokens, K hidden size, F intermediate size, R ranks

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import FirstCalls, check_agreement
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.modules.class_swap import swap_class
from tpkernels.modules.dropout import sharded_dropout
from tpkernels.modules.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.modules.style import SwapStyle
from tpkernels.overlap import column_gemm_act, gemm_all_reduce, mlp
from tpkernels.reference.activation import activation as apply_activation
from tpkernels.reference.activation import check_activation
from tpkernels.shard_spec import Chunk, chunk_sizes, layout_from_blocks


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
        device, dtype: as for ``nn.Linear``.

    Submodules ``up_proj``, ``gate_proj`` and ``down_proj`` hold the weights. Input [..., K], the
    same on all ranks -> [..., K], the same on all ranks. Forward: one all-reduce; backward: one.
    """

    group: Group
    activation: str
    dropout: float | str = 0.0  # a probability, or the name of the nn.Dropout inside
    outer_dropout: float | str = 0.0  # after the down projection, on the replicated output
    gate_first: bool = True  # of a fused projection: which half is activated
    reduce_dtype: torch.dtype | None = None
    checks_inputs: bool = True
    _names: tuple[str, str | None, str] = ("up_proj", "gate_proj", "down_proj")
    _fused: bool = False  # up_proj holds gate and up stacked

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout!r} must be at least 0 and less than 1")
        self.group = resolve_group(group)
        self.activation, self.dropout, self.reduce_dtype = activation, dropout, reduce_dtype
        options = {"group": self.group, "device": device, "dtype": dtype}
        if gated:
            self.gate_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, intermediate_size, bias, **options)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **options)
        self._names = ("up_proj", "gate_proj" if gated else None, "down_proj")
        self._first_calls = FirstCalls()

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
        name: str = "mlp",
    ) -> None:
        """Turn a dense MLP into this, in place: its linear layers keep their names and keys.

        ``up``, ``gate``, ``down`` name them; ``fused``: ``up`` computes gate and up in one, of
        which the first half is activated (``gate_first``) or the second. ``dropout`` and
        ``outer_dropout``: a probability or the name of the ``nn.Dropout`` that has it.
        """
        check_activation(activation)
        group = resolve_group(group)
        layout = None
        if fused:
            _, out_features = _features(module.get_submodule(up))
            layout = fused_layout(out_features, group, f"{name}.{up}")
        swap_class(
            module,
            cls,
            group=group,
            activation=activation,
            dropout=dropout,
            outer_dropout=outer_dropout,
            gate_first=gate_first,
            reduce_dtype=reduce_dtype,
            _names=(up, gate, down),
            _fused=fused,
            _first_calls=FirstCalls(),
        )
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

    def _leaf(self, index: int) -> Any:
        name = self._names[index]
        return None if name is None else self.get_submodule(name)

    def _probability(self, dropout: float | str) -> float:
        return float(self.get_submodule(dropout).p if isinstance(dropout, str) else dropout)  # type: ignore[arg-type]

    def _projections(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(w_up, b_up, w_gate, b_gate) of this rank."""
        up, gate = self._leaf(0), self._leaf(1)
        weight, bias = up.local_weight(), up.local_bias()
        if not self._fused:
            if gate is None:
                return weight, bias, None, None
            return weight, bias, gate.local_weight(), gate.local_bias()
        halves = weight.chunk(2) if weight.shape[0] else (weight, weight)
        biases = (None, None) if bias is None else bias.chunk(2) if bias.shape[0] else (bias, bias)
        first, second = (0, 1) if self.gate_first else (1, 0)
        return halves[second], biases[second], halves[first], biases[first]

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.checks_inputs and self._first_calls.due():
            check_agreement({"input": x}, self.group, f"TPMLP {self.extra_repr()}")
        w_up, b_up, w_gate, b_gate = self._projections()
        down = self._leaf(2)
        w_down, b_down = down.local_weight(), down.local_bias()
        p = self._probability(self.dropout) if self.training else 0.0
        if p == 0.0:
            y = mlp(
                x,
                w_up,
                b_up,
                w_down,
                b_down,
                act=self.activation,
                group_name=self.group.name,
                w_gate=w_gate,
                b_gate=b_gate,
                reduce_dtype=self.reduce_dtype,
            )
        else:
            h = self._intermediate(x, w_up, b_up, w_gate, b_gate)
            h = sharded_dropout(h, p, True, self.group)
            y = gemm_all_reduce(h, w_down, b_down, self.group.name, reduce_dtype=self.reduce_dtype)
        outer = self._probability(self.outer_dropout) if self.training else 0.0
        return nn.functional.dropout(y, outer, True) if outer else y

    def _intermediate(
        self,
        x: Tensor,
        w_up: Tensor,
        b_up: Tensor | None,
        w_gate: Tensor | None,
        b_gate: Tensor | None,
    ) -> Tensor:
        name = self.group.name
        if w_gate is None:
            return column_gemm_act(x, [w_up], [b_up], self.activation, name)[0]
        gate, up = column_gemm_act(x, [w_gate, w_up], [b_gate, b_up], "none", name)
        return apply_activation(gate, self.activation) * up

    def extra_repr(self) -> str:
        gated = self._fused or self._names[1] is not None
        return (
            f"activation={self.activation}, gated={gated}, rank {self.group.rank} of "
            f"{self.group.size}"
        )


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


def _features(leaf: nn.Module) -> tuple[int, int]:
    if isinstance(leaf, nn.Linear):
        return leaf.in_features, leaf.out_features
    weight: Tensor = leaf.weight  # type: ignore[assignment]
    return weight.shape[0], weight.shape[1]
