"""Counts of finished tiles, by chunk of rows: what a stream waits for before it sends a chunk.

    GEMM:       [tile][tile]..[tile]     each tile: store, release, finished[chunk] += 1
    wait:            finished[chunk] >= consumed[chunk] + expected     (acquire)
    collective:                          [chunk]

The counts only grow (epochs): nothing is reset between calls, so no call can see the flag of
another one, and a captured CUDA graph can be replayed.
"""

# M rows of the GEMM's output, N its columns

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.errors import ConfigError
from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.launch import run


@triton.jit
def count_tile(finished, m, M, chunk_rows, BLOCK_M: tl.constexpr):
    """Publish a tile of rows [m, m + BLOCK_M): it counts for every chunk that it touches."""
    tl.debug_barrier()  # RAW: all threads' stores come before the one thread's release
    last = (min(m + BLOCK_M, M) - 1) // chunk_rows
    for chunk in range(m // chunk_rows, last + 1):
        tl.atomic_add(finished + chunk, 1, sem="release", scope="gpu")


@triton.jit
def _wait(finished, consumed, chunk, expected):
    target = tl.load(consumed + chunk) + expected
    # The difference, since the counts wrap around. Adding 0 is a load with acquire.
    while tl.atomic_add(finished + chunk, 0, sem="acquire", scope="gpu") - target < 0:
        pass
    tl.store(consumed + chunk, target)


class TileCounters:
    """The counts of one group's GEMMs on one device, for up to ``capacity`` chunks a call.

    One call at a time: the next GEMM must not start before every chunk of the last was waited
    for, which stream order gives where both are ended by the same collectives.
    """

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self.capacity = capacity
        self.finished = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._consumed = torch.zeros(capacity, dtype=torch.int32, device=device)

    def expect(self, M: int, N: int, chunk_rows: int, config: GemmConfig) -> list[int]:
        """Tiles of each chunk of ``chunk_rows`` rows of an [M, N] output.

        Raises:
            ConfigError: ``chunk_rows`` below 1, or more chunks than ``capacity``.
        """
        if chunk_rows < 1:
            raise ConfigError(f"chunk_rows={chunk_rows} must be at least 1")
        chunks = -(-M // chunk_rows)
        if chunks > self.capacity:
            raise ConfigError(
                f"chunk_rows={chunk_rows} cuts {M} rows into {chunks} chunks; allowed: at most "
                f"{self.capacity}. Fix: chunk_rows of at least {-(-M // self.capacity)}"
            )
        across = -(-N // config.block_n)
        counts = []
        for first in range(0, M, chunk_rows):
            last = min(first + chunk_rows, M) - 1
            counts.append(across * (last // config.block_m - first // config.block_m + 1))
        return counts

    def wait(self, chunk: int, expected: int) -> None:
        """Make the current stream wait until ``expected`` more tiles of ``chunk`` are finished."""
        if expected:
            run(_wait, (1,), self.finished, self._consumed, chunk, expected, num_warps=1)

    def reset(self) -> None:
        """Forget everything, in stream order: for cleaning up after an error."""
        self.finished.zero_()
        self._consumed.zero_()
