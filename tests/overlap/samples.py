"""Dense tensors that every rank can compute, and the part of them that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """-1, 0 and 1, the same on every rank for the same seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def normals(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed, the same on every rank for the same seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def part(tensor: Tensor, sizes: Sequence[int], dim: int, rank: int) -> Tensor:
    """The rows that ``rank`` holds when rank r holds ``sizes[r]`` of them."""
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank])
