"""Helpers to test tensor-parallel code: a pool of ranks, comparisons, counts of collectives."""

from tpkernels.testing.collective_count import CollectiveCounts, count_collectives
from tpkernels.testing.comparison import (
    assert_two_times,
    max_relative_error,
    relative_error,
)
from tpkernels.testing.rank_errors import RankError, RankFailure, RankTimeoutError
from tpkernels.testing.rank_pool import RankPool

__all__ = [
    "CollectiveCounts",
    "RankError",
    "RankFailure",
    "RankPool",
    "RankTimeoutError",
    "assert_two_times",
    "count_collectives",
    "max_relative_error",
    "relative_error",
]
