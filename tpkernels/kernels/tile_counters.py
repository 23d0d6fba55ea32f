"""Counts of finished tiles, by chunk of rows: what a stream waits for before it sends a chunk.

    GEMM:       [tile][tile]..[tile]     each tile: store, release, finished[chunk] += 1
    wait:            finished[chunk] - target >= 0
    collective:                          [chunk]

The counts only grow (epochs, modulo 2^32): nothing is ever reset, so no call can see the flag of
another one. Who waits gives the target: the host, which adds up what it launched; or, in a captured
CUDA graph, a second count on the device.
"""

# M rows of the GEMM's output

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpkernels.errors import ConfigError
from tpkernels.kernels.launch import run


@triton.jit
def _chunk_of(row, boundary, rows, count, rest):
    return tl.where(row < boundary, row // rows, count + (row - boundary) // rest)


@triton.jit
def count_tile(finished, m, M, boundary, rows, count, rest, BLOCK_M: tl.constexpr):
    """Publish a tile of rows [m, m + BLOCK_M): it counts for every chunk that it touches."""
    tl.debug_barrier()  # RAW: all threads' stores come before the one thread's release
    first = _chunk_of(m, boundary, rows, count, rest)
    last = _chunk_of(min(m + BLOCK_M, M) - 1, boundary, rows, count, rest)
    for chunk in range(first, last + 1):
        # Of the system: who waits may be no multiprocessor of this GPU, but its front end.
        tl.atomic_add(finished + chunk, 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["chunk", "more"])  # nothing is compiled inside a captured graph
def _wait(finished, consumed, chunk, more):
    target = more
    if consumed is not None:
        target += tl.load(consumed + chunk)
    # The difference, since the counts wrap around. Adding 0 is a load with acquire.
    while tl.atomic_add(finished + chunk, 0, sem="acquire", scope="gpu") - target < 0:
        pass
    if consumed is not None:
        tl.store(consumed + chunk, target)


class TileCounters:
    """The counts of one lane's GEMMs on one device, for up to ``capacity`` chunks a call.

    One GEMM counts at a time: the next one must not start before the last one has ended.

    Attributes:
        finished: int32 [capacity], what the GEMMs count.
    """

    def __init__(self, device: torch.device, capacity: int = 64) -> None:
        self.finished = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._consumed = torch.zeros(capacity, dtype=torch.int32, device=device)

    def check(self, chunks: int) -> None:
        """Raise :class:`ConfigError` if there is no count for each of ``chunks``."""
        capacity = self.finished.numel()
        if chunks > capacity:
            raise ConfigError(
                f"{chunks} chunks are more than the {capacity} whose tiles are counted; "
                f"Fix: chunks={capacity} or fewer"
            )

    def wait_until(self, chunk: int, target: int) -> None:
        """Make the current stream wait until the count of ``chunk`` is at ``target`` (mod 2^32)."""
        signed = (target + 2**31) % 2**32 - 2**31
        run(_wait, (1,), self.finished, None, chunk, signed, num_warps=1)

    def load(self) -> None:
        """Compile and load what :meth:`wait_for_more` launches: not when a graph is captured."""
        run(_wait, (1,), self.finished, self._consumed, 0, 0, num_warps=1)

    def wait_for_more(self, chunk: int, expected: int) -> None:
        """Make the current stream wait until ``expected`` more tiles of ``chunk`` are finished.

        More than were waited for in this way before: what a captured graph can be replayed with.
        """
        if expected:
            run(_wait, (1,), self.finished, self._consumed, chunk, expected, num_warps=1)
