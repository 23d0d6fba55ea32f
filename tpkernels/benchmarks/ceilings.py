"""What the hardware allows: ceilings measured in the run itself, and limits that follow from them.

    limit of a GEMM = max(FLOPs / peak, bytes / bandwidth)
    fusion bound    = 1 + (bytes that only the unfused form moves / bandwidth) / limit of its GEMMs

The bound is the most that fusing alone can gain over eager PyTorch. With an H200's 790 TFLOP/s
bf16 and 4.3 TB/s, a separate GELU pass (4 bytes for each of M x N results) over a GEMM costs
(4 / 4.3e12) / (2 K / 790e12) = 367 / K of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tpkernels.benchmarks.timers import Timer

_GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}  # beyond any cache
_REPEAT = 7


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of one large GEMM of a dtype, and bytes/s (read plus written) of one large copy."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """What an op must do, whoever does it.

    Attributes:
        gemms: (m, n, k) of every GEMM; each reads its operands and writes its result once.
        extra_elements: elements that the unfused form reads and writes beside that.
    """

    gemms: tuple[tuple[int, int, int], ...]
    extra_elements: int

    def limit_us(self, ceilings: Ceilings, itemsize: int, cold: bool = True) -> float:
        """The least time, GEMM by GEMM; without `cold`, operands may come from a cache for free."""
        seconds = 0.0
        for m, n, k in self.gemms:
            moved = itemsize * (m * k + n * k + m * n) if cold else 0
            seconds += max(2 * m * n * k / ceilings.flops, moved / ceilings.bandwidth)
        return seconds * 1e6

    def fusion_bound(self, ceilings: Ceilings, itemsize: int) -> float | None:
        """Eager's time over a perfectly fused one's, if both otherwise run at the limit."""
        limit = self.limit_us(ceilings, itemsize)
        extra_us = itemsize * self.extra_elements / ceilings.bandwidth * 1e6
        return 1 + extra_us / limit if limit else None


def measure_ceilings(device: torch.device, dtype: torch.dtype, timer: Timer) -> Ceilings:
    """The best of a few repetitions of each, on random data."""
    size = _GEMM_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    gemm_us = _best(timer, lambda: torch.mm(a, b, out=out))
    source = torch.randn(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    copy_us = _best(timer, lambda: target.copy_(source))
    return Ceilings(2 * size**3 / gemm_us * 1e6, 2 * 4 * source.numel() / copy_us * 1e6)


def _best(timer: Timer, run: Callable[[], object]) -> float:
    for _ in range(2):
        run()
    timer.synchronize()
    return min(timer(run).us for _ in range(_REPEAT))
