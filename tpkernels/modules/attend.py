"""Attention on this rank's heads: masks of any usual form, grouped heads, own dropout stream."""

# B batch, H_r query heads here, G_r key-value heads here, S queries, T keys, D head dimension

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from tpkernels.comm.group import Group
from tpkernels.comm.rng import rank_stream
from tpkernels.errors import ConfigError

FLASH_HEAD_DIM = 256  # the widest head the flash kernels take


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

    Called so that a fused kernel can serve it: causal needs no mask tensor where S == T, where
    S == 1, and on CUDA in bf16 and fp16 with S < T; grouped heads never fall to the kernel that
    writes out all scores.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    on_flash = mask is None and flash_takes(q)
    causal = causal and queries > 1  # a single query is the last position: it sees every key
    if causal and not (mask is None and queries == keys):
        causal = False
        if on_flash and queries < keys and _is_plain(q):
            mask = causal_lower_right(queries, keys)  # a description: no tensor of S x T
        else:
            on_flash = False
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
            allowed = allowed.tril(keys - queries)
            mask = allowed if mask is None else _both(mask, allowed)
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups and queries == 1:
        return _one_query(q, k, v, mask, group, dropout, scale)
    if heads != groups and q.device.type == "cuda" and not on_flash:
        # The memory-efficient kernel (masks, fp32, wide heads) takes no grouped heads: with
        # enable_gqa SDPA would leave it for the one that writes out all scores.
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
    return _sdpa(q, k, v, group, mask, causal, dropout, scale)


def flash_takes(q: Tensor) -> bool:
    """Whether CUDA's flash kernel serves such queries where there is no mask tensor."""
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= FLASH_HEAD_DIM
    return q.device.type == "cuda" and narrow


def _is_plain(q: Tensor) -> bool:
    """Neither traced nor fake: such modes do not take PyTorch's ``CausalBias``."""
    return type(q) is Tensor and not torch.compiler.is_compiling()


def _one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    group: Group,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Grouped heads with S == 1 (decoding): the heads of a group become queries of one head.

    Reads each key and value once instead of once a query head, copies nothing, and every kernel
    takes it.
    """
    split = (k.shape[1], q.shape[1] // k.shape[1])
    if mask is not None and mask.dim() == 4 and mask.shape[1] == q.shape[1]:
        mask = mask.squeeze(2).unflatten(1, split)
    y = _sdpa(q.squeeze(2).unflatten(1, split), k, v, group, mask, False, dropout, scale)
    return y.flatten(1, 2).unsqueeze(2)


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
    if mask is not None and not isinstance(mask, CausalBias) and mask.stride(-1) != 1:
        mask = mask.contiguous()  # no fused kernel takes another stride
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
