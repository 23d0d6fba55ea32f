"""Rotary position embedding (arXiv:2104.09864), half-split as in Llama and GPT-NeoX."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [B, S, head_dim], for integer positions [B, S]; computed in fp32."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)
    angles = position_ids[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, S, D] by the tables [B, S, D] (or [S, D])."""
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos[:, None] + rotated * sin[:, None]
