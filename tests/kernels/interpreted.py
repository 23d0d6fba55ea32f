"""What the tests of the Triton kernels share: layouts, configurations, and where they can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpkernels.kernels import available
from tpkernels.kernels.config import GemmConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "strided")
# Several tiles each way within a few dozen rows, an epilogue in parts, with and without TMA.
SMALL = tuple(
    GemmConfig(16, 32, 16, group_m=2, epilogue=epilogue, tma=tma)
    for epilogue in (1, 2)
    for tma in (False, True)
)

needs_interpreter = pytest.mark.skipif(
    not (available.interpreting() and available.status().available),
    reason=f"needs Triton's interpreter (TRITON_INTERPRET=1): {available.status().reason}",
)


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """[rows, columns] of normal numbers laid out as ``layout`` says."""
    generator = torch.Generator().manual_seed(seed)
    if layout == "transposed":
        return torch.randn(columns, rows, generator=generator).to(dtype).t()
    if layout == "strided":
        return torch.randn(rows, 2 * columns, generator=generator).to(dtype)[:, ::2]
    return torch.randn(rows, columns, generator=generator).to(dtype)
