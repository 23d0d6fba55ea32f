"""Gradients of the local ops: exact against autograd on the formula, once and twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.samples import (
    ACTIVATIONS,
    DTYPES,
    EXACT,
    JUDGED_DTYPES,
    LAYOUTS,
    OPS,
    ROUNDED,
    assert_equal,
    laid_out,
)
from tpkernels import ops
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.usefixtures("implementation")
by_name = pytest.mark.parametrize("op", OPS, ids=str)


def leaves(tensors):
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def gradients(outputs, inputs, cotangents):
    wanted = [t for t in inputs if t is not None]
    return torch.autograd.grad(outputs, wanted, cotangents, materialize_grads=True)


def away_from_kinks(tensors):
    """relu has no derivative at 0: keep gradcheck's steps on one side of it."""
    return [torch.where(t.abs() < 0.05, t.sign() * 0.05 + 0.01, t) for t in tensors]


FORWARD_OPS = [op for op in OPS if op.optional]  # whose formulas autograd can follow


@pytest.mark.parametrize("op", FORWARD_OPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", EXACT)
def test_integer_gradients_are_exact(op, act, dtype):
    """TP-21: also with no rows, where every weight's gradient is zeros."""
    for lead in ((7,), (2, 3), (1,), (), (0,)):
        tensors = op.integers(lead, 5, 3, dtype)
        ours, eager = leaves(tensors), leaves(tensors)
        expected = op.expected(eager, act)
        cotangents = [torch.randint(-1, 2, y.shape).to(dtype) for y in expected]
        assert_equal(
            gradients(op.run(ours, act), ours, cotangents),
            gradients(expected, eager, cotangents),
        )


def test_no_rows_give_zero_weight_gradients():
    """TP-21: ones(0, 2100)."""
    x, weight, bias = leaves([torch.ones(0, 2100), torch.ones(3, 2100), torch.ones(3)])
    ops.gemm_act(x, weight, bias, "gelu").sum().backward()
    assert x.grad.shape == (0, 2100)
    assert torch.equal(weight.grad, torch.zeros(3, 2100))
    assert torch.equal(bias.grad, torch.zeros(3))


@pytest.mark.parametrize("op", FORWARD_OPS, ids=str)
@pytest.mark.parametrize("dtype", JUDGED_DTYPES, ids=str)
@pytest.mark.parametrize("act", ROUNDED)
def test_gradients_within_twice_eager_s_error(op, act, dtype):
    tensors = op.normals((33,), 24, 40, dtype)
    cotangents = [torch.randn_like(y) for y in op.expected(tensors, act)]
    ours, eager = leaves(tensors), leaves(tensors)
    wide = leaves([t.double() for t in tensors])
    for mine, theirs, truth in zip(
        gradients(op.run(ours, act), ours, cotangents),
        gradients(op.expected(eager, act), eager, cotangents),
        gradients(op.expected(wide, act), wide, [c.double() for c in cotangents]),
        strict=True,
    ):
        assert mine.dtype is dtype
        assert_two_times(mine, theirs, truth, name=f"{op} {act}")


@by_name
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradcheck_and_gradgradcheck(op, act):
    for lead in ((2,), (1, 2), ()):
        inputs = leaves(away_from_kinks(op.normals(lead, 3, 2, torch.float64)))

        def call(*tensors):
            return op.run(tensors, act)

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@by_name
def test_a_third_derivative_is_right(op):
    inputs = leaves(op.normals((2,), 2, 2, torch.float64))

    def slope(*tensors):
        y = op.run(tensors, "silu")[0]
        return torch.autograd.grad(y.sum(), tensors, create_graph=True, materialize_grads=True)

    assert torch.autograd.gradgradcheck(slope, inputs)


@pytest.mark.parametrize("op", FORWARD_OPS, ids=str)
def test_each_input_alone_can_want_a_gradient(op):
    tensors = op.integers((4,), 5, 3)
    cotangents = [torch.ones_like(y) for y in op.expected(tensors, "relu2")]
    all_ours = leaves(tensors)
    everything = gradients(op.run(all_ours, "relu2"), all_ours, cotangents)
    for position, expected in enumerate(everything):
        inputs = [t.detach().requires_grad_(i == position) for i, t in enumerate(tensors)]
        outputs = op.run(inputs, "relu2")
        pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
        (alone,) = torch.autograd.grad(
            [y for y, _ in pairs], [inputs[position]], [c for _, c in pairs]
        )
        assert torch.equal(alone, expected)


def test_the_pre_activation_s_own_gradient_is_added():
    x, weight, bias = leaves(OPS[0].integers((4,), 5, 3))
    y, pre = ops.gemm_act_aux(x, weight, bias, "relu2")
    (through_pre,) = torch.autograd.grad(pre.sum(), x, retain_graph=True)
    (through_y,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (both,) = torch.autograd.grad(pre.sum() + y.sum(), x)
    assert torch.equal(both, through_pre + through_y)


@by_name
@pytest.mark.parametrize("act", ["none", "gelu"])
def test_results_may_be_edited_in_place(op, act):
    for lead in ((2, 3), (), (0,)):
        gradients_of = []
        for in_place in (False, True):
            torch.manual_seed(1)
            inputs = leaves(op.normals(lead, 3, 4))
            y, *_ = op.run(inputs, act)  # the others are kept for backward
            edited = y.mul_(2) if in_place else y * 2
            gradients_of.append(gradients(edited, inputs, torch.ones_like(edited)))
        assert_equal(*gradients_of)


@by_name
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_second_backward_equals_the_first_bitwise(op, act):
    tensors = op.normals((9,), 8, 6)
    inputs = leaves(tensors)
    outputs = op.run(inputs, act)
    cotangents = [torch.randn_like(y) for y in outputs]
    kept = [c.clone() for c in cotangents]
    wanted = [t for t in inputs if t is not None]
    first = torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True)
    second = torch.autograd.grad(outputs, wanted, cotangents)
    assert_equal(first, second)
    assert_equal(inputs, leaves(tensors))  # inputs and gradients are untouched
    assert_equal(cotangents, kept)


@given(
    op=st.sampled_from(FORWARD_OPS),
    act=st.sampled_from(EXACT),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    k=st.integers(0, 5),
    n=st.integers(0, 20),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5),
    gradient_layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100)
def test_any_layout_of_inputs_and_gradients(
    op, act, dtype, lead, k, n, layouts, gradient_layout, seed
):
    torch.manual_seed(seed)
    tensors = [
        laid_out(t, layout)
        for t, layout in zip(op.integers(lead, k, n, dtype), layouts, strict=False)
    ]
    ours, eager = leaves(tensors), leaves(tensors)
    expected = op.expected(eager, act)
    cotangents = [
        laid_out(torch.randint(-1, 2, y.shape).to(dtype), gradient_layout) for y in expected
    ]
    assert_equal(
        gradients(op.run(ours, act), ours, cotangents),
        gradients(expected, eager, cotangents),
    )


def test_nothing_is_kept_when_no_gradient_is_wanted():
    """The pre-activation is written only when a backward will read it."""
    x, weight, bias = OPS[0].normals((4,), 3, 5)
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        ops.gemm_act(x, weight, bias, "gelu")
        with torch.no_grad():
            ops.gemm_act(*leaves([x, weight, bias]), "gelu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        ops.gemm_act(*leaves([x, weight, bias]), "gelu")
        assert sorted(saved) == [(4, 3), (4, 5), (5, 3)]  # x, pre, weight
        saved.clear()
        ops.gemm_act(*leaves([x, weight, bias]), "none")
        assert sorted(saved) == [(4, 3), (5, 3)]
