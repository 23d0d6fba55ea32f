"""Counts of finished tiles: every chunk is waited for exactly until its rows are written."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import SMALL, needs_interpreter
from tpkernels.errors import ConfigError
from tpkernels.kernels import available

if available.triton_status().available:
    from tpkernels.kernels.gemm_act import gemm_signaled
    from tpkernels.kernels.row_chunks import RowChunks
    from tpkernels.kernels.tile_counters import TileCounters

pytestmark = needs_interpreter
CPU = torch.device("cpu")


def counts_of(rows, columns, bounds, config):
    """Tiles that touch each chunk, by looking at every tile."""
    counts = [0] * len(bounds)
    for m in range(0, rows, config.block_m):
        for chunk, (start, end) in enumerate(bounds):
            if set(range(start, end)) & set(range(m, m + config.block_m)):
                counts[chunk] += -(-columns // config.block_n)
    return counts


@settings(max_examples=20)
@given(
    st.integers(0, 80),
    st.integers(0, 50),
    st.tuples(st.integers(2, 60), st.integers(1, 3), st.integers(1, 40)),
    st.integers(0, 120),
    st.sampled_from(SMALL),
)
def test_the_kernel_counts_every_chunk_s_tiles(rows, columns, cut, first_row, config):
    """From any row on; chunks of one length, and of another one after them."""
    length, count, rest = cut
    edges = [min(rows, length * i) for i in range(count)] + [
        min(rows, length * count + rest * i) for i in range(60)
    ]
    bounds = [(a, b) for a, b in pairwise(edges) if b > a]
    x, w = torch.randn(rows, 24), torch.randn(columns, 24)
    out = torch.full((rows, columns), torch.nan)
    counters = TileCounters(CPU)
    tile = gemm_signaled(
        x, w, out, counters, RowChunks(length, count, rest), first_row=first_row, config=config
    )
    assert tile == (config.block_m, config.block_n)
    expected = counts_of(rows, columns, bounds, config)
    assert counters.finished[: len(expected)].tolist() == expected
    assert not counters.finished[len(expected) :].any()
    torch.testing.assert_close(out, x @ w.t())
    for chunk, count in enumerate(expected):
        counters.wait_until(chunk, count)
        counters.wait_for_more(chunk, count)


def test_epochs_grow_over_calls_of_other_shapes_and_through_overflow():
    """TP-10: nothing is reset between calls; the counts may wrap around."""
    counters = TileCounters(CPU)
    start = 2**31 - 3
    counters.finished.fill_(start)
    counters._consumed.fill_(start)
    total = start
    for rows in (50, 17, 50):
        x, w = torch.randn(rows, 16), torch.randn(40, 16)
        gemm_signaled(x, w, torch.empty(rows, 40), counters, RowChunks(32, 2), config=SMALL[0])
        expected = counts_of(rows, 40, [(0, min(rows, 32)), (32, rows)], SMALL[0])
        for chunk, count in enumerate(expected):
            counters.wait_for_more(chunk, count)
        total += expected[0]
        counters.wait_until(0, total % 2**32)
        wrapped = (total + 2**31) % 2**32 - 2**31
        assert counters.finished[0] == wrapped == counters._consumed[0]
    assert total > 2**31  # it did wrap


def test_more_chunks_than_counts_are_refused():
    counters = TileCounters(CPU, capacity=4)
    x, w, out = torch.randn(20, 16), torch.randn(40, 16), torch.empty(20, 40)
    with pytest.raises(ConfigError, match=r"7 chunks are more than the 4 .*Fix: chunks=4"):
        gemm_signaled(x, w, out, counters, RowChunks(3, 7), config=SMALL[0])


def test_an_output_that_does_not_fit_is_refused():
    counters, x, w = TileCounters(CPU), torch.randn(3, 4), torch.randn(5, 4)
    for out in (torch.empty(2, 5), torch.empty(3, 5).half(), torch.empty(5, 3).t()):
        with pytest.raises(ConfigError, match=r"gemm_signaled: out must be"):
            gemm_signaled(x, w, out, counters, RowChunks(2, 2))
