"""How long one call takes: CUDA events on a GPU, the clock on a CPU; and percentiles of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

# A GPU spins this many cycles for a microsecond of waiting; above the boost clock of any so far,
# so that it waits long enough.
_CYCLES_A_US = 3000
_LONGEST_WAIT_US = 20_000.0
_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_LARGEST_CPU_CACHE = 256 << 20  # of a socket, where the kernel reports all of it for one core


@dataclass(frozen=True)
class Sample:
    """One call, in microseconds: on the device, and until the host had it enqueued (GPU only)."""

    us: float
    host_us: float | None = None


class Timer(Protocol):
    def __call__(self, run: Callable[[], object], host_us: float = 0.0) -> Sample:
        """Time one call of `run`, whose host side is known to take about `host_us`."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""


class CpuTimer:
    """Wall-clock time of a call."""

    def __call__(self, run: Callable[[], object], host_us: float = 0.0) -> Sample:
        start = time.perf_counter_ns()
        run()
        return Sample((time.perf_counter_ns() - start) / 1e3)

    def synchronize(self) -> None:
        pass


class CudaTimer:
    """Time between two events around a call, on the current stream.

    The device first spins for as long as the host needs to enqueue the call, so that the time is
    the kernels' and not that of Python or of launches; the latter is `host_us`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, run: Callable[[], object], host_us: float = 0.0) -> Sample:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        wait_us = min(20.0 + 1.5 * host_us, _LONGEST_WAIT_US)
        torch.cuda._sleep(int(wait_us * _CYCLES_A_US))
        began = time.perf_counter_ns()
        start.record()
        run()
        end.record()
        host = (time.perf_counter_ns() - began) / 1e3
        end.synchronize()
        return Sample(start.elapsed_time(end) * 1e3, host)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as `numpy.percentile`."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache that inputs are rotated beyond."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_size(path.read_text()) for path in _CPU_CACHE.glob("index*/size")]
    return min(max(sizes, default=32 << 20), _LARGEST_CPU_CACHE)


def _size(text: str) -> int:
    """Bytes of a sysfs size such as `32768K`."""
    text = text.strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
    return int(text[:-1]) * unit if unit else int(text or 0)
