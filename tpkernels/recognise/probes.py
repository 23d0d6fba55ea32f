"""Random inputs for proofs: on the CPU, from generators of their own, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor


def probe(*shape: int, seed: int) -> Tensor:
    """Normal values of float64, whatever the default device, dtype and random state are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


def all_visible(batch: int, tokens: int) -> Tensor:
    """A mask [batch, 1, tokens, tokens] of bool that hides nothing."""
    return torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device="cpu")
