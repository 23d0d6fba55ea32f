"""Attention spelled out in plain PyTorch, with ``TPAttention``'s names, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DenseAttention(nn.Module):
    """Softmax attention step by step: grouped heads, masks, rotary, cross-attention.

    A query that may attend to nothing gets zeros.
    """

    def __init__(
        self, hidden, heads, kv_heads, dim, *, fused=False, causal=False, rope_theta=None, bias=True
    ):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.causal, self.rope_theta = causal, rope_theta
        if fused:
            self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * dim, bias)
        else:
            self.q_proj = nn.Linear(hidden, heads * dim, bias)
            self.k_proj = nn.Linear(hidden, kv_heads * dim, bias)
            self.v_proj = nn.Linear(hidden, kv_heads * dim, bias)
        self.o_proj = nn.Linear(heads * dim, hidden, bias)

    def forward(
        self, x: Tensor, attention_mask=None, key_padding_mask=None, context=None
    ) -> Tensor:
        source = x if context is None else context
        if hasattr(self, "qkv_proj"):
            widths = [self.heads * self.dim] + [self.kv_heads * self.dim] * 2
            q, k, v = self.qkv_proj(x).split(widths, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        q, k, v = (t.unflatten(-1, (-1, self.dim)).transpose(1, 2) for t in (q, k, v))
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.dim**0.5
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        if self.causal and context is None:
            hidden = hidden | torch.ones_like(hidden).triu(1)
        if key_padding_mask is not None:
            hidden = hidden | ~key_padding_mask.bool()[:, None, None, :]
        if attention_mask is not None:
            mask = attention_mask[:, None] if attention_mask.dim() == 3 else attention_mask
            if mask.dtype is torch.bool:
                hidden = hidden | ~mask
            else:
                scores = scores + mask
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x [B, H, S, D]: pairs (i, i + D/2) turn by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    position = torch.arange(x.shape[2], dtype=torch.float32)[:, None]
    angle = position * theta ** (-torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
