"""Attention written out once, as the yardstick for attention that users wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.recognise.prove import Linear

MaskReading = Literal["keep", "drop", "additive", "nonzero_keep"]


@dataclass(frozen=True)
class Roles:
    """Layers and head counts that a module may have; ``layout`` is of a fused projection."""

    out: str
    heads: int
    kv_heads: int
    head_dim: int
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    layout: Literal["blocks", "per_head"] = "blocks"


def projections(x: Tensor, roles: Roles, linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, D] and k, v [B, H_kv, T, D] of x [B, T, features]."""
    widths = [n * roles.head_dim for n in (roles.heads, roles.kv_heads, roles.kv_heads)]
    if roles.qkv is None:
        assert roles.q is not None and roles.k is not None and roles.v is not None
        parts = [linear(path, x) for path in (roles.q, roles.k, roles.v)]
    elif roles.layout == "blocks":
        parts = list(linear(roles.qkv, x).split(widths, dim=-1))
    else:  # head 0's q, k and v, then head 1's
        by_head = linear(roles.qkv, x).unflatten(-1, (roles.heads, 3, roles.head_dim))
        parts = [part.flatten(-2) for part in by_head.unbind(dim=-2)]
    q, k, v = (part.unflatten(-1, (-1, roles.head_dim)).transpose(1, 2) for part in parts)
    return q, k, v


def attention(
    x: Tensor,
    roles: Roles,
    linear: Linear,
    *,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
    meaning: MaskReading = "keep",
) -> Tensor:
    """Canonical self-attention [B, T, features] -> [B, T, features]."""
    q, k, v = projections(x, roles, linear)
    group = roles.heads // roles.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) * scale
    if causal:
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    if mask is not None:
        scores = _masked(scores, mask, meaning)
    merged = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(-2)
    return linear(roles.out, merged)


def _masked(scores: Tensor, mask: Tensor, meaning: MaskReading) -> Tensor:
    if meaning == "additive":
        return scores + mask
    hidden = mask.to(torch.bool) if meaning == "drop" else mask == 0
    return scores.masked_fill(hidden, float("-inf"))
