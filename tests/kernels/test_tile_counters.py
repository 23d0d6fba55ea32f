"""Counts of finished tiles: every chunk is waited for exactly until its rows are written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import SMALL, needs_interpreter
from tpkernels.errors import ConfigError
from tpkernels.kernels import available

if available.triton_status().available:
    from tpkernels.kernels.gemm_act import gemm_signaled
    from tpkernels.kernels.tile_counters import TileCounters

pytestmark = needs_interpreter
CPU = torch.device("cpu")


def counts_of(rows, columns, chunk_rows, config):
    """Tiles that touch each chunk, by looking at every tile."""
    counts = [0] * -(-rows // chunk_rows)
    for m in range(0, rows, config.block_m):
        touched = {row // chunk_rows for row in range(m, min(m + config.block_m, rows))}
        for _ in range(0, columns, config.block_n):
            for chunk in touched:
                counts[chunk] += 1
    return counts


@settings(max_examples=30)
@given(st.integers(0, 100), st.integers(0, 70), st.integers(2, 60), st.sampled_from(SMALL))
def test_the_kernel_counts_what_is_expected(rows, columns, chunk_rows, config):
    x, w = torch.randn(rows, 24), torch.randn(columns, 24)
    out = torch.full((rows, columns), torch.nan)
    counters = TileCounters(CPU)
    expected = gemm_signaled(x, w, out, counters, chunk_rows, config=config)
    assert expected == counts_of(rows, columns, chunk_rows, config)
    assert counters.finished[: len(expected)].tolist() == expected
    assert not counters.finished[len(expected) :].any()
    torch.testing.assert_close(out, x @ w.t())
    for chunk, count in enumerate(expected):
        counters.wait(chunk, count)


def test_epochs_grow_over_calls_of_other_shapes_and_through_overflow():
    """TP-10: nothing is reset between calls; the counts may wrap around."""
    counters = TileCounters(CPU)
    start = 2**31 - 3
    counters.finished.fill_(start)
    counters._consumed.fill_(start)
    total = start
    for rows in (50, 17, 50):
        x, w = torch.randn(rows, 16), torch.randn(40, 16)
        out = torch.empty(rows, 40)
        expected = gemm_signaled(x, w, out, counters, 32, config=SMALL[0])
        for chunk, count in enumerate(expected):
            counters.wait(chunk, count)
        total += expected[0]
        wrapped = (total + 2**31) % 2**32 - 2**31
        assert counters.finished[0] == wrapped == counters._consumed[0]
    assert total > 2**31  # it did wrap


def test_reset_starts_anew_after_a_call_that_nobody_waited_for():
    counters = TileCounters(CPU)
    x, w = torch.randn(20, 16), torch.randn(40, 16)
    gemm_signaled(x, w, torch.empty(20, 40), counters, 8, config=SMALL[0])
    counters.reset()
    expected = gemm_signaled(x, w, torch.empty(20, 40), counters, 8, config=SMALL[0])
    assert counters.finished[:3].tolist() == expected


def test_chunks_that_do_not_fit_are_refused_with_the_size_that_does():
    counters = TileCounters(CPU, capacity=4)
    x, w, out = torch.randn(20, 16), torch.randn(40, 16), torch.empty(20, 40)
    with pytest.raises(ConfigError, match=r"20 rows into 7 chunks.* at most 4.*at least 5"):
        gemm_signaled(x, w, out, counters, 3, config=SMALL[0])
    with pytest.raises(ConfigError, match="chunk_rows=0 must be at least 1"):
        gemm_signaled(x, w, out, counters, 0, config=SMALL[0])


def test_an_output_that_does_not_fit_is_refused():
    counters, x, w = TileCounters(CPU), torch.randn(3, 4), torch.randn(5, 4)
    for out in (torch.empty(2, 5), torch.empty(3, 5).half(), torch.empty(5, 3).t()):
        with pytest.raises(ConfigError, match=r"gemm_signaled: out must be"):
            gemm_signaled(x, w, out, counters, 2)
