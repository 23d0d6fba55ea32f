"""What an overlapped layer must take at least, how much of the overlap it has, and which of two
variants is faster.

    limit = max(compute, bytes / rate)
    effective overlap = (compute + communication - layer) / min(compute, communication)

The latter is 1 where the shorter of the two is hidden wholly, 0 where nothing is gained over one
after the other, and below 0 where a layer wastes time beside both.
"""

# M tokens, K this rank's part of the wide dimension, N the model's width, R ranks

from __future__ import annotations

import math
from collections.abc import Sequence

from tpkernels.benchmarks.timers import percentile

# Where wire time is this part of compute time, hiding pays most: the figure of merit is taken there
COMPARABLE = (0.5, 1.0)
_CONFIDENCE = 0.95
# Tensors of [M, N] that pass a ring of R ranks, in parts of (R - 1) / R: an all-reduce is two, an
# all-gather or a reduce-scatter one. The sequence-parallel column layer gathers its input again for
# dW, since it keeps only this rank's rows; so does each of a block's two.
PASSES = {
    "row_forward": 2,
    "column_backward": 2,
    "gather_forward": 1,
    "gather_backward": 2,
    "scatter_forward": 1,
    "scatter_backward": 1,
    "block": 8,
    "block_sequence": 10,
}


def wire_bytes(op: str, tokens: int, width: int, itemsize: int, ranks: int) -> int:
    """Bytes that one rank must send for `op` on [tokens, width]; it receives as many."""
    return PASSES[op] * tokens * width * itemsize * (ranks - 1) // ranks


def wire_us(size: int, gbits: float) -> float:
    """Microseconds that `size` bytes take at `gbits` Gbit/s."""
    return size * 8 / (gbits * 1e3)


def rate_of(size: int, ratio: float, compute_us: float) -> float:
    """Gbit/s at which `size` bytes take `ratio` of `compute_us`."""
    return size * 8 / (ratio * compute_us * 1e3)


def limit_us(compute_us: float, wire: float | None) -> float:
    """`wire`: microseconds, or None where ranks share a host."""
    return max(compute_us, wire or 0.0)


def effective_overlap(compute_us: float, communication_us: float, us: float) -> float:
    return (compute_us + communication_us - us) / min(compute_us, communication_us)


def comparable(compute_us: float, wire: float | None) -> bool:
    """Whether the wire takes 0.5 to 1.0 of the time of compute."""
    return wire is not None and COMPARABLE[0] <= wire / compute_us <= COMPARABLE[1]


def median_ratio(
    ours: Sequence[float], others: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """(median, lower, upper) of `ours / others` turn by turn, with the 95% interval of the median.

    The interval is between two of the sorted ratios, of whatever distribution they are: as many
    ratios lie below the true median as heads fall in so many tosses. None below 6 turns, of which
    even the least and the largest say less.
    """
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    count, below, rank = len(ratios), 0.0, -1
    while rank + 1 < count / 2:
        below += math.comb(count, rank + 1) / 2**count
        if 2 * below > 1 - _CONFIDENCE:
            break
        rank += 1
    median = percentile(ratios, 50)
    return (median, ratios[rank], ratios[-1 - rank]) if rank >= 0 else (median, None, None)
