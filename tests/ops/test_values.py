"""Every local op equals its plain-PyTorch formula, in every dtype, layout and size."""

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
    act_of,
    assert_equal,
    laid_out,
)
from tpkernels import ops
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.usefixtures("implementation")

SIZES = {
    "odd": ((7,), 5, 3),
    "two_leading": ((2, 3), 4, 6),
    "one_row": ((1,), 5, 17),
    "1d": ((), 5, 4),
    "vector_tail": ((3,), 5, 67),
    "no_rows": ((0,), 5, 3),  # TP-23
    "no_batch": ((2, 0), 5, 3),
    "k_zero": ((4,), 0, 3),
    "n_zero": ((4,), 5, 0),
    "k_and_n_zero": ((2,), 0, 0),
}
by_name = pytest.mark.parametrize("op", OPS, ids=str)


@by_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", EXACT)
def test_integers_are_exact(op, act, dtype):
    for lead, k, n in SIZES.values():
        tensors = op.integers(lead, k, n, dtype)
        assert_equal(op.run(tensors, act), op.expected(tensors, act))


@by_name
@pytest.mark.parametrize("act", EXACT)
def test_integers_are_exact_beyond_one_tile(op, act):
    tensors = op.integers((65,), 70, 130)
    assert_equal(op.run(tensors, act), op.expected(tensors, act))


@by_name
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_size_has_the_formula_s_shape(op, size):
    """TP-23: no rows, no features: an empty or all-bias result, not an error."""
    for act in ACTIVATIONS:
        tensors = op.integers(*size)
        shapes = [t.shape for t in op.expected(tensors, act)]
        results = op.run(tensors, act)
        assert [t.shape for t in results] == shapes
        assert all(t.is_contiguous() for t in results)


@by_name
@pytest.mark.parametrize("dtype", JUDGED_DTYPES, ids=str)
@pytest.mark.parametrize("act", ROUNDED)
def test_activations_within_twice_eager_s_error(op, act, dtype):
    for lead, k, n in (((33,), 24, 40), ((1,), 16, 129)):
        tensors = op.normals(lead, k, n, dtype)
        truths = op.expected([t.double() for t in tensors], act)
        for ours, eager, truth in zip(
            op.run(tensors, act), op.expected(tensors, act), truths, strict=True
        ):
            assert ours.dtype is dtype
            assert_two_times(ours, eager, truth, name=f"{op} {act}")


@pytest.mark.parametrize("dtype", JUDGED_DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activation_and_gradient_over_their_whole_range(act, dtype):
    """Far tails, around zero, infinities: where approximations of erf, tanh and exp give in."""
    largest = 200.0
    edge = torch.cat(
        [
            torch.linspace(-12, 12, 1001, dtype=torch.float64),
            torch.tensor([-largest, largest, 0.0, -0.0, 1e-4, -1e-4], dtype=torch.float64),
        ]
    ).to(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    values = ops.gemm_act(edge[:, None], one, None, act)
    gradients = ops.act_grad(torch.ones_like(edge), edge, act)
    by_formula = [op for op in OPS if op.name in ("gemm_act", "act_grad")]
    for ours, op, tensors in (
        (values, by_formula[0], (edge[:, None], one, None)),
        (gradients, by_formula[1], (torch.ones_like(edge), edge)),
    ):
        wide = [None if t is None else t.double() for t in tensors]
        (truth,), (eager,) = op.expected(wide, act), op.expected(tensors, act)
        assert_two_times(ours, eager, truth, name=f"{op} {act}")
        # No element stands far off alone, which the norm of a thousand could hide.
        ours_off, eager_off = (ours.double() - truth).abs(), (eager.double() - truth).abs()
        bound = 2 * eager_off.max() + torch.finfo(dtype).eps * truth.abs().clamp(min=1)
        assert bool((ours_off <= bound).all())


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_infinity_and_nan_are_the_true_ones_or_eager_s(act):
    """Eager's own ``F.gelu(-inf)`` is NaN: that, or the limit, is right."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    y = ops.gemm_act(x[:, None], torch.ones(1, 1), None, act).flatten()
    eager, limit = act_of(x, act), act_of(x.double(), act).float()
    limit[:2] = torch.tensor([torch.inf, -torch.inf if act == "none" else 0.0])
    close = torch.isclose(y, limit, equal_nan=True) | torch.isclose(y, eager, equal_nan=True)
    assert bool(close.all()), y
    assert bool(y[2].isnan())


@by_name
def test_a_missing_bias_is_a_bias_of_zero(op):
    tensors = op.integers((5,), 4, 6)
    for position in op.optional:
        tensors[position] = torch.zeros_like(tensors[position])
    without = [None if i in op.optional else t for i, t in enumerate(tensors)]
    assert_equal(op.run(without, "relu"), op.run(tensors, "relu"))


@by_name
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_contiguous(op, layout):
    """A transposed weight, a sliced x, an expanded gradient: as their ``.contiguous()``."""
    for lead in ((6,), (2, 3), ()):
        tensors = [laid_out(t, layout) for t in op.integers(lead, 5, 7)]
        before = [t.clone() for t in tensors]
        results = op.run(tensors, "relu2")
        assert_equal(results, op.run([t.contiguous() for t in tensors], "relu2"))
        assert_equal(tensors, before)  # the caller's tensors are untouched
        inputs = {t.untyped_storage().data_ptr() for t in tensors}
        own = [t.untyped_storage().data_ptr() for t in results]
        assert not inputs & set(own) and len(set(own)) == len(own)  # results share no memory


@given(
    op=st.sampled_from(OPS),
    act=st.sampled_from(EXACT),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    k=st.integers(0, 5),
    n=st.integers(0, 40),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5),
    without=st.sets(st.integers(0, 4)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150)
def test_any_shape_dtype_and_layout_is_exact(op, act, dtype, lead, k, n, layouts, without, seed):
    torch.manual_seed(seed)
    tensors = [
        None if i in without and i in op.optional else laid_out(t, layout)
        for i, (t, layout) in enumerate(zip(op.integers(lead, k, n, dtype), layouts, strict=False))
    ]
    assert_equal(op.run(tensors, act), op.expected(tensors, act))


@by_name
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_run_to_run_the_same_bits(op, act):
    tensors = op.normals((9,), 33, 20)
    assert_equal(op.run(tensors, act), op.run(tensors, act))


@pytest.mark.parametrize(("approximate", "act"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_gemm_gelu_is_gemm_act(approximate, act):
    tensors = OPS[0].normals((4,), 3, 5)
    ours = ops.gemm_gelu(*tensors, approximate=approximate)
    assert torch.equal(ours, ops.gemm_act(*tensors, act))
