"""Attention on this rank's heads: masks of any usual form, grouped heads, own dropout stream."""

# B batch, H_r query heads here, G_r key-value heads here, S queries, T keys, D head dimension

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.comm.group import Group
from tpkernels.comm.rng import rank_stream
from tpkernels.errors import ConfigError


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` on q [B, H_r, S, D], k and v [B, G_r, T, D].

    ``mask``: bool (True attends) or additive, broadcastable to [B, H_r, S, T]. ``causal`` with
    S < T means that the queries are the last S positions. ``dropout`` > 0 draws this rank's own
    mask, since each rank holds other heads.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    if causal and mask is None and queries == keys:
        return _sdpa(q, k, v, group, None, True, dropout, scale)
    if causal and queries > 1:
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        allowed = allowed.tril(keys - queries)
        mask = allowed if mask is None else _both(mask, allowed)
    return _sdpa(q, k, v, group, mask, False, dropout, scale)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    options: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if dropout == 0.0:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with rank_stream(group, q.device):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)


def _both(mask: Tensor, allowed: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask & allowed
    return mask.masked_fill(~allowed, -torch.inf)


def local_mask(
    mask: Tensor | None,
    padding: Tensor | None,
    heads: tuple[int, int],
    num_heads: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """One mask for this rank's heads from the forms users have.

    Args:
        mask: bool (True attends) or additive; [S, T], [B, S, T] or [B, 1 or H, S, T].
        padding: [B, T], True (or 1) where a key is real.
        heads: (first, count) of this rank's query heads, to cut a mask that differs per head.
        num_heads: H of the whole layer.

    Returns:
        A mask broadcastable to [B, H_r, S, T], or None.
    """
    if mask is not None:
        if mask.dim() not in (2, 3, 4):
            raise ConfigError(
                f"attention_mask must be [S, T], [B, S, T] or [B, 1 or {num_heads}, S, T], got "
                f"{tuple(mask.shape)}"
            )
        if mask.dim() == 3:
            mask = mask[:, None]
        if mask.dim() == 4 and mask.shape[1] != 1:
            if mask.shape[1] != num_heads:
                raise ConfigError(
                    f"attention_mask has {mask.shape[1]} heads; allowed: 1 or {num_heads}"
                )
            mask = mask[:, heads[0] : heads[0] + heads[1]]
        if not mask.is_floating_point() and mask.dtype is not torch.bool:
            raise ConfigError(
                f"attention_mask has dtype {mask.dtype}; allowed: bool (True attends) or floating "
                "point (added to the scores)"
            )
        if mask.is_floating_point():
            mask = mask.to(dtype)
    if padding is not None:
        if padding.dim() != 2:
            raise ConfigError(f"key_padding_mask must be [B, T], got {tuple(padding.shape)}")
        real = padding.to(torch.bool)[:, None, None, :]
        mask = real if mask is None else _both(mask, real)
    return mask
