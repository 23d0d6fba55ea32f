"""Plans: from rank-invariant numbers alone, printed, and what is not there is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import OverlapPlan, gemm_all_reduce, plan_gemm_all_reduce
from tpkernels.testing import RankError


@given(chunks=st.integers(1, 12), total=st.integers(0, 5000))
def test_signaled_chunks_are_of_one_length_and_end_with_tiles(chunks, total):
    bounds = OverlapPlan("signaled", chunks, "test").rows(total)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(total))
    assert len(bounds) <= chunks
    lengths = [end - start for start, end in bounds]
    assert all(length == lengths[0] for length in lengths[:-1])
    assert not lengths or lengths[0] <= 128 or lengths[0] % 128 == 0 or len(lengths) == 1


@given(chunks=st.integers(1, 12), total=st.integers(0, 100))
def test_chunks_cover_the_rows_once_in_order_and_evenly(chunks, total):
    bounds = OverlapPlan("chunked", chunks, "test").rows(total)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(total))
    lengths = [end - start for start, end in bounds]
    assert len(lengths) == min(chunks, total)
    assert not lengths or max(lengths) - min(lengths) <= 1


def plans(group, cases):
    name = resolve_group(group).name
    return [str(plan_gemm_all_reduce(*case, group_name=name)) for case in cases]


def plan_with_chunks(group, rows, chunks):
    return plan_gemm_all_reduce(rows, 8, 4, resolve_group(group).name, chunks)


LARGE, SMALL, FEW_ROWS = (4096, 1024, 4), (16, 8, 4), (64, 1 << 20, 4)
TWO_HOSTS = {"LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ["off (ranks share a host"] * 3),
        ({"LOCAL_WORLD_SIZE": "2"}, ["off (ranks share a host"] * 3),
        (TWO_HOSTS, ["chunked x4 (ranks on several hosts)", "off (too small", "off (too small"]),
        ({**TWO_HOSTS, "TPKERNELS_OVERLAP": "off"}, ["off (TPKERNELS_OVERLAP=off)"] * 3),
        ({"TPKERNELS_OVERLAP": "chunked"}, ["chunked x4 (TPKERNELS_OVERLAP=chunked)"] * 3),
    ],
)
def test_the_plan_is_the_same_on_every_rank_and_says_why(pool, env, expected):
    results = pool.run(plans, [LARGE, SMALL, FEW_ROWS], world_size=2, env=env)
    assert results[0] == results[1]
    for shown, start in zip(results[0], expected, strict=True):
        assert shown.startswith(start)


def test_chunks_that_were_given(pool):
    def shown(rows, chunks):
        return str(pool.run(plan_with_chunks, rows, chunks, world_size=2)[0])

    assert shown(8, 3) == "chunked x3 (chunks was given)"
    assert shown(8, 1) == "off (chunks was given)"
    assert shown(2, 5) == "chunked x2 (chunks was given)"  # never an empty chunk
    assert shown(0, 5) == "off (chunks was given)"


def test_the_group_of_one_has_nothing_to_overlap():
    assert str(plan_gemm_all_reduce(4096, 1024, 4, "")) == "off (group of one)"


def fused_plans(group, cases):
    name = resolve_group(group).name
    return [
        str(plan_gemm_all_reduce(rows, 8, 4, name, fused=refusal, fused_rows=32))
        for rows, refusal in cases
    ]


@pytest.mark.parametrize(
    ("env", "rows", "refusal", "expected"),
    [
        ({}, 32, None, "fused (ranks share memory, and rows are at most 32)"),
        ({}, 33, None, "off (ranks share a host"),
        ({}, 0, None, "off (ranks share a host"),
        ({}, 1, "because", "off (ranks share a host"),
        ({"TPKERNELS_OVERLAP": "fused"}, 33, None, "fused (TPKERNELS_OVERLAP=fused)"),
        ({"TPKERNELS_OVERLAP": "off"}, 1, None, "off (TPKERNELS_OVERLAP=off)"),
        ({"TPKERNELS_OVERLAP": "chunked"}, 8, None, "chunked x4 (TPKERNELS_OVERLAP=chunked)"),
    ],
)
def test_few_rows_are_fused_where_that_can_serve(pool, env, rows, refusal, expected):
    for (shown,) in pool.run(fused_plans, [(rows, refusal)], world_size=2, env=env):
        assert shown.startswith(expected)


def row(group):
    return gemm_all_reduce(torch.ones(8, 2), torch.ones(3, 2), None, resolve_group(group).name)


def test_the_op_refuses_them_too_on_every_rank(pool):
    for value, message in (("fused", "the ranks share no memory"), ("Chunked", "is not known")):
        with pytest.raises(RankError, match=message) as caught:
            pool.run(row, world_size=2, env={"TPKERNELS_OVERLAP": value})
        assert len(caught.value.failures) == 2
        assert isinstance(caught.value.__cause__, ConfigError)
