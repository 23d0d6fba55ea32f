"""The column side is dense linears on the rank's rows; backward sums dX over the group, once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.across_ranks import assert_gradients
from tests.ops.samples import EXACT, LAYOUTS, ROUNDED, act_of, laid_out
from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers, normals, part
from tpkernels import envs
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import column_backward, column_gemm_act
from tpkernels.overlap.plan import CHUNKS
from tpkernels.testing import RankError, assert_two_times, count_collectives

QKV = {1: [[4], [2], [3]], 2: [[4, 2], [1, 1], [0, 3]], 3: [[2, 2, 1], [1, 0, 1], [3, 1, 0]]}


def dense(lead, k, n_sizes, make):
    """x, weights, biases and output gradients of the dense layer."""
    totals = [sum(sizes) for sizes in n_sizes]
    x = make(1, *lead, k)
    weights = [make(10 + i, n, k) for i, n in enumerate(totals)]
    biases = [None if i == 1 else make(20 + i, n) for i, n in enumerate(totals)]
    dys = [make(30 + i, *lead, n) for i, n in enumerate(totals)]
    return x, weights, biases, dys


def leaf(tensor, dtype, layout="contiguous"):
    return None if tensor is None else laid_out(tensor.detach().to(dtype), layout).requires_grad_()


def gradients(outputs, inputs, dys):
    wanted = [t for t in inputs if t is not None]
    return iter(torch.autograd.grad(outputs, wanted, dys, materialize_grads=True))


def column_case(group, lead, k, n_sizes, act, layout="contiguous", dtype=torch.float32):
    """Value and gradients against the dense layers, without tolerance; what was sent."""
    name, rank, count = resolve_group(group).name, group.rank(), len(n_sizes)
    x, weights, biases, dys = dense(lead, k, n_sizes, integers)
    dys = [laid_out(dy, layout) for dy in dys]  # expanded gradients, of unexpanded inputs
    flat = [leaf(t, torch.float64) for t in (x, *weights, *biases)]
    ys = [
        act_of(F.linear(flat[0], w, b), act)
        for w, b in zip(flat[1 : count + 1], flat[count + 1 :], strict=True)
    ]
    truths = gradients(ys, flat, [dy.double() for dy in dys])

    def own(tensor, i, dim):
        return None if tensor is None else part(tensor, n_sizes[i], dim, rank)

    swap = "contiguous" if layout == "expanded" else layout
    ours = [
        leaf(x, dtype, swap),
        *(leaf(own(w, i, 0), dtype, swap) for i, w in enumerate(weights)),
        *(leaf(own(b, i, 0), dtype) for i, b in enumerate(biases)),
    ]
    with count_collectives() as forward:
        results = column_gemm_act(ours[0], ours[1 : count + 1], ours[count + 1 :], act, name)
    own_dys = [own(dy, i, -1).to(dtype) for i, dy in enumerate(dys)]
    with count_collectives() as backward:
        mine = gradients(results, ours, own_dys)

    for i, (result, y) in enumerate(zip(results, ys, strict=True)):
        torch.testing.assert_close(result, own(y, i, -1).detach().to(dtype), atol=0, rtol=0)
    torch.testing.assert_close(next(mine), next(truths).to(dtype), atol=0, rtol=0)
    for kind in (weights, biases):
        for i, tensor in enumerate(kind):
            if tensor is not None:
                expected = own(next(truths), i, 0).to(dtype)
                torch.testing.assert_close(next(mine), expected, atol=0, rtol=0)
    assert forward.total.calls == 0
    if group.size() == 1 or x.numel() == 0:
        assert backward.total.calls == 0
    else:
        assert list(backward) == ["all_reduce"]
        rows = x[..., 0].numel()
        calls = min(CHUNKS, rows) if envs.overlap() == "chunked" else 1
        sent = x.numel() * dtype.itemsize
        assert (backward.total.calls, backward.total.bytes) == (calls, sent)


def column_cases(group, cases):
    for case in cases:
        try:
            column_case(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact_and_one_all_reduce_however_many_weights(pool, world):
    cases = [((5,), 4, QKV[world][:count], act) for count in (1, 2, 3) for act in EXACT]
    cases += [(lead, 4, QKV[world], "relu2") for lead in ((2, 3), (), (1,), (0,), (2, 0))]
    cases += [((3,), 0, QKV[world], "relu"), ((3,), 4, [[0] * world], "none")]
    cases += [((3,), 4, QKV[world], "relu", layout) for layout in LAYOUTS]
    cases += [((3,), 4, QKV[world], "none", "contiguous", torch.bfloat16)]
    pool.run(column_cases, cases, world_size=world)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("overlap", ["off", "chunked"])
def test_exact_whatever_carries_it_and_however_cut(pool, carrier, world, overlap):
    """Rows of dX leave while the next ones, and then dW, are computed."""
    cases = [((rows,), 4, QKV[world], "relu") for rows in range(1, 10)]
    cases += [(lead, 4, QKV[world][:1], "relu2") for lead in ((2, 3), (), (0,), (3, 50))]
    cases += [((7,), 4, QKV[world], "none", layout) for layout in LAYOUTS]
    cases += [((7,), 4, QKV[world], "none", "contiguous", torch.bfloat16)]
    cases += [((7,), 0, QKV[world], "none")]
    env = {"TPKERNELS_OVERLAP": overlap}
    run_carried(pool, carrier, column_cases, cases, world_size=world, env=env)


SIZES = st.lists(st.integers(0, 3), min_size=4, max_size=4)
CASE = st.tuples(
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.integers(0, 5),
    st.lists(SIZES, min_size=1, max_size=3),
    st.sampled_from(EXACT),
    st.sampled_from(LAYOUTS),
)


@given(world=st.integers(1, 4), cases=st.lists(CASE, min_size=1, max_size=5))
@settings(max_examples=12)
def test_any_shape_and_split(pool, world, cases):
    cases = [(lead, k, [s[:world] for s in sizes], *rest) for lead, k, sizes, *rest in cases]
    pool.run(column_cases, cases, world_size=world)


def rounded(group, dtype, act):
    name, rank, n_sizes = resolve_group(group).name, group.rank(), [[20, 12], [8, 8]]
    x, weights, biases, dys = dense((33,), 24, n_sizes, normals)
    results = []
    for precision in (torch.float64, dtype):
        flat = [leaf(t, dtype).detach().to(precision).requires_grad_() if t is not None else None
                for t in (x, *weights, *biases)]  # fmt: skip
        ys = [
            act_of(F.linear(flat[0], w, b), act) for w, b in zip(flat[1:3], flat[3:], strict=True)
        ]
        results.append((ys, next(gradients(ys, flat, [dy.to(dtype).to(precision) for dy in dys]))))
    ours = [leaf(x, dtype)]
    ours += [leaf(part(w, n_sizes[i], 0, rank), dtype) for i, w in enumerate(weights)]
    ours += [None if b is None else leaf(part(b, n_sizes[i], 0, rank), dtype)
             for i, b in enumerate(biases)]  # fmt: skip
    ys = column_gemm_act(ours[0], ours[1:3], ours[3:], act, name)
    own_dys = [part(dy, n_sizes[i], -1, rank).to(dtype) for i, dy in enumerate(dys)]
    dx = next(gradients(ys, ours, own_dys))
    (truths, dx_truth), (eager, dx_eager) = results
    for i, y in enumerate(ys):
        cut = [part(t[i].detach(), n_sizes[i], -1, rank) for t in (eager, truths)]
        assert_two_times(y.detach(), *cut)
    assert_two_times(dx, dx_eager, dx_truth, name="dx")
    return dx


@pytest.mark.parametrize("act", ROUNDED)
def test_rounded_activations_and_the_same_bits_of_dx_on_every_rank(pool, act):
    for dtype in (torch.float32, torch.bfloat16):
        first, second = pool.run(rounded, dtype, act, world_size=2)
        assert torch.equal(first, second)


def gradients_of(group, n_sizes):
    name, rank = resolve_group(group).name, group.rank()
    inputs = [normals(1, 3, 2)]
    inputs += [normals(100 * rank + i, sizes[rank], 2) for i, sizes in enumerate(n_sizes)]
    inputs += [normals(100 * rank + 50 + i, sizes[rank]) for i, sizes in enumerate(n_sizes)]
    count = len(n_sizes)
    assert_gradients(
        group,
        lambda x, *p: column_gemm_act(torch.sin(x), p[:count], p[count:], "gelu", name),
        inputs,
        shared=[True] + [False] * (2 * count),
        replicated_output=False,
    )


def test_gradcheck_one_rank_perturbed_at_a_time(pool):
    pool.run(gradients_of, [[2, 1]], world_size=2)
    pool.run(gradients_of, [[1, 0, 2], [1, 1, 1]], world_size=3)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gradcheck_in_chunks_whatever_carries_them(pool, carrier):
    env = {"TPKERNELS_OVERLAP": "chunked"}
    run_carried(pool, carrier, gradients_of, [[2, 1]], world_size=2, env=env)
    run_carried(pool, carrier, gradients_of, [[1, 0, 2], [1, 1, 1]], world_size=3, env=env)


def who_wants_what(group):
    name = resolve_group(group).name
    x, weights = torch.ones(3, 2), [torch.ones(2, 2), torch.ones(4, 2)]
    seen = {}

    def backward_calls(label, x, weights, used):
        ys = column_gemm_act(x, weights, [None, None], "relu", name)
        with count_collectives() as counts:
            sum(ys[i].sum() for i in used).backward()
        seen[label] = counts.total.calls

    def wants(t, on=True):
        return t.clone().requires_grad_(on)

    backward_calls("x alone", wants(x), weights, (0, 1))
    backward_calls("weights alone", x, [wants(w) for w in weights], (0, 1))
    backward_calls("one output", wants(x), [wants(w) for w in weights], (1,))
    with count_collectives() as counts, torch.no_grad():
        column_gemm_act(wants(x), weights, [None, None], "relu", name)
    seen["no_grad"] = counts.total.calls
    return seen


def test_dx_is_sent_only_when_wanted(pool):
    expected = {"x alone": 1, "weights alone": 0, "one output": 1, "no_grad": 0}
    assert pool.run(who_wants_what, world_size=2) == [expected] * 2


def direct_backward(group):
    name, rank = resolve_group(group).name, group.rank()
    grads, x, weights = [torch.full((2, 3), rank + 1.0)], torch.ones(2, 4), [torch.ones(3, 4)]
    both = column_backward(grads, x, weights, name)
    neither = column_backward(grads, x, weights, name, need_dx=False, need_dw=[False])
    more = [(torch.full((5, 2), rank + 1.0), torch.full((5, 3), 2.0))]
    _, (_, beside) = column_backward(grads, x, weights, name, need_dw=[False], beside=more)
    assert torch.equal(beside, torch.full((2, 3), 10.0 * (rank + 1)))
    return both, neither


def test_column_backward_alone(pool):
    for rank, ((dx, (dw,)), neither) in enumerate(pool.run(direct_backward, world_size=2)):
        assert torch.equal(dx, torch.full((2, 4), 9.0))
        assert torch.equal(dw, torch.full((3, 4), 2.0 * (rank + 1)))
        assert neither == (None, [None])


def bad_call(group, weights, biases, act):
    column_gemm_act(torch.ones(2, 3), weights, biases, act, resolve_group(group).name)


@pytest.mark.parametrize(
    ("weights", "biases", "act", "message"),
    [
        ([], [], "none", "at least one weight, got 0 weights"),
        ([torch.ones(4, 3)], [], "none", "got 1 weights and 0 biases"),
        ([torch.ones(4, 5)], [None], "none", "column_gemm_act: x must be .* with K=5"),
        ([torch.ones(4, 3)], [torch.ones(2)], "none", "bias must be .* N=4, got"),
        ([torch.ones(4, 3)], [None], "tanh", "act='tanh' is not known; allowed: none"),
    ],
)
def test_what_does_not_fit_raises(pool, weights, biases, act, message):
    with pytest.raises(RankError, match=message) as caught:
        pool.run(bad_call, weights, biases, act, world_size=2)
    assert isinstance(caught.value.__cause__, ConfigError)
