"""``TPAttention``: attention with its heads split over ranks; one all-reduce each way.

    Q, K, V = X Wq, X Wk, X Wv      column-split by heads
    Y = softmax(Q K^T) V Wo         Wo row-split by the same heads

Source: arXiv:1909.08053; grouped heads arXiv:2305.13245.
"""

# B batch, S queries, T keys, H query heads, G key-value heads, D head dimension, R ranks

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules.arguments import OWN_FORWARD, ReplacedForward
from tpkernels.modules.attend import attend, local_mask
from tpkernels.modules.class_swap import swap_class
from tpkernels.modules.dropout import probability, sharded_dropout
from tpkernels.modules.head_partition import HeadPartition
from tpkernels.modules.joint_projection import JointProjection
from tpkernels.modules.kv_cache import KVCacheLike
from tpkernels.modules.linear import linear_sizes
from tpkernels.modules.projections import split_output_, split_projections_, split_qkv_
from tpkernels.modules.rotary import apply_rotary, rotary_tables
from tpkernels.modules.sequence import SequenceShards, active, shards_of
from tpkernels.modules.style import SwapStyle


@dataclass
class AttentionSplit:
    """How a :class:`TPAttention` is split; one attribute, so that no name of the user's is taken.

    ``dropout`` (on the attention weights) and ``outer_dropout`` (on the output): a probability,
    or the name of the ``nn.Dropout`` or number that has it. ``mask_*``: how the forward of a
    replaced module took its mask.
    """

    group: Group
    heads: HeadPartition
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    qkv: str | None = None
    out: str = "o_proj"
    causal: bool = False
    dropout: float | str = 0.0
    outer_dropout: float | str = 0.0
    scale: float | None = None
    rope_theta: float | None = None
    layer_idx: int = 0
    mask_argument: str | None = None  # its name there
    mask_kind: str | None = None  # sdpa, additive or nonzero_keep
    mask_replaces_causal: bool = False  # causal only when no mask is given
    replaced: ReplacedForward = OWN_FORWARD
    own_keywords: bool = True  # the replaced forward takes what TPAttention's does
    check: InputCheck = field(default_factory=InputCheck)
    layer: str = ""
    sequence: SequenceShards | None = None


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
        sequence_parallel: input and output are this rank's shard [B, s_r, hidden] of the sequence;
            a :class:`SequenceShards` says how many tokens each rank holds (True: all as many).
            Masks and positions are of the whole sequence.
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.

    Raises:
        UnsupportedModuleError: heads that cannot be split, before any communication, saying what
            would work.
    """

    _tp: AttentionSplit

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
        sequence_parallel: bool | SequenceShards = False,
        group: GroupLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_counts(
            "TPAttention",
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError(
                    f"hidden_size={hidden_size} is not a multiple of num_heads={num_heads}. "
                    "Fix: give head_dim"
                )
            head_dim = hidden_size // num_heads
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout!r} must be at least 0 and less than 1")
        if rope_theta is not None and head_dim % 2:
            raise ConfigError(
                f"head_dim={head_dim} is odd, but rope_theta={rope_theta!r} rotates pairs of "
                "features. Fix: an even head_dim, or rope_theta=None"
            )
        group = resolve_group(group)
        partition = HeadPartition.of(
            num_heads,
            num_heads if num_kv_heads is None else num_kv_heads,
            head_dim,
            group.size,
            "TPAttention",
        )
        self._tp = AttentionSplit(
            group,
            partition,
            qkv="qkv_proj" if fused_qkv else None,
            causal=causal,
            dropout=dropout,
            scale=scale,
            rope_theta=rope_theta,
            layer_idx=layer_idx,
            sequence=shards_of(sequence_parallel),
        )
        q_rows, kv_rows = num_heads * head_dim, partition.num_kv_heads * head_dim
        make = {"device": device, "dtype": dtype}
        if fused_qkv:
            self.qkv_proj = nn.Linear(hidden_size, q_rows + 2 * kv_rows, bias, **make)
        else:
            self.q_proj = nn.Linear(hidden_size, q_rows, bias, **make)
            self.k_proj = nn.Linear(hidden_size, kv_rows, bias, **make)
            self.v_proj = nn.Linear(hidden_size, kv_rows, bias, **make)
        self.o_proj = nn.Linear(q_rows, hidden_size, bias if out_bias is None else out_bias, **make)
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
        own_keywords: bool = True,
        reduce_dtype: torch.dtype | None = None,
        sequence_parallel: bool | SequenceShards = False,
        name: str = "attention",
    ) -> None:
        """Turn a plain attention module into this, in place; its projections keep their keys.

        ``q``, ``k``, ``v`` or the fused ``qkv`` ([Q | K | V]) and ``out`` name them. ``dropout``
        and ``outer_dropout``: a probability, or the name of the attribute that has it.
        ``mask_argument``, ``mask_kind`` and ``mask_replaces_causal`` say how the original forward
        takes its mask: under which name; ``sdpa`` (bool True attends, float is added),
        ``additive`` or ``nonzero_keep`` (0 is hidden); and whether a mask switches causal off.
        ``own_keywords``: its forward means by ``attention_mask``, ``key_padding_mask``,
        ``context``, ``position_ids`` and ``cache`` what this class does; False refuses them.
        """
        group = resolve_group(group)
        _check_counts(name, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        heads = HeadPartition.of(num_heads, kv_heads, head_dim, group.size, name)
        q_width, kv_width = num_heads * head_dim, heads.num_kv_heads * head_dim
        widths = {q: q_width, k: kv_width, v: kv_width}
        if qkv is not None:
            widths = {qkv: q_width + 2 * kv_width}
        found = {leaf: linear_sizes(module, leaf, name)[1] for leaf in widths}
        found[out], widths[out] = linear_sizes(module, out, name)[0], q_width
        for leaf, width in widths.items():
            if found[leaf] != width:
                raise UnsupportedModuleError(
                    f"{name}: {leaf!r} has {found[leaf]} features, but {num_heads} heads and "
                    f"{heads.num_kv_heads} key-value heads of {head_dim} need {width}"
                )
        split = AttentionSplit(
            group,
            heads,
            q,
            k,
            v,
            qkv,
            out,
            causal=causal,
            dropout=dropout,
            outer_dropout=outer_dropout,
            scale=scale,
            mask_argument=mask_argument,
            mask_kind=mask_kind,
            mask_replaces_causal=mask_replaces_causal,
            replaced=ReplacedForward.of(module),
            own_keywords=own_keywords,
            sequence=shards_of(sequence_parallel),
        )
        swap_class(module, cls, _AsReplaced, _tp=split)
        module._split_leaves(reduce_dtype, name)  # type: ignore[operator]

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    @property
    def group(self) -> Group:
        """The ranks this module is split over."""
        return self._tp.group

    def _split_leaves(self, reduce_dtype: torch.dtype | None, name: str) -> None:
        tp = self._tp
        if tp.qkv is not None:
            split_qkv_(self.get_submodule(tp.qkv), tp.heads, tp.group, name)
        else:
            leaves = [self.get_submodule(leaf) for leaf in (tp.q, tp.k, tp.v)]
            split_projections_(leaves, tp.heads, tp.group, name)
        out = self.get_submodule(tp.out)
        split_output_(out, tp.heads, tp.group, name, reduce_dtype, tp.sequence)

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H_r, S, D] of x; k and v [B, G_r, T, D] of the context (x itself without one).

        x may be this rank's shard: S is the whole sequence then too.
        """
        tp, dim, shards = self._tp, self._tp.heads.head_dim, active(self._tp.sequence)
        if context is not None and (tp.qkv is not None or shards is not None):
            why, fix = "needs separate projections", "fused_qkv=False"
            if shards is not None:
                why, fix = "needs whole sequences", "sequence_parallel=False"
            raise ConfigError(f"{tp.layer or 'TPAttention'}: cross-attention {why}. Fix: {fix}")
        names = (tp.q, tp.k, tp.v) if tp.qkv is None else (tp.qkv,)
        leaves = [self.get_submodule(name) for name in names]
        joint: JointProjection = leaves[-1].joint  # type: ignore[assignment]
        with joint.region(tp.layer):
            if shards is not None:
                x = joint.gather(x, shards)
            q, *others = [
                leaf(x if i == 0 or context is None else context) for i, leaf in enumerate(leaves)
            ]
        if tp.qkv is not None:
            q_width = tp.heads.local_heads(tp.group.rank) * dim
            kv_width = tp.heads.local_kv_heads(tp.group.rank) * dim
            q, *others = q.split([q_width, kv_width, kv_width], dim=-1)
        k, v = others
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
    ) -> Tensor:
        """[B, S, hidden] -> [B, S, hidden], the same on all ranks (or shards of S, each its own).

        Args:
            x: [B, S, hidden], the same on all ranks.
            attention_mask: bool (True attends) or additive; [S, T], [B, S, T] or
                [B, 1 or H, S, T] (all H heads of the whole layer).
            key_padding_mask: [B, T], True where a key is real (Hugging Face's attention_mask).
            context: [B, T, hidden] for cross-attention.
            position_ids: [B, S] for rotary (default: counted on from the cache).
            cache: object with ``update(key, value, layer_idx)``; holds this rank's heads.
        """
        tp = self._tp
        if x.dim() != 3:
            raise ConfigError(f"x must be [B, S, hidden], got {tuple(x.shape)}")
        inputs = {
            "x": x,
            "attention_mask": attention_mask,
            "key_padding_mask": key_padding_mask,
            "context": context,
            "position_ids": position_ids,
        }
        shards = active(tp.sequence)
        if shards is None:
            tp.check(inputs, tp.group, "TPAttention")
        else:
            shards.check(x, tp.check, tp.group, "TPAttention")
        q, k, v = self._project(x, context)
        if tp.rope_theta is not None:
            if position_ids is None:
                past = 0
                if cache is not None:
                    past = cache.get_seq_length(tp.layer_idx)
                position_ids = torch.arange(past, past + q.shape[2], device=x.device)[None]
            cos, sin = rotary_tables(position_ids, tp.heads.head_dim, tp.rope_theta, q.dtype)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, tp.layer_idx)
        causal = tp.causal and context is None
        if attention_mask is not None:
            causal = causal and not tp.mask_replaces_causal
            if tp.mask_kind == "nonzero_keep":
                attention_mask = attention_mask != 0
            elif tp.mask_kind == "additive":
                attention_mask = attention_mask.to(q.dtype)
        own_heads = tp.heads.q[tp.group.rank]
        mask = local_mask(attention_mask, key_padding_mask, own_heads, tp.heads.num_heads, q.dtype)
        y = attend(
            q,
            k,
            v,
            tp.group,
            mask=mask,
            causal=causal,
            dropout=probability(self, tp.dropout),
            scale=tp.scale,
        )
        y = self.get_submodule(tp.out)(y.transpose(1, 2).flatten(2))
        outer = probability(self, tp.outer_dropout)
        if shards is not None:
            return sharded_dropout(y, outer, self.training, tp.group)
        return nn.functional.dropout(y, outer, self.training)

    def extra_repr(self) -> str:
        tp = self._tp
        causal = ", causal" if tp.causal else ""
        return f"{tp.heads.describe()}{causal}, rank {tp.group.rank} of {tp.group.size}"


def _check_counts(name: str, **counts: int | None) -> None:
    for key, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise ConfigError(f"{name}: {key}={count!r} must be a whole number (int), at least 1")
        if count is not None and count < 1:
            default = ". Fix: None for the default" if key in ("num_kv_heads", "head_dim") else ""
            raise ConfigError(f"{name}: {key}={count} must be at least 1{default}")


class _AsReplaced(nn.Module):
    """Takes what the replaced forward took, under its names."""

    _tp: AttentionSplit

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tp = self._tp
        named = tp.replaced.bind(args, kwargs, "TPAttention")
        x = tp.replaced.first(named, "TPAttention")
        mask = named.pop(tp.mask_argument, None) if tp.mask_argument is not None else None
        if mask is None and tp.own_keywords:
            mask = named.pop("attention_mask", None)
        unknown = [name for name in named if not (tp.own_keywords and name in _KEYWORDS)]
        if unknown:
            raise ConfigError(
                f"TPAttention: an attention that was replaced takes no {', '.join(unknown)}: what "
                "they would do to it is not known. Fix: strict=False with a plan that leaves it out"
            )
        return super().forward(x, mask, **named)


_KEYWORDS = ("key_padding_mask", "context", "position_ids", "cache")
