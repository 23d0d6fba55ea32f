"""Plans: from rank-invariant numbers alone, printed, and what is not there is refused by name."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import (
    OverlapPlan,
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
    plan_gemm_all_reduce,
    table,
)
from tpkernels.overlap.plan import (
    even_cut,
    falling_cut,
    plan_column_backward,
    plan_sequence,
    rising_cut,
)
from tpkernels.overlap.table import BACKENDS, SHIPPED, Entry, Table, table_of, write
from tpkernels.testing import RankError, count_collectives


@given(chunks=st.integers(1, 12), total=st.integers(0, 5000))
def test_signaled_chunks_are_of_one_length_and_end_with_tiles(chunks, total):
    bounds = OverlapPlan("signaled", chunks, "test").rows(total)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(total))
    assert len(bounds) <= chunks
    lengths = [end - start for start, end in bounds]
    assert all(length == lengths[0] for length in lengths[:-1])
    assert not lengths or lengths[0] <= 128 or lengths[0] % 128 == 0 or len(lengths) == 1


@pytest.mark.parametrize("cut", [even_cut, falling_cut, rising_cut])
@given(chunks=st.integers(1, 12), total=st.integers(0, 100))
def test_chunks_cover_the_rows_once_in_order(cut, chunks, total):
    bounds = cut(total, chunks)
    assert [row for start, end in bounds for row in range(start, end)] == list(range(total))
    lengths = [end - start for start, end in bounds]
    assert len(lengths) == min(chunks, total)
    if cut is even_cut:
        assert not lengths or max(lengths) - min(lengths) <= 1


def test_the_last_chunks_fall_and_first_ones_rise():
    """A chunk's message is hidden by the next GEMM: what ends the op is the last one's."""
    lengths = [end - start for start, end in OverlapPlan("chunked", 6, "test").rows(3100)]
    assert all(abs(a / b - 2) < 0.1 for a, b in pairwise(lengths[2:]))  # halves, but for rounding
    assert max(lengths[:3]) - min(lengths[:3]) <= 1
    assert [end - start for start, end in rising_cut(3100, 6)] == lengths[::-1]


def plans(group, cases):
    name = resolve_group(group).name
    return [str(plan_gemm_all_reduce(*case, group_name=name)) for case in cases]


def plan_with_chunks(group, rows, chunks):
    return plan_gemm_all_reduce(rows, 8, 4, resolve_group(group).name, chunks)


LARGE, SMALL, FEW_ROWS = (4096, 1024, 4), (16, 8, 4), (2, 1 << 20, 4)
MEASURED = (Entry(1, 4, 1), Entry(2, 1 << 20, 8), Entry(1024, 4096, 16))


@pytest.fixture
def measured(tmp_path):
    """Settings under which a table of :data:`MEASURED` is found, of every carrier."""
    for backend in BACKENDS:
        write(Table(backend, MEASURED), tmp_path / "overlap" / f"{backend}.json")
    return {"TPKERNELS_CACHE": str(tmp_path)}


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (
            "auto",
            [
                "chunked x16 (measured over {})",
                "off (chunks do not pay at this size over {})",
                "chunked x2 (measured over {})",  # no more than there are rows
            ],
        ),
        ("off", ["off (TPKERNELS_OVERLAP=off)"] * 3),
        (
            "chunked",
            [f"chunked x{count} (TPKERNELS_OVERLAP=chunked)" for count in (16, 4, 2)],
        ),
    ],
)
def test_the_plan_is_the_same_on_every_rank_and_says_why(
    pool, measured, carrier, overlap, expected
):
    """As the table of what carries the messages says; the user's own is read first."""
    results = run_carried(
        pool,
        carrier,
        plans,
        [LARGE, SMALL, FEW_ROWS],
        world_size=2,
        env={**measured, "TPKERNELS_OVERLAP": overlap},
    )
    assert results[0] == results[1] == [each.format(carrier) for each in expected]


def test_what_was_not_measured_is_not_cut(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "SHIPPED", tmp_path)
    assert not table_of("gloo").entries
    env = {"TPKERNELS_CACHE": str(tmp_path)}
    for carrier in ("gloo", "lanes"):
        if (SHIPPED / f"{carrier}.json").is_file():
            continue  # the ranks find it
        said = f"off (chunks over {carrier} were not measured)"
        shown = run_carried(pool, carrier, plans, [LARGE], world_size=2, env=env)
        assert shown == [[said]] * 2


def plans_of_sequences(group, chunks):
    name, device = group.group_name, torch.device("cpu")
    return [
        str(plan_sequence(rows, row_bytes, name, device, chunks))
        for rows, row_bytes in ((4096, 4096), (16, 8), (1, 4))
    ]


@pytest.mark.parametrize(
    ("overlap", "chunks", "expected"),
    [
        (
            "auto",
            None,
            [
                "chunked x6 (measured over lanes)",  # 16 between 3 ranks
                "off (chunks do not pay at this size over lanes)",
                "off (chunks do not pay at this size over lanes)",
            ],
        ),
        ("auto", 1, ["chunked (chunks was given)"] * 3),  # beside one's own rows
        ("auto", 5, ["chunked x5 (chunks was given)"] * 3),
        ("off", None, ["off (TPKERNELS_OVERLAP=off)"] * 3),
        (
            "chunked",
            None,
            [
                "chunked x6 (TPKERNELS_OVERLAP=chunked)",
                "chunked x2 (TPKERNELS_OVERLAP=chunked)",
                "off (TPKERNELS_OVERLAP=chunked)",
            ],
        ),
    ],
)
def test_sequences_are_cut_rank_by_rank(pool, measured, overlap, chunks, expected):
    env = {**measured, "TPKERNELS_OVERLAP": overlap}
    results = run_carried(pool, "lanes", plans_of_sequences, chunks, world_size=3, env=env)
    assert results == [expected] * 3


def column_plans(group):
    name, device = group.group_name, torch.device("cpu")
    return [
        str(plan_column_backward(rows, row_bytes, name, device))
        for rows, row_bytes in ((4096, 4096), (16, 8))
    ]


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (
            "auto",
            [
                "chunked x16 (measured over lanes)",
                "chunked (chunks do not pay at this size over lanes; whole beside the dW GEMMs)",
            ],
        ),
        ("off", ["off (TPKERNELS_OVERLAP=off)"] * 2),
        ("fused", ["chunked (whole beside the dW GEMMs)"] * 2),
        ("signaled", ["chunked (whole beside the dW GEMMs)"] * 2),
    ],
)
def test_what_other_strategies_leave_runs_beside_the_weight_gradients(
    pool, measured, overlap, expected
):
    env = {**measured, "TPKERNELS_OVERLAP": overlap}
    assert run_carried(pool, "lanes", column_plans, world_size=2, env=env) == [expected] * 2


def lopsided(group):
    """A rank without rows of a batch sees fewer elements than the others, and the same plan."""
    batch, sizes, name = 600, [3, 0], group.group_name
    x = integers(group.rank(), batch, sizes[group.rank()], 1024)
    with count_collectives() as counts:
        gathered, _ = all_gather_gemm(x, [torch.ones(1, 1024)], None, "none", name, sizes=sizes)
    assert torch.equal(gathered, integers(0, batch, 3, 1024))
    return counts["all_gather"].calls


def test_a_rank_without_rows_cuts_as_the_others_do(pool, measured):
    """1800 rows of 4096 bytes: 16 chunks between 2 ranks, of one's own rows 8."""
    assert run_carried(pool, "lanes", lopsided, world_size=2, env=measured) == [8, 8]


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
        ({}, 33, None, "off (chunks "),
        ({}, 0, None, "off (chunks "),
        ({}, 1, "because", "off (chunks "),
        ({"TPKERNELS_OVERLAP": "fused"}, 33, None, "fused (TPKERNELS_OVERLAP=fused)"),
        ({"TPKERNELS_OVERLAP": "off"}, 1, None, "off (TPKERNELS_OVERLAP=off)"),
        ({"TPKERNELS_OVERLAP": "chunked"}, 8, None, "chunked x4 (TPKERNELS_OVERLAP=chunked)"),
    ],
)
def test_few_rows_are_fused_where_that_can_serve(pool, env, rows, refusal, expected):
    for (shown,) in pool.run(fused_plans, [(rows, refusal)], world_size=2, env=env):
        assert shown.startswith(expected)


def one_of(group, op):
    x, weight, name = torch.ones(8, 2), torch.ones(3, 2), resolve_group(group).name
    if op == "all_gather_gemm":
        return all_gather_gemm(x, [weight], None, "none", name)
    if op == "gemm_reduce_scatter":
        return gemm_reduce_scatter(x, weight, None, name)
    return gemm_all_reduce(x, weight, None, name)


@pytest.mark.parametrize(
    ("op", "value", "message"),
    [
        ("gemm_all_reduce", "fused", "the ranks share no memory.*Fix: unset TPKERNELS_OVERLAP"),
        ("gemm_all_reduce", "Chunked", "is not known"),
        ("gemm_reduce_scatter", "fused", "=fused was asked for and cannot serve: it is not built"),
        ("all_gather_gemm", "fused", "=fused was asked for and cannot serve: it is not built"),
    ],
)
def test_the_op_refuses_what_cannot_serve_on_every_rank(pool, op, value, message):
    with pytest.raises(RankError, match=message) as caught:
        pool.run(one_of, op, world_size=2, env={"TPKERNELS_OVERLAP": value})
    assert len(caught.value.failures) == 2
    assert isinstance(caught.value.__cause__, ConfigError)


def sequence_plans(group):
    name, cpu = resolve_group(group).name, torch.device("cpu")
    gathers = plan_sequence(4096, 4096, name, cpu)
    scatters = plan_sequence(4096, 4096, name, cpu, signaled=None)
    return str(gathers), str(scatters)


def test_signaled_serves_reductions_and_what_gathers_says_that_it_is_chunked(pool):
    results = pool.run(sequence_plans, world_size=2, env={"TPKERNELS_OVERLAP": "signaled"})
    for gathers, scatters in results:
        assert gathers.startswith("chunked x4 (TPKERNELS_OVERLAP=signaled: it counts tiles of red")
        assert scatters == "signaled x4 (TPKERNELS_OVERLAP=signaled)"
