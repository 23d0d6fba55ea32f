"""Rows summed over the ranks chunk by chunk: exactly, the same bits everywhere, rounded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.samples import DTYPES
from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers, normals
from tpkernels.comm.row_sums import row_sums, sum_in_rank_order
from tpkernels.overlap.plan import even_cut
from tpkernels.testing import assert_two_times, count_collectives


@given(
    ranks=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    into=st.none() | st.integers(0, 4),
    with_bias=st.booleans(),
)
def test_the_order_is_the_ranks_and_half_types_are_rounded_once(ranks, dtype, into, with_bias):
    parts = [normals(rank, 3, 4).to(dtype) for rank in range(ranks)]
    bias = normals(9, 4).to(dtype) if with_bias else None
    wide = torch.promote_types(dtype, torch.float32)
    expected = parts[0].to(wide)
    for part in parts[1:]:
        expected = expected + part.to(wide)
    expected = (expected if bias is None else expected + bias.to(wide)).to(dtype)
    out = torch.full((3, 4), float("nan"), dtype=dtype) if into is None else parts[into % ranks]
    assert sum_in_rank_order(parts, out, bias) is out
    assert torch.equal(out, expected)


def test_fp32_sums_may_be_rounded_into_half_types_and_take_their_bias():
    parts, bias = [torch.full((1, 1), v) for v in (256.0, 1.0, 1.0)], torch.ones(1).bfloat16()
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    assert sum_in_rank_order(parts, out).item() == 258
    assert sum_in_rank_order(parts, out, bias).item() == 260  # 259, between 258 and 260


def sums_case(group, m, n, count, dtype):
    """Chunks pushed one by one with time to move between them; and what was sent."""
    out = integers(group.rank(), m, n, dtype=dtype)
    expected = sum(integers(rank, m, n, dtype=torch.float64) for rank in range(group.size()))
    with count_collectives() as counts, row_sums(out, group.group_name) as sums:
        for start, end in even_cut(m, count):
            sums.push(start, end)
            sums.progress()
    torch.testing.assert_close(out, expected.to(dtype), atol=0, rtol=0)
    if m * n:
        assert list(counts) == ["all_reduce"]
        assert counts.total.calls == min(count, m)
        assert counts.total.bytes == m * n * dtype.itemsize
    else:
        assert counts.total.calls == 0


def sums_cases(group, cases):
    for case in cases:
        try:
            sums_case(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_in_any_chunks(pool, carrier, world):
    """Also chunks of fewer rows than there are ranks, and more rows than a socket holds."""
    cases = [(9, 5, count, torch.float32) for count in range(1, 9)]
    cases += [(7, 3, 2, dtype) for dtype in DTYPES]
    cases += [(1, 4, 3, torch.float32), (2, 1, 2, torch.bfloat16), (600, 700, 3, torch.float32)]
    cases += [(0, 4, 2, torch.float32), (4, 0, 2, torch.float32)]
    run_carried(pool, carrier, sums_cases, cases, world_size=world)


def same_bits(group, dtype):
    results = []
    for count in (1, 3, 3):
        out = normals(group.rank(), 10, 33).to(dtype)
        with row_sums(out, group.group_name) as sums:
            for start, end in even_cut(10, count):
                sums.push(start, end)
        results.append(out)
    parts = [normals(rank, 10, 33).to(dtype) for rank in range(group.size())]
    eager = sum(parts[1:], parts[0])
    assert_two_times(results[0], eager, sum(part.double() for part in parts))
    assert torch.equal(results[1], results[2])
    return results


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_same_bits_on_every_rank_and_in_every_run(pool, carrier, dtype):
    results = run_carried(pool, carrier, same_bits, dtype, world_size=3)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    if carrier == "lanes":  # added by rank, whatever the chunks
        assert torch.equal(results[0][0], results[0][1])


def rounded_once(group):
    out = torch.full((2, 2), 256.0 if group.rank() == 0 else 1.0, dtype=torch.bfloat16)
    with row_sums(out, group.group_name) as sums:
        sums.push(0, 1)
        sums.push(1, 2)
    return out


@pytest.mark.parametrize("carrier", ["lanes", CARRIERS[2]])
def test_half_types_are_rounded_once(pool, carrier):
    """TP-33: 256 + 1 + 1; rounded after each addition it stays 256 (as Gloo's own does)."""
    for out in run_carried(pool, carrier, rounded_once, world_size=3):
        assert bool((out == 258).all())
