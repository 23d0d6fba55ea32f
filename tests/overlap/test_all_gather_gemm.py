"""``all_gather_gemm`` is an all-gather and linears on the gathered rows: exactly, however cut."""

# S rows of the gathered dimension, s_r of them on rank r, K in features, N_i out features

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.across_ranks import assert_gradients
from tests.ops.samples import ACTIVATIONS, DTYPES, EXACT, LAYOUTS, act_of, laid_out
from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers, normals, part
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import all_gather_gemm
from tpkernels.overlap.gathering import Gathering
from tpkernels.testing import RankError, assert_two_times, count_collectives


@dataclass(frozen=True)
class Case:
    """Rank r holds ``sizes[r]`` rows of dimension ``dim`` of ``shape`` [..., S, ..., K]."""

    shape: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    outs: tuple[int, ...] = (3, 2)
    act: str = "relu"
    dtype: torch.dtype = torch.float32
    chunks: int | None = 2
    layout: str = "contiguous"

    def tensors(self, rank):
        """The gathered x and a rank's weights, biases (one None) and output gradients."""
        x = integers(1, *self.shape)
        weights = [integers(10 * rank + 2 + i, n, x.shape[-1]) for i, n in enumerate(self.outs)]
        biases = [None if i == 1 else integers(90 + i, n) for i, n in enumerate(self.outs)]
        dys = [integers(10 * rank + 50 + i, *x.shape[:-1], n) for i, n in enumerate(self.outs)]
        d_gathered = integers(70 + rank, *x.shape)
        return x, weights, biases, [laid_out(dy, self.layout) for dy in [*dys, d_gathered]]

    def truth(self, rank):
        """Outputs, the gathered x last, and gradients of x, weights and biases in float64."""
        x, weights, biases, dys = self.tensors(rank)
        leaves = [t.double().requires_grad_() for t in (x, *weights, *biases) if t is not None]
        given = iter(leaves[1 + len(weights) :])
        ys = [
            act_of(F.linear(leaves[0], w, None if b is None else next(given)), self.act)
            for w, b in zip(leaves[1 : 1 + len(weights)], biases, strict=True)
        ]
        ys = [*ys, leaves[0] * 1]
        return ys, torch.autograd.grad(ys, leaves, [dy.double() for dy in dys])


def gather_case(group, case):
    """Value and gradients against the dense layers, without tolerance; what was sent."""
    name, rank = resolve_group(group).name, group.rank()
    ys, (dx, *dparams) = case.truth(rank)
    for other in range(group.size()):
        if other != rank:
            dx = dx + case.truth(other)[1][0]
    x, weights, biases, dys = case.tensors(rank)
    swap = "contiguous" if case.layout == "expanded" else case.layout
    own = laid_out(part(x, case.sizes, case.dim, rank).to(case.dtype), swap)
    laid = [own, *(laid_out(w.to(case.dtype), swap) for w in weights)]
    ours = [t.detach().requires_grad_() for t in laid]
    bs = [None if b is None else b.to(case.dtype).requires_grad_() for b in biases]
    inputs = [*ours, *(b for b in bs if b is not None)]
    copies, dys = [t.detach().clone() for t in inputs], [dy.to(case.dtype) for dy in dys]

    def run():
        where = {"dim": case.dim, "sizes": list(case.sizes), "chunks": case.chunks}
        gathered, results = all_gather_gemm(ours[0], ours[1:], bs, case.act, name, **where)
        return [*results, gathered]

    with count_collectives() as forward:
        results = run()
    with count_collectives() as backward:
        gradients = torch.autograd.grad(results, inputs, dys, retain_graph=True)
    again = torch.autograd.grad(results, inputs, dys)
    with torch.no_grad():
        second = run()

    for result, repeated, y in zip(results, second, ys, strict=True):
        torch.testing.assert_close(result, y.detach().to(case.dtype), atol=0, rtol=0)
        assert torch.equal(result, repeated)
        assert result.is_contiguous() and repeated._base is None
    expected = [part(dx, case.sizes, case.dim, rank), *dparams]
    for mine, repeated, truth in zip(gradients, again, expected, strict=True):
        torch.testing.assert_close(mine, truth.to(case.dtype), atol=0, rtol=0)
        assert torch.equal(mine, repeated)
    assert all(torch.equal(t, copy) for t, copy in zip(inputs, copies, strict=True))
    check_counts(group, case, forward, backward)


def check_counts(group, case, forward, backward):
    """One input is gathered and scattered once, however many weights there are."""
    size = case.dtype.itemsize
    for dimension in case.shape:
        size *= dimension
    if group.size() == 1 or size == 0:
        assert forward.total.calls == backward.total.calls == 0
        return
    assert list(forward) == ["all_gather"]
    assert set(backward) == {"all_gather", "reduce_scatter"}
    even = len(set(case.sizes)) == 1
    for counted in (forward["all_gather"], backward["all_gather"], backward["reduce_scatter"]):
        assert 1 <= counted.calls <= (case.chunks or 4)
        assert not even or counted.bytes == size


def gather_cases(group, cases, overlap="auto"):
    os.environ["TPKERNELS_OVERLAP"] = overlap
    for case in cases:
        try:
            gather_case(group, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


UNEVEN = {1: (5,), 2: (3, 2), 3: (4, 0, 1), 4: (2, 0, 3, 1)}


def shapes(world):
    """The first, a middle and the last dimension; batches that are put together and not."""
    total = sum(UNEVEN[world])
    base = Case((total, 4), 0, UNEVEN[world])
    yield from (replace(base, chunks=chunks) for chunks in range(1, 9))
    yield from (replace(base, dtype=dtype, act="none") for dtype in DTYPES)
    yield from (replace(base, shape=(2, total, 4), dim=1, layout=layout) for layout in LAYOUTS)
    yield replace(base, shape=(3, total, 2, 4), dim=-3, chunks=4, outs=(4, 2, 3), act="relu2")
    yield replace(base, shape=(2, 3, total), dim=-1, chunks=3)
    yield replace(base, shape=(total, 2, 3, 4), chunks=5, outs=(1,), act="none")
    long = (70, *UNEVEN[world][1:])
    yield Case((3, sum(long), 2), 1, long, outs=(2,), chunks=2)
    for shape in ((total, 0), (0, total, 4), (total, 0, 3)):
        yield replace(base, shape=shape, dim=len(shape) - 2 if shape[0] == 0 else 0)
    yield replace(base, outs=(0, 2), act="none")
    yield Case((0, 4), 0, (0,) * world)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_in_any_chunks(pool, world, carrier):
    run_carried(pool, carrier, gather_cases, list(shapes(world)), world_size=world)


@pytest.mark.parametrize("overlap", ["off", "chunked"])
def test_exact_as_the_plan_says(pool, overlap):
    """Uneven parts and batches, one of which a rank holds nothing: the plan is one all the same."""
    cases = [replace(case, chunks=None) for case in shapes(3)]
    run_carried(pool, "gloo", gather_cases, cases, overlap, world_size=3)


def test_the_group_of_one_gathers_nothing(pool):
    """TP-54."""
    pool.run(gather_cases, list(shapes(1)), world_size=1)


CASE = st.builds(
    lambda shape, at, sizes, outs, act, dtype, chunks, layout: (
        shape, at % len(shape), sizes, outs, act, dtype, chunks, layout
    ),
    st.lists(st.integers(0, 3), min_size=2, max_size=4),
    st.integers(0, 3),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    st.sampled_from(("none", "relu")),
    st.sampled_from(DTYPES),
    st.none() | st.integers(1, 8),
    st.sampled_from(LAYOUTS),
)  # fmt: skip


@pytest.mark.parametrize("carrier", CARRIERS)
def test_any_shape_and_split(pool, carrier):
    @settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
    @given(world=st.integers(2, 4), drawn=st.lists(CASE, min_size=1, max_size=8))
    def check(world, drawn):
        cases = []
        for shape, dim, sizes, *rest in drawn:
            held = tuple(sizes[:world])
            whole = (*shape[:dim], sum(held), *shape[dim + 1 :])
            cases.append(Case(whole, dim, held, *rest))
        run_carried(pool, carrier, gather_cases, cases, world_size=world)

    check()


def gradients_of(group, dim, chunks):
    name, rank, sizes = group.group_name, group.rank(), [2, 0, 1][: group.size()]
    shape = [2, 1, 3]
    shape[dim] = sizes[rank]
    features = sum(sizes) if dim == 2 else 3
    weights = [normals(10 * rank + i, n, features) for i, n in enumerate((2, 1))]
    biases = [normals(10 * rank + 5 + i, n) for i, n in enumerate((2, 1))]

    def function(x, w1, w2, b1, b2):
        gathered, ys = all_gather_gemm(
            torch.sin(x), [w1, w2], [b1, b2], "gelu", name, dim=dim, sizes=sizes, chunks=chunks
        )
        return [torch.sin(gathered), *map(torch.sin, ys)]

    assert_gradients(
        group,
        function,
        [normals(90 + rank, *shape), *weights, *biases],
        shared=[False] * 5,
        replicated_output=False,
    )


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gradcheck_one_rank_perturbed_at_a_time(pool, carrier):
    run_carried(pool, carrier, gradients_of, 1, 2, world_size=2)
    run_carried(pool, carrier, gradients_of, 0, 3, world_size=3)


def test_gradcheck_of_gathered_features_and_without_overlap(pool):
    for dim in (0, 2):
        run_carried(pool, "gloo", gradients_of, dim, None, world_size=2)


def rounded(group, act):
    return [rounded_in(group, act, dtype, n) for dtype in DTYPES[1:] for n in (1, 3)]


def rounded_in(group, act, dtype, chunks):
    name, rank = group.group_name, group.rank()
    x, weight, bias = normals(1, 2, 50, 24, dtype=dtype), normals(2, 8, 24), normals(3, 8)
    weight, bias = weight.to(dtype), bias.to(dtype)
    own = part(x, [30, 20], 1, rank)
    results = [
        all_gather_gemm(
            own, [weight], [bias], act, name, dim=1, sizes=[30, 20], chunks=chunks
        )[1][0]
        for _ in range(2)
    ]  # fmt: skip
    truth = act_of(F.linear(x.double(), weight.double(), bias.double()), act)
    assert_two_times(results[0], act_of(F.linear(x, weight, bias), act), truth)
    assert torch.equal(*results)
    return results[0]


@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act not in EXACT])
def test_rounded_activations_are_the_same_bits_everywhere(pool, act):
    first, second = run_carried(pool, "lanes", rounded, act, world_size=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def grid(group, sizes):
    """TP-7: (m, n, k) beside the all-gather and one product."""
    name, rank, world = group.group_name, group.rank(), group.size()
    for m, n, k in sizes:
        for dtype in (torch.float16, torch.bfloat16):
            x = integers(m, world * m, k, dtype=dtype)
            weight = integers(n, n, k, dtype=dtype)
            gathered, (y,) = all_gather_gemm(
                x[rank * m : (rank + 1) * m], [weight], group_name=name, chunks=3
            )
            assert torch.equal(gathered, x)
            assert torch.equal(y, F.linear(x.float(), weight.float()).to(dtype)), (m, n, k)


def test_a_grid_of_shapes(pool):
    """TP-7, TP-12: odd, tall, flat and one-row shapes, each within its time."""
    sizes = [(m, n, k) for m in (1, 33, 128) for n in (1, 40, 257) for k in (1, 64, 130)]
    run_carried(pool, "lanes", grid, sizes, world_size=2)


def gathered_shapes(group, chunks):
    x, name = torch.ones(16, 8) * group.rank(), group.group_name
    results = [
        all_gather_gemm(x, [torch.ones(n, 8)], group_name=name, chunks=chunks)[0] for n in (4, 4096)
    ]
    assert torch.equal(*results)
    return tuple(results[0].shape)


@pytest.mark.parametrize("chunks", [None, 1, 4])
def test_what_is_gathered_does_not_depend_on_n(pool, chunks):
    """TP-8."""
    assert run_carried(pool, "lanes", gathered_shapes, chunks, world_size=2) == [(32, 8)] * 2


def repeated(group, calls):
    """TP-10: new data and another M at every call."""
    name, rank, world = group.group_name, group.rank(), group.size()
    for call in range(calls):
        m = (5, 64, 2, 17)[call % 4]
        x, weight = integers(call, world * m, 6), integers(100 + call, 3, 6)
        mine = x[rank * m : (rank + 1) * m].clone().requires_grad_()
        gathered, (y,) = all_gather_gemm(mine, [weight], group_name=name, chunks=2)
        assert torch.equal(gathered, x) and torch.equal(y, F.linear(x, weight))
        y.sum().backward()
        assert torch.equal(mine.grad, (world * weight.sum(0)).expand(m, 6))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_calls_one_to_many_with_other_data_and_rows(pool, carrier):
    run_carried(pool, carrier, repeated, 8, world_size=3)


def saved(group, act):
    """Elements that are kept for backward, and those of x and the weight."""
    kept = []
    x = torch.ones(4, 6, requires_grad=True)
    weight = torch.ones(5, 6, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        gathered, _ = all_gather_gemm(x, [weight], None, act, group.group_name, chunks=2)
    assert any(t.data_ptr() == x.data_ptr() for t in kept)
    assert not any(t.data_ptr() == gathered.data_ptr() for t in kept)
    return sum(t.numel() for t in kept)


def test_this_rank_keeps_its_own_rows_alone(pool):
    """And where there is an activation, its argument."""
    x, weight, pre = 4 * 6, 5 * 6, 8 * 5
    assert run_carried(pool, "gloo", saved, "none", world_size=2) == [x + weight] * 2
    assert run_carried(pool, "gloo", saved, "gelu", world_size=2) == [x + weight + pre] * 2


def order(group):
    owners = []
    gathering = Gathering(torch.ones(4, 2), 0, [4] * group.size(), group.group_name, 2)
    with gathering:
        owners = [cut.owner for cut in gathering.cuts()]
    return owners


def test_own_rows_come_first_then_the_ring_s(pool):
    for rank, owners in enumerate(run_carried(pool, "gloo", order, world_size=3)):
        ring = [(rank + 1) % 3, (rank + 2) % 3]
        assert owners == [rank, *ring, *ring]
    for rank, owners in enumerate(run_carried(pool, "lanes", order, world_size=3)):
        ring = [(rank + 1) % 3, (rank + 2) % 3]
        assert owners == [rank, rank, *ring, *ring]


def who_wants_what(group):
    name, seen = group.group_name, {}

    def backward_calls(label, x_wants, w_wants, used, gathered_too=False):
        x = torch.ones(2, 3, requires_grad=x_wants)
        weights = [torch.ones(2, 3, requires_grad=w_wants) for _ in range(2)]
        gathered, ys = all_gather_gemm(x, weights, None, "relu", name, chunks=2)
        with count_collectives() as counts:
            loss = sum((ys[i].sum() for i in used), torch.zeros(()))
            (loss + gathered.sum() if gathered_too else loss).backward()
        seen[label] = {kind: counts[kind].calls for kind in counts}

    backward_calls("both", True, True, (0, 1))
    backward_calls("x alone", True, False, (0, 1))
    backward_calls("weights alone", False, True, (1,))
    backward_calls("gathered alone", True, True, (), gathered_too=True)
    return seen


def test_only_what_is_wanted_is_sent(pool):
    expected = {
        "both": {"all_gather": 2, "reduce_scatter": 2},
        "x alone": {"reduce_scatter": 2},
        "weights alone": {"all_gather": 2},
        "gathered alone": {"reduce_scatter": 2},
    }
    assert run_carried(pool, "lanes", who_wants_what, world_size=2) == [expected] * 2


def bad_call(group, kind):
    name, x, weight = group.group_name, torch.ones(2, 3), torch.ones(4, 3)
    calls = {
        "shape": lambda: all_gather_gemm(x, [torch.ones(4, 5)], None, "none", name),
        "bias": lambda: all_gather_gemm(x, [weight], [torch.ones(3)], "none", name),
        "biases": lambda: all_gather_gemm(x, [weight], [], "none", name),
        "weights": lambda: all_gather_gemm(x, [], [], "none", name),
        "act": lambda: all_gather_gemm(x, [weight], None, "tanh", name),
        "dtype": lambda: all_gather_gemm(x, [weight.double()], None, "none", name),
        "dim": lambda: all_gather_gemm(x, [weight], None, "none", name, dim=2),
        "sizes": lambda: all_gather_gemm(x, [weight], None, "none", name, sizes=[2]),
        "own size": lambda: all_gather_gemm(x, [weight], None, "none", name, sizes=[3, 3]),
        "chunks": lambda: all_gather_gemm(x, [weight], None, "none", name, chunks=0),
        "features": lambda: all_gather_gemm(x, [weight], None, "none", name, dim=-1),
    }
    with count_collectives() as counts:
        try:
            calls[kind]()
        finally:
            assert counts.total.calls == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"all_gather_gemm: x must be \[\.\.\., K\] with K=5"),
        ("bias", r"all_gather_gemm: bias must be \[N\] with N=4, got \(3,\)"),
        ("biases", r"all_gather_gemm: .* got 1 weights and 0 biases"),
        ("weights", r"at least one weight, got 0 weights"),
        ("act", r"act='tanh' is not known; allowed: none"),
        ("dtype", r"weight is torch\.float64 but x is torch\.float32.*Fix:"),
        ("dim", r"dim=2 is not a dimension of x \(2, 3\); allowed: -2 to 1"),
        ("sizes", r"sizes=\[2\] must name the rows of each of 2 ranks .*Fix:"),
        ("own size", r"sizes=\[3, 3\] must .* which has 2"),
        ("chunks", r"chunks=0 must be at least 1"),
        ("features", r"weight must be \[N, K\] with K=6, the gathered features"),
    ],
)
def test_what_does_not_fit_raises_before_communication(pool, kind, message):
    with pytest.raises(RankError, match=message) as caught:
        pool.run(bad_call, kind, world_size=2)
    assert isinstance(caught.value.__cause__, ConfigError)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_one_element_of_any_stride_is_sent(pool, carrier):
    """PyTorch calls it contiguous, and still views it as bytes only where its stride is 1."""
    case = Case((1, 1), 0, (0, 1), (1,), "none", torch.float64, 4, "strided")
    run_carried(pool, carrier, gather_cases, [case], world_size=2)
