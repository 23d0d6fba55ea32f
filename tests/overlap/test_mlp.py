"""``mlp`` is the dense MLP, plain or gated: one all-reduce forward, one backward."""

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
from tpkernels.overlap import mlp
from tpkernels.overlap.plan import CHUNKS
from tpkernels.testing import RankError, assert_two_times, count_collectives

UNEVEN = {1: [5], 2: [3, 2], 3: [4, 0, 1], 4: [2, 2, 1, 0]}  # F_r of each rank
NAMES = ("x", "w_up", "b_up", "w_gate", "b_gate", "w_down", "b_down")
SPLIT_DIM = {"w_up": 0, "b_up": 0, "w_gate": 0, "b_gate": 0, "w_down": 1}


def dense(lead, k, f, n, gated, with_bias, make):
    """The dense tensors by name; None where the form has none."""
    shapes = {
        "x": (*lead, k),
        "w_up": (f, k),
        "b_up": (f,) if with_bias else None,
        "w_gate": (f, k) if gated else None,
        "b_gate": (f,) if gated and with_bias else None,
        "w_down": (n, f),
        "b_down": (n,) if with_bias else None,
    }
    return {
        name: None if shape is None else make(i, *shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def formula(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act):
    up = F.linear(x, w_up, b_up)
    h = act_of(up, act) if w_gate is None else act_of(F.linear(x, w_gate, b_gate), act) * up
    return F.linear(h, w_down, b_down)


def ours(tensors, act, name, **options):
    given_tensors = dict(tensors)
    x = given_tensors.pop("x")
    return mlp(x, act=act, group_name=name, **given_tensors, **options)


def own(tensors, sizes, rank):
    return {
        name: part(t, sizes, SPLIT_DIM[name], rank) if t is not None and name in SPLIT_DIM else t
        for name, t in tensors.items()
    }


def leaves(tensors, dtype, layout="contiguous"):
    return {
        name: None if t is None else laid_out(t.detach().to(dtype), layout).requires_grad_()
        for name, t in tensors.items()
    }


def wanted(tensors):
    return [t for t in tensors.values() if t is not None]


def mlp_case(group, lead, f_sizes, act, gated, with_bias, layout="contiguous"):
    """Value and every gradient against the dense MLP, without tolerance; what was sent."""
    name, rank, k, n = resolve_group(group).name, group.rank(), 4, 3
    whole = dense(lead, k, sum(f_sizes), n, gated, with_bias, integers)
    dy = laid_out(integers(9, *lead, n), layout)  # an expanded gradient, of unexpanded inputs
    truth = leaves(whole, torch.float64)
    y = formula(*truth.values(), act)
    expected = dict(
        zip(
            (name for name in NAMES if truth[name] is not None),
            torch.autograd.grad(y, wanted(truth), dy.double()),
            strict=True,
        )
    )
    input_layout = "contiguous" if layout == "expanded" else layout
    mine = leaves(own(whole, f_sizes, rank), torch.float32, input_layout)
    with count_collectives() as forward:
        result = ours(mine, act, name)
    with count_collectives() as backward:
        gradients = torch.autograd.grad(result, wanted(mine), dy, retain_graph=True)
    again = torch.autograd.grad(result, wanted(mine), dy)
    torch.testing.assert_close(result, y.detach().float(), atol=0, rtol=0)
    for label, gradient, second in zip(expected, gradients, again, strict=True):
        full = expected[label].float()
        if label in SPLIT_DIM:
            full = part(full, f_sizes, SPLIT_DIM[label], rank)
        torch.testing.assert_close(gradient, full, atol=0, rtol=0, msg=f"gradient of {label}")
        assert torch.equal(gradient, second)
    for counts, tensor in ((forward, result), (backward, whole["x"])):
        if group.size() == 1 or tensor.numel() == 0:
            assert counts.total.calls == 0
        else:
            assert list(counts) == ["all_reduce"]
            rows = tensor[..., 0].numel()
            calls = min(CHUNKS, rows) if envs.overlap() == "chunked" else 1
            assert (counts.total.calls, counts.total.bytes) == (calls, tensor.numel() * 4)


def mlp_cases(group, cases):
    for case in cases:
        try:
            mlp_case(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_exact_and_one_all_reduce_each_way(pool, world, gated):
    """TP-1, TP-2, TP-15; TP-5: a hidden size of 5 on 2 ranks, on 4 the last holds nothing."""
    sizes = UNEVEN[world]
    cases = [((5,), sizes, act, gated, with_bias) for act in EXACT for with_bias in (True, False)]
    cases += [(lead, sizes, "relu2", gated, True) for lead in ((2, 3), (), (1,), (0,))]
    cases += [((3,), sizes, "relu", gated, True, layout) for layout in LAYOUTS]
    pool.run(mlp_cases, cases, world_size=world)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3])
def test_exact_in_chunks_whatever_carries_them(pool, world, carrier):
    """Backward: dX leaves while dW of both GEMMs is computed."""
    cases = [
        ((rows,), UNEVEN[world], "relu", gated, gated or rows > 3)
        for rows in range(1, 7)
        for gated in (True, False)
    ]
    cases += [((2, 3), UNEVEN[world], "relu", False, True, layout) for layout in LAYOUTS]
    env = {"TPKERNELS_OVERLAP": "chunked"}
    run_carried(pool, carrier, mlp_cases, cases, world_size=world, env=env)


CASE = st.tuples(
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.sampled_from(EXACT),
    st.booleans(),
    st.booleans(),
    st.sampled_from(LAYOUTS),
)


@given(world=st.integers(1, 4), cases=st.lists(CASE, min_size=1, max_size=5))
@settings(max_examples=12)
def test_any_shape_and_split(pool, world, cases):
    cases = [(lead, sizes[:world], *rest) for lead, sizes, *rest in cases]
    pool.run(mlp_cases, cases, world_size=world)


def rounded(group, dtype, act, gated):
    name, rank, sizes = resolve_group(group).name, group.rank(), [40, 24]
    whole = {
        label: None if t is None else t.to(dtype)
        for label, t in dense((33,), 24, 64, 16, gated, True, normals).items()
    }
    dy = normals(9, 33, 16).to(dtype)
    results = []
    for precision in (torch.float64, dtype):
        inputs = leaves(whole, precision)
        y = formula(*inputs.values(), act)
        results.append([y.detach(), *torch.autograd.grad(y, wanted(inputs), dy.to(precision))])
    mine = leaves(own(whole, sizes, rank), dtype)
    y = ours(mine, act, name)
    gradients = torch.autograd.grad(y, wanted(mine), dy)
    labels = ["y", *(label for label in NAMES if whole[label] is not None)]
    for label, got, truth, eager in zip(labels, (y.detach(), *gradients), *results, strict=True):
        cut = [
            part(t, sizes, SPLIT_DIM[label], rank) if label in SPLIT_DIM else t
            for t in (eager, truth)
        ]
        assert_two_times(got, *cut, name=f"{label} {act} {dtype}")
    return y, gradients[0]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("act", ROUNDED)
def test_rounded_activations_and_the_same_bits_on_every_rank(pool, act, gated):
    for dtype in (torch.float32, torch.bfloat16):
        (y, dx), (other_y, other_dx) = pool.run(rounded, dtype, act, gated, world_size=2)
        assert torch.equal(y, other_y) and torch.equal(dx, other_dx)


def gradients_of(group, f_sizes, gated):
    name, rank = resolve_group(group).name, group.rank()
    whole = dense((2,), 2, sum(f_sizes), 2, gated, True, normals)
    mine = {label: t for label, t in own(whole, f_sizes, rank).items() if t is not None}
    assert_gradients(
        group,
        lambda *tensors: ours(dict(zip(mine, tensors, strict=True)), "gelu", name),
        list(mine.values()),
        shared=[label in ("x", "b_down") for label in mine],
        replicated_output=True,
    )


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_gradcheck_one_rank_perturbed_at_a_time(pool, gated):
    pool.run(gradients_of, [2, 1], gated, world_size=2)
    pool.run(gradients_of, [1, 0, 1], gated, world_size=3)


def wide_range(group, reduce_dtype):
    name = resolve_group(group).name
    one = torch.ones(1, 1).bfloat16()
    down = torch.tensor([[256.0, 1.0]]).bfloat16()
    up = one.expand(2, 1)
    return mlp(one, up, None, down, None, act="relu", group_name=name, reduce_dtype=reduce_dtype)


def test_reduce_dtype_rounds_once(pool):
    """TP-33: as for gemm_all_reduce."""
    assert pool.run(wide_range, torch.float32, world_size=3)[0].item() == 772
    assert pool.run(wide_range, None, world_size=3)[0].item() == 768


BAD = {
    "w_down": ({"w_down": torch.ones(4, 6)}, r"mlp: w_down must be \[N, F\] with F=5, .*\(4, 6\)"),
    "b_down": ({"b_down": torch.ones(5)}, r"mlp: b_down must be \[N\] with N=4, got \(5,\)"),
    "b_up": ({"b_up": torch.ones(4)}, r"mlp: b_up must be \[N\] with N=5, got \(4,\)"),
    "w_gate": ({"w_gate": torch.ones(4, 3)}, r"mlp: w_gate must have the shape of w_up"),
    "b_gate": ({"b_gate": torch.ones(5)}, r"mlp: b_gate was given without w_gate"),
    "dtype": ({"w_down": torch.ones(4, 5).double()}, r"mlp: w_down is torch\.float64 but x is"),
    "act": ({"act": "swish"}, r"act='swish' is not known; allowed: none, gelu"),
}


def bad_call(group, changes, with_grad):
    arguments = {
        "x": torch.ones(2, 3, requires_grad=with_grad),
        "w_up": torch.ones(5, 3),
        "b_up": None,
        "w_down": torch.ones(4, 5),
        "b_down": None,
        "act": "gelu",
        **changes,
    }
    with count_collectives() as counts:
        try:
            mlp(**arguments, group_name=resolve_group(group).name)
        finally:
            assert counts.total.calls == 0


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_raises_before_communication(pool, kind):
    changes, message = BAD[kind]
    for with_grad in (False, True):
        with pytest.raises(RankError, match=message) as caught:
            pool.run(bad_call, changes, with_grad, world_size=2)
        assert isinstance(caught.value.__cause__, ConfigError)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_group_of_one_is_the_dense_mlp(gated):
    """TP-54."""
    tensors = leaves(dense((3,), 3, 4, 2, gated, True, normals), torch.float64)
    present = {label: t for label, t in tensors.items() if t is not None}

    def call(*values):
        return ours(dict(zip(present, values, strict=True)), "silu", "")

    assert torch.autograd.gradcheck(call, list(present.values()))
