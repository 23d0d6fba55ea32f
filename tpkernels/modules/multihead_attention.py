"""``TPMultiheadAttention``: ``nn.MultiheadAttention`` split by heads, same call, same keys."""

# L queries, S keys, B batch, E embedding, H heads

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.group import GroupLike, resolve_group
from tpkernels.comm.regions import gather_from_tensor_model_parallel_region as gather_from_region
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules.attend import attend, local_mask
from tpkernels.modules.class_swap import swap_class
from tpkernels.modules.dropout import probability, sharded_dropout
from tpkernels.modules.head_partition import HeadPartition
from tpkernels.modules.head_sharded import HeadSplit
from tpkernels.modules.parameters import layout_spec, local_part, shard_parameter_
from tpkernels.modules.projections import qkv_layout, split_output_
from tpkernels.modules.sequence import SEQUENCE, SequenceShards, active, shards_of
from tpkernels.modules.style import SwapStyle
from tpkernels.overlap import all_gather_gemm, column_gemm_act


class TPMultiheadAttention(nn.Module):
    """An ``nn.MultiheadAttention`` whose heads are split; made by :meth:`shard_`, in place.

    ``in_proj_weight`` [3E, E] is split as three blocks by heads, ``out_proj`` by rows. The call
    and its results are ``nn.MultiheadAttention``'s, returned weights included. With
    ``sequence_parallel``, query, key and value are one tensor, this rank's shard along dimension
    -2 (the batch where it comes second: tokens either way), and so is the output.
    """

    _tp: HeadSplit
    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Module
    dropout: float
    batch_first: bool
    training: bool

    @classmethod
    def shard_(
        cls,
        module: nn.Module,
        group: GroupLike,
        *,
        sequence_parallel: bool | SequenceShards = False,
        name: str = "self_attn",
    ) -> None:
        """Turn an ``nn.MultiheadAttention`` into this, in place."""
        group, sequence = resolve_group(group), shards_of(sequence_parallel)
        if not isinstance(module, nn.MultiheadAttention):
            raise UnsupportedModuleError(
                f"{name}: expected nn.MultiheadAttention, got {type(module).__name__}"
            )
        for option, off in (("bias_k", None), ("add_zero_attn", False)):
            if getattr(module, option) is not off:
                raise UnsupportedModuleError(f"{name}: {option} cannot be split over heads")
        if not module._qkv_same_embed_dim:
            raise UnsupportedModuleError(
                f"{name}: kdim or vdim differ from embed_dim; only a shared embed_dim can be split"
            )
        heads = HeadPartition.of(
            module.num_heads, module.num_heads, module.head_dim, group.size, name
        )
        swap_class(module, cls, _tp=HeadSplit(group, heads, "dropout", None, sequence=sequence))
        split_output_(module.out_proj, heads, group, f"{name}.out_proj", sequence=sequence)
        for leaf in ("in_proj_weight", "in_proj_bias"):
            dense = module._parameters.get(leaf)
            if dense is not None:
                spec = layout_spec(dense.shape, 0, group, qkv_layout(heads))
                shard_parameter_(module, leaf, spec, group)

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; all arguments the same on all ranks."""
        if is_causal and attn_mask is None:
            raise ConfigError("is_causal=True needs attn_mask, as in nn.MultiheadAttention")
        inputs = {
            "query": query,
            "key": key,
            "value": value,
            "key_padding_mask": key_padding_mask,
            "attn_mask": attn_mask,
        }
        shards, batched = active(self._tp.sequence), query.dim() == 3
        if shards is None:
            self._tp.check(inputs, self._tp.group, "nn.MultiheadAttention")
            projected = self._projected(query, key, value, batched)
        else:
            shards.check(query, self._tp.check, self._tp.group, "nn.MultiheadAttention")
            projected = self._gathered(shards, query, key, value, batched)
        q, k, v = (
            t.unflatten(-1, (-1, self._tp.heads.head_dim)).transpose(1, 2) for t in projected
        )
        # As PyTorch: the hint says what attn_mask is, so that it need not be read.
        causal = is_causal and key_padding_mask is None and not need_weights
        causal = causal and q.shape[2] == k.shape[2]
        mask = self._mask(None if causal else attn_mask, key_padding_mask, q, batched)
        p = probability(self, self._tp.dropout)
        if need_weights:
            y, weights = self._with_weights(q, k, v, mask, p, average_attn_weights)
        else:
            y = attend(q, k, v, self._tp.group, mask=mask, causal=causal, dropout=p)
            weights = None
        y = y.transpose(1, 2).flatten(2)
        if shards is not None:  # scattered along the dimension that was gathered
            y = self.out_proj(self._as_given(y, batched))
        else:
            y = self._as_given(self.out_proj(y), batched)
        return y, weights if batched or weights is None else weights[0]

    def _as_given(self, y: Tensor, batched: bool) -> Tensor:
        """y [B, L, E] in the layout of the arguments."""
        if not batched:
            return y[0]
        return y if self.batch_first else y.transpose(0, 1)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> list[Tensor]:
        """q, k and v, each [B, L or S, E_r]."""
        shared = (query is key, key is value)
        q_in, k_in, v_in = (self._batch_first(t, batched) for t in (query, key, value))
        if shared == (True, True):
            k_in = v_in = q_in
        elif shared[1]:
            v_in = k_in
        return self._project(q_in, k_in, v_in)

    def _gathered(
        self, shards: SequenceShards, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> list[Tensor]:
        """The same of all tokens, where the one input is this rank's shard."""
        if not (query is key and key is value):
            what = self._tp.layer or "nn.MultiheadAttention"
            raise ConfigError(
                f"{what}: on a sharded sequence query, key and value must be one tensor; "
                "cross-attention is not supported. "
                "Fix: sequence_parallel=False"
            )
        weights, biases = self._weights()
        where: dict[str, Any] = {"dim": SEQUENCE, "sizes": shards.sizes, "layer": self._tp.layer}
        name = self._tp.group.name
        _, projected = all_gather_gemm(query, weights, biases, "none", name, **where)
        return [self._batch_first(t, batched) for t in projected]

    def _weights(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """This rank's weights and biases of q, k and v."""
        weight = local_part(self.in_proj_weight, self._tp.group, "in_proj_weight")
        rows = weight.shape[0] // 3  # q, k and v have equally many heads
        weights = list(weight.split(rows)) if rows else [weight] * 3
        if self.in_proj_bias is None:
            biases: list[Tensor | None] = [None] * 3
        else:
            bias = local_part(self.in_proj_bias, self._tp.group, "in_proj_bias")
            biases = list(bias.split(rows)) if rows else [bias] * 3
        return weights, biases

    def _project(self, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> list[Tensor]:
        weights, biases = self._weights()

        def column(x: Tensor, which: slice) -> list[Tensor]:
            name, layer = self._tp.group.name, self._tp.layer
            return column_gemm_act(x, weights[which], biases[which], "none", name, layer=layer)

        if q_in is k_in and k_in is v_in:
            return column(q_in, slice(3))
        q = column(q_in, slice(1))
        if k_in is v_in:
            return q + column(k_in, slice(1, 3))
        return q + column(k_in, slice(1, 2)) + column(v_in, slice(2, 3))

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, batched: bool
    ) -> Tensor | None:
        """Ours from nn.MultiheadAttention's, where a bool True means *not* allowed."""
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = ~attn_mask
            if attn_mask.dim() == 3:  # [B * H, L, S]
                attn_mask = attn_mask.unflatten(0, (-1, self._tp.heads.num_heads))
        real = None
        if padding is not None:
            padding = padding if batched else padding[None]
            if padding.is_floating_point():
                add = padding[:, None, None, :]
                if attn_mask is None:
                    attn_mask = add
                elif attn_mask.dtype is torch.bool:
                    attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(add.dtype) + add
                else:
                    attn_mask = attn_mask + add
            else:
                real = ~padding.to(torch.bool)
        first_and_count = self._tp.heads.q[self._tp.group.rank]
        return local_mask(attn_mask, real, first_and_count, self._tp.heads.num_heads, q.dtype)

    def _with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, average: bool
    ) -> tuple[Tensor, Tensor]:
        """(output of this rank's heads, weights of all heads or their average [B, (H,) L, S])."""
        scores = q @ k.transpose(-2, -1) * self._tp.heads.head_dim**-0.5
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
            )
        weights = torch.softmax(scores, dim=-1)
        if p > 0.0:
            weights = sharded_dropout(weights, p, True, self._tp.group)
        counts = [count for _, count in self._tp.heads.q]
        every = gather_from_region(weights, self._tp.group.name, 1, counts)
        return weights @ v, every.mean(1) if average else every
