"""``TPAttention``: attention with its heads split over ranks; one all-reduce each way.

    Q, K, V = X Wq, X Wk, X Wv      column-split by heads
    Y = softmax(Q K^T) V Wo         Wo row-split by the same heads

Source: arXiv:1909.08053; grouped heads arXiv:2305.13245.
"""

# B batch, S queries, T keys, H query heads, G key-value heads, D head dimension, R ranks

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import FirstCalls, check_agreement
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.modules.attend import attend, local_mask
from tpkernels.modules.class_swap import set_attributes, swap_class
from tpkernels.modules.head_partition import HeadPartition, rows_layout
from tpkernels.modules.linear import ColumnParallelLinear, JointProjection, RowParallelLinear
from tpkernels.modules.rotary import apply_rotary, rotary_tables
from tpkernels.modules.style import SwapStyle
from tpkernels.shard_spec import layout_from_blocks


class KVCacheLike(Protocol):
    """What ``cache`` must offer; Hugging Face's ``Cache`` classes do."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class KVCache:
    """The plainest cache: keeps each layer's keys and values [B, G_r, T, D] and appends."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Append along T and return everything held for ``layer_idx``."""
        if layer_idx in self._held:
            old_key, old_value = self._held[layer_idx]
            key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        self._held[layer_idx] = key, value
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held for ``layer_idx``."""
        return self._held[layer_idx][0].shape[2] if layer_idx in self._held else 0


class TPAttention(nn.Module):
    """Multi-head attention split by heads: MHA, GQA and MQA; self- or cross-attention.

    Args:
        hidden_size: width of input and output.
        num_heads: H. num_kv_heads: G (default H); fewer than ranks are held by several ranks and
            their gradients summed.
        head_dim: D (default hidden_size / num_heads).
        bias: of the Q, K, V projections; out_bias (default ``bias``) of the output projection.
        fused_qkv: one projection ``qkv_proj`` that stacks [Q | K | V] instead of three.
        causal: each position sees itself and those before it.
        dropout: on the attention weights in training; each rank draws its own mask.
        rope_theta: rotary position embedding with this base; None: none.
        scale: of the scores (default D^-0.5).
        layer_idx: which entry of a cache is this layer's.
        reduce_dtype: dtype of the partial sums on the wire (None: the input's).
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.

    Raises:
        UnsupportedModuleError: heads that cannot be split, before any communication, saying what
            would work.
    """

    group: Group
    checks_inputs: bool = True
    outer_dropout: float | str = 0.0
    mask_argument: str | None = None  # the original forward's name for its mask
    mask_kind: str | None = None  # how the original read it: sdpa, additive, nonzero_keep
    mask_replaces_causal: bool = False  # causal only when no mask is given
    _names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    _qkv_name: str | None = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        out_bias: bool | None = None,
        fused_qkv: bool = False,
        causal: bool = False,
        dropout: float = 0.0,
        rope_theta: float | None = None,
        scale: float | None = None,
        layer_idx: int = 0,
        reduce_dtype: torch.dtype | None = None,
        group: GroupLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if num_heads < 1 or hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}. "
                    "Fix: give head_dim"
                )
            head_dim = hidden_size // num_heads
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout!r} must be at least 0 and less than 1")
        self.group = resolve_group(group)
        partition = HeadPartition.of(
            num_heads, num_kv_heads or num_heads, head_dim, self.group.size, "TPAttention"
        )
        self.heads = partition
        self.causal, self.dropout, self.scale, self.rope_theta = causal, dropout, scale, rope_theta
        self.layer_idx = layer_idx
        q_rows, kv_rows = num_heads * head_dim, partition.num_kv_heads * head_dim
        make = {"device": device, "dtype": dtype}
        if fused_qkv:
            self.qkv_proj = nn.Linear(hidden_size, q_rows + 2 * kv_rows, bias, **make)
            self._qkv_name = "qkv_proj"
        else:
            self.q_proj = nn.Linear(hidden_size, q_rows, bias, **make)
            self.k_proj = nn.Linear(hidden_size, kv_rows, bias, **make)
            self.v_proj = nn.Linear(hidden_size, kv_rows, bias, **make)
        self.o_proj = nn.Linear(q_rows, hidden_size, bias if out_bias is None else out_bias, **make)
        self._first_calls = FirstCalls()
        self._split_leaves(reduce_dtype, "TPAttention")

    @classmethod
    def shard_(
        cls,
        module: nn.Module,
        group: GroupLike,
        *,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        qkv: str | None = None,
        out: str = "o_proj",
        causal: bool = False,
        dropout: float | str = 0.0,
        outer_dropout: float | str = 0.0,
        scale: float | None = None,
        mask_argument: str | None = None,
        mask_kind: str | None = None,
        mask_replaces_causal: bool = False,
        reduce_dtype: torch.dtype | None = None,
        name: str = "attention",
    ) -> None:
        """Turn a plain attention module into this, in place; its projections keep their keys.

        ``q``, ``k``, ``v`` or the fused ``qkv`` ([Q | K | V]) and ``out`` name them. ``dropout``
        and ``outer_dropout``: a probability, or the name of the attribute that has it.
        ``mask_argument``, ``mask_kind`` and ``mask_replaces_causal`` say how the original forward
        takes its mask: under which name; ``sdpa`` (bool True attends, float is added),
        ``additive`` or ``nonzero_keep`` (0 is hidden); and whether a mask switches causal off.
        """
        group = resolve_group(group)
        heads = HeadPartition.of(num_heads, num_kv_heads or num_heads, head_dim, group.size, name)
        swap_class(
            module,
            cls,
            group=group,
            heads=heads,
            causal=causal,
            dropout=dropout,
            outer_dropout=outer_dropout,
            scale=scale,
            rope_theta=None,
            layer_idx=0,
            mask_argument=mask_argument,
            mask_kind=mask_kind,
            mask_replaces_causal=mask_replaces_causal,
            _names=(q, k, v, out),
            _qkv_name=qkv,
            _first_calls=FirstCalls(),
        )
        module._split_leaves(reduce_dtype, name)  # type: ignore[operator]

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    def _split_leaves(self, reduce_dtype: torch.dtype | None, name: str) -> None:
        q, k, v, out = self._names
        if self._qkv_name is not None:
            split_qkv_(self.get_submodule(self._qkv_name), self.heads, self.group, name)
        else:
            split_projections_(
                [self.get_submodule(n) for n in (q, k, v)], self.heads, self.group, name
            )
        split_output_(self.get_submodule(out), self.heads, self.group, name, reduce_dtype)

    def _number(self, value: float | str) -> float:
        if isinstance(value, str):
            found = self
            for part in value.split("."):
                found = getattr(found, part)
            value = found.p if isinstance(found, nn.Dropout) else found  # type: ignore[assignment]
        return float(value)  # type: ignore[arg-type]

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H_r, S, D] of x; k and v [B, G_r, T, D] of the context (x itself without one)."""
        rank, dim = self.group.rank, self.heads.head_dim
        if self._qkv_name is not None:
            if context is not None:
                raise ConfigError(
                    "TPAttention: cross-attention needs separate projections. Fix: fused_qkv=False"
                )
            widths = [self.heads.local_heads(rank) * dim] + [
                self.heads.local_kv_heads(rank) * dim
            ] * 2
            q, k, v = self.get_submodule(self._qkv_name)(x).split(widths, dim=-1)
        else:
            leaves = [self.get_submodule(name) for name in self._names[:3]]
            joint: JointProjection = leaves[1].joint  # type: ignore[assignment]
            with joint.region():
                q = leaves[0](x)
                source = x if context is None else context
                k, v = leaves[1](source), leaves[2](source)
        return tuple(t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in (q, k, v))  # type: ignore[return-value]

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCacheLike | None = None,
        **named: Any,
    ) -> Tensor:
        """[B, S, hidden] -> [B, S, hidden], the same on all ranks.

        Args:
            x: [B, S, hidden], the same on all ranks.
            attention_mask: bool (True attends) or additive; [S, T], [B, S, T] or
                [B, 1 or H, S, T] (all H heads of the whole layer).
            key_padding_mask: [B, T], True where a key is real (Hugging Face's attention_mask).
            context: [B, T, hidden] for cross-attention.
            position_ids: [B, S] for rotary (default: counted on from the cache).
            cache: object with ``update(key, value, layer_idx)``; holds this rank's heads.
        """
        if self.mask_argument is not None and self.mask_argument in named:
            attention_mask = named.pop(self.mask_argument)
        if named:
            raise ConfigError(f"TPAttention.forward does not take {', '.join(named)}")
        if x.dim() != 3:
            raise ConfigError(f"x must be [B, S, hidden], got {tuple(x.shape)}")
        if self.checks_inputs and self._first_calls.due():
            inputs = {"x": x, "attention_mask": attention_mask, "context": context}
            check_agreement(inputs, self.group, f"TPAttention {self.extra_repr()}")
        q, k, v = self._project(x, context)
        if self.rope_theta is not None:
            if position_ids is None:
                past = 0
                if cache is not None:
                    past = cache.get_seq_length(self.layer_idx)  # type: ignore[attr-defined]
                position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
            cos, sin = rotary_tables(position_ids, self.heads.head_dim, self.rope_theta, q.dtype)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        causal = self.causal and context is None
        if attention_mask is not None:
            causal = causal and not self.mask_replaces_causal
            if self.mask_kind == "nonzero_keep":
                attention_mask = attention_mask != 0
            elif self.mask_kind == "additive":
                attention_mask = attention_mask.to(q.dtype)
        mask = local_mask(
            attention_mask,
            key_padding_mask,
            self.heads.q[self.group.rank],
            self.heads.num_heads,
            q.dtype,
        )
        y = attend(
            q,
            k,
            v,
            self.group,
            mask=mask,
            causal=causal,
            dropout=self._number(self.dropout) if self.training else 0.0,
            scale=None if self.scale is None else float(self.scale),
        )
        y = self.get_submodule(self._names[3])(y.transpose(1, 2).flatten(2))
        outer = self._number(self.outer_dropout) if self.training else 0.0
        return nn.functional.dropout(y, outer, True) if outer else y

    def extra_repr(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"{self.heads.describe()}{causal}, rank {self.group.rank} of {self.group.size}"


def split_projections_(
    leaves: list[nn.Module], heads: HeadPartition, group: Group, name: str, joint: int = 3
) -> None:
    """Split separate Q, K, V projections by heads, in place, sharing one backward all-reduce.

    ``joint``: how many of the last leaves read one input (3: self-attention; 2: K and V only).
    """
    rows = [heads.q_rows(), heads.kv_rows(), heads.kv_rows()]
    for leaf, leaf_rows in zip(leaves, rows, strict=True):
        ColumnParallelLinear.shard_(leaf, group, name=name, layout=rows_layout(leaf_rows))
        set_attributes(leaf, checks_inputs=False)  # the attention's own input check covers them
    shared = JointProjection(leaves[3 - joint :])  # type: ignore[arg-type]
    for leaf in leaves[3 - joint :]:
        set_attributes(leaf, joint=shared)


def split_qkv_(leaf: nn.Module, heads: HeadPartition, group: Group, name: str) -> None:
    """Split a fused [Q | K | V] projection by heads, in place: each block by itself."""
    ColumnParallelLinear.shard_(leaf, group, name=name, layout=qkv_layout(heads))
    set_attributes(leaf, checks_inputs=False)


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
) -> None:
    """Split an output projection's in features by query heads, in place."""
    RowParallelLinear.shard_(
        leaf, group, name=name, layout=rows_layout(heads.q_rows()), reduce_dtype=reduce_dtype
    )
