"""``gemm_all_reduce`` is ``F.linear``, an all-reduce, and the bias once: exactly, in any chunks."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.across_ranks import assert_gradients
from tests.ops.samples import DTYPES, LAYOUTS, laid_out
from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers, normals, part
from tpkernels.comm import row_sums
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import gemm_all_reduce
from tpkernels.testing import RankError, assert_two_times, count_collectives

UNEVEN = {1: [5], 2: [3, 2], 3: [4, 0, 1], 4: [2, 2, 1, 0]}  # K_r of each rank


def row_case(group, lead, k_sizes, n, dtype, chunks, with_bias, layout="contiguous"):
    """Value and gradients against the dense layer, without tolerance; what was sent."""
    name, rank, k = resolve_group(group).name, group.rank(), sum(k_sizes)
    x, weight, bias = integers(1, *lead, k), integers(2, n, k), 3 * integers(3, n)
    dy = laid_out(integers(4, *lead, n), layout)  # an expanded gradient, of unexpanded inputs
    dense = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = F.linear(dense[0], dense[1], dense[2] if with_bias else None)
    wanted = dense[: 2 + with_bias]
    dx, dweight, *dbias = torch.autograd.grad(y, wanted, dy.double())

    own = [part(x, k_sizes, -1, rank).to(dtype), part(weight, k_sizes, 1, rank).to(dtype)]
    input_layout = "contiguous" if layout == "expanded" else layout
    ours = [laid_out(t, input_layout).requires_grad_() for t in own]
    if with_bias:
        ours.append(bias.to(dtype).requires_grad_())
    with count_collectives() as forward:
        result = gemm_all_reduce(*ours[:2], ours[2] if with_bias else None, name, chunks=chunks)
    with count_collectives() as backward:
        gradients = torch.autograd.grad(result, ours, dy.to(dtype), retain_graph=True)
    again = torch.autograd.grad(result, ours, dy.to(dtype))

    expected = [part(dx, k_sizes, -1, rank), part(dweight, k_sizes, 1, rank), *dbias]
    torch.testing.assert_close(result, y.detach().to(dtype), atol=0, rtol=0)
    assert result.is_contiguous()
    for mine, second, truth in zip(gradients, again, expected, strict=True):
        torch.testing.assert_close(mine, truth.to(dtype), atol=0, rtol=0)
        assert torch.equal(mine, second)
    rows = x[..., 0].numel() if k else y[..., 0].numel() if n else 0
    if group.size() == 1 or rows * n == 0:
        assert forward.total.calls == 0
    else:
        assert list(forward) == ["all_reduce"]
        assert forward["all_reduce"].calls == min(chunks or 1, rows)
        assert forward["all_reduce"].bytes == rows * n * dtype.itemsize
    assert backward.total.calls == 0


def row_cases(group, cases):
    for case in cases:
        try:
            row_case(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_exact_in_any_chunks(pool, world, with_bias):
    """TP-1, TP-2, TP-15: a sum, the bias once, its gradient whole; TP-5: K of 5 on 2 ranks."""
    cases = [
        ((7,), UNEVEN[world], 6, dtype, chunks, with_bias)
        for chunks in (None, *range(1, 9))
        for dtype in DTYPES
    ]
    cases += [
        (lead, UNEVEN[world], n, torch.float32, 3, with_bias)
        for lead, n in (((2, 4), 3), ((1,), 1), ((), 4), ((0,), 3), ((2, 0), 3), ((3,), 0))
    ]
    cases += [((5,), [0] * world, 3, torch.float32, 2, with_bias)]
    cases += [((5,), UNEVEN[world], 3, torch.float32, 2, with_bias, layout) for layout in LAYOUTS]
    pool.run(row_cases, cases, world_size=world)


@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_whatever_carries_it(pool, world, carrier):
    cases = [
        ((7,), UNEVEN[world], 6, dtype, chunks, bool(chunks % 2))
        for chunks in range(1, 9)
        for dtype in DTYPES
    ]
    cases += [
        (lead, UNEVEN[world], n, torch.float32, 3, True)
        for lead, n in (((2, 4), 3), ((1,), 1), ((0,), 3), ((2, 0), 3), ((3,), 0))
    ]
    cases += [((5,), UNEVEN[world], 3, torch.float32, 2, True, layout) for layout in LAYOUTS]
    run_carried(pool, carrier, row_cases, cases, world_size=world)


CASE = st.tuples(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(0, 9),
    st.sampled_from(DTYPES),
    st.none() | st.integers(1, 8),
    st.booleans(),
    st.sampled_from(LAYOUTS),
)


@given(world=st.integers(1, 4), cases=st.lists(CASE, min_size=1, max_size=5))
@settings(max_examples=15)
def test_any_shape_split_and_layout(pool, world, cases):
    cases = [(lead, sizes[:world], *rest) for lead, sizes, *rest in cases]
    pool.run(row_cases, cases, world_size=world)


def rounded(group, dtype, reduce_dtype, chunks):
    name, rank, sizes = resolve_group(group).name, group.rank(), [40, 30, 20]
    x, weight, bias = normals(1, 33, 90), normals(2, 24, 90), normals(3, 24)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    own = (part(x, sizes, -1, rank), part(weight, sizes, 1, rank), bias)
    results = [
        gemm_all_reduce(*own, name, reduce_dtype=reduce_dtype, chunks=chunks) for _ in range(2)
    ]
    partial = F.linear(*own[:2])
    eager = partial.clone()
    dist.all_reduce(eager, group=group)
    truth = F.linear(x.double(), weight.double(), bias.double())
    assert_two_times(results[0], eager + bias, truth)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [1, 4])
def test_the_same_bits_on_every_rank_and_in_every_run(pool, dtype, chunks):
    for reduce_dtype in (None, torch.float32):
        if dtype is torch.float64 and reduce_dtype is not None:
            continue
        results = pool.run(rounded, dtype, reduce_dtype, chunks, world_size=3)
        first = results[0][0]
        assert all(torch.equal(first, y) for pair in results for y in pair)


@pytest.mark.parametrize("carrier", CARRIERS[1:])
def test_the_same_bits_whatever_carries_them(pool, carrier):
    for dtype in DTYPES[1:]:
        results = run_carried(pool, carrier, rounded, dtype, torch.float32, 4, world_size=3)
        first = results[0][0]
        assert all(torch.equal(first, y) for pair in results for y in pair)


def wide_range(group, reduce_dtype):
    """Every rank's partial sum is 256 + 1, which bf16 (steps of 2 there) cannot hold."""
    x, weight = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.ones(1, 2).bfloat16()
    name = resolve_group(group).name
    with count_collectives() as counts:
        y = gemm_all_reduce(x, weight, None, name, reduce_dtype=reduce_dtype)
    assert y.dtype is torch.bfloat16
    return y.item(), counts.total.bytes


def test_reduce_dtype_rounds_once(pool):
    """TP-33: 3 * 257 = 771 is 772 in bf16; rounded on every rank first, it is 768."""
    assert pool.run(wide_range, torch.float32, world_size=3) == [(772.0, 4)] * 3
    assert pool.run(wide_range, torch.bfloat16, world_size=3) == [(768.0, 2)] * 3
    assert pool.run(wide_range, None, world_size=3) == [(768.0, 2)] * 3


def gradients_of(group, k_sizes, chunks):
    name, rank = resolve_group(group).name, group.rank()
    x, weight, bias = (
        normals(10 + rank, 3, k_sizes[rank]),
        normals(20 + rank, 2, k_sizes[rank]),
        (normals(3, 2)),
    )
    assert_gradients(
        group,
        lambda x, w, b: torch.sin(gemm_all_reduce(torch.sin(x), w, b, name, chunks=chunks)),
        [x, weight, bias],
        shared=[False, False, True],
        replicated_output=True,
    )


def test_gradcheck_one_rank_perturbed_at_a_time(pool):
    pool.run(gradients_of, [2, 1], 1, world_size=2)
    pool.run(gradients_of, [1, 0, 2], 3, world_size=3)


@pytest.mark.parametrize("carrier", CARRIERS[1:])
def test_gradcheck_whatever_carries_it(pool, carrier):
    run_carried(pool, carrier, gradients_of, [2, 1], 2, world_size=2)
    run_carried(pool, carrier, gradients_of, [1, 0, 2], 3, world_size=3)


def fails_in_a_chunk(group):
    """A GEMM fails on every rank after two chunks have been sent."""
    module = importlib.import_module("tpkernels.overlap.gemm_all_reduce")
    name, x, weight = resolve_group(group).name, torch.ones(8, 2), torch.ones(3, 2)
    sent, real_partial, real_async = [], module._partial, row_sums.all_reduce_async

    def partial(x, weight, out):
        if len(sent) == 2:
            raise MemoryError("no room for chunk 2")
        real_partial(x, weight, out)

    def record(*args):
        sent.append(real_async(*args))
        return sent[-1]

    module._partial, row_sums.all_reduce_async = partial, record
    try:
        gemm_all_reduce(x, weight, None, name, chunks=4)
    except MemoryError:
        pending = [p for p in sent if p._work is not None]
    finally:
        module._partial, row_sums.all_reduce_async = real_partial, real_async
    return len(sent), len(pending), gemm_all_reduce(x, weight, None, name, chunks=2)


def test_an_error_between_two_chunks_leaves_nothing_pending(pool):
    for sent, pending, y in run_carried(pool, "gloo", fails_in_a_chunk, world_size=2):
        assert (sent, pending) == (2, 0)
        assert torch.equal(y, torch.full((8, 3), 4.0))


def bad_call(group, kind):
    name, x, weight = resolve_group(group).name, torch.ones(2, 3), torch.ones(4, 3)
    calls = {
        "shape": lambda: gemm_all_reduce(x, torch.ones(4, 5), None, name),
        "bias": lambda: gemm_all_reduce(x, weight, torch.ones(3), name),
        "dtype": lambda: gemm_all_reduce(x, weight.double(), None, name),
        "reduce_dtype": lambda: gemm_all_reduce(x, weight, None, name, reduce_dtype=torch.int32),
        "chunks": lambda: gemm_all_reduce(x, weight, None, name, chunks=0),
    }
    with count_collectives() as counts:
        try:
            calls[kind]()
        finally:
            assert counts.total.calls == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"gemm_all_reduce: x must be \[\.\.\., K\] with K=5"),
        ("bias", r"gemm_all_reduce: bias must be \[N\] with N=4, got \(3,\)"),
        ("dtype", r"weight is torch\.float64 but x is torch\.float32.*Fix:"),
        (
            "reduce_dtype",
            r"reduce_dtype=torch\.int32 cannot hold the sums; allowed: None, .*float32",
        ),
        ("chunks", r"chunks=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_raises_before_communication(pool, kind, message):
    with pytest.raises(RankError, match=message) as caught:
        pool.run(bad_call, kind, world_size=2)
    assert isinstance(caught.value.__cause__, ConfigError)


def test_the_group_of_one_is_a_linear():
    """TP-54."""
    x, weight, bias = normals(1, 4, 3), normals(2, 5, 3), normals(3, 5)
    assert torch.equal(gemm_all_reduce(x, weight, bias, ""), F.linear(x, weight, bias))
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *t: gemm_all_reduce(*t, ""), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: gemm_all_reduce(*t, ""), inputs)
