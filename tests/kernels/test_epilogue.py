"""The epilogues' activations over their whole range, before anything is rounded to 16 bits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.interpreted import needs_interpreter
from tests.ops.samples import act_gradient, act_of
from tpkernels.kernels import available
from tpkernels.reference import ACTIVATIONS

if available.triton_status().available:
    import triton
    import triton.language as tl

    from tpkernels.kernels.epilogue import TAIL_BOUND, act_slope, act_value

    @triton.jit
    def _evaluate(x, value, slope, ACT: tl.constexpr, PRECISE: tl.constexpr, N: tl.constexpr):
        at = tl.arange(0, N)
        x_ = tl.load(x + at)
        tl.store(value + at, act_value(x_, ACT, PRECISE))
        tl.store(slope + at, act_slope(x_, ACT, PRECISE))


pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
COUNT = 8192
HALF_ULP = 2.0**-11  # of float16, the finer of the 16-bit dtypes, relative


def evaluate(x, act, precise):
    value, slope = torch.empty_like(x), torch.empty_like(x)
    _evaluate[(1,)](x, value, slope, act, precise, x.numel())
    return value.double(), slope.double()


def errors(act, precise):
    """On [-12, 12]: the largest error of value and slope, absolute below 1 and relative above, and
    the largest relative one of the value.
    """
    x = torch.linspace(-12, 12, COUNT)
    wide = x.double()
    value, slope = evaluate(x, act, precise)
    true_value, true_slope = act_of(wide, act), act_gradient(torch.ones_like(wide), wide, act)
    # Where the true value is a number that float16 has.
    seen = true_value.abs() > 6e-8
    relative = ((value - true_value).abs() / true_value.abs())[seen]
    return (
        float(((value - true_value).abs() / true_value.abs().clamp(min=1)).max()),
        float(((slope - true_slope).abs() / true_slope.abs().clamp(min=1)).max()),
        float(relative.max()) if relative.numel() else 0.0,
    )


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_for_float32_they_are_as_precise_as_float32(act):
    value, slope, _ = errors(act, True)
    assert value < 1e-6 and slope < 1e-6


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_for_16_bits_they_are_within_float16_s_rounding_also_in_the_tail(act):
    value, slope, relative = errors(act, False)
    assert value < 2e-5 and slope < 1e-4
    assert relative < HALF_ULP


def test_the_normal_tail_is_what_the_comment_says():
    m = torch.linspace(0, TAIL_BOUND.value, COUNT)
    value, _ = evaluate(-m, "gelu", False)  # -m Phi(-m)
    truth = torch.tensor([-x * 0.5 * math.erfc(x / math.sqrt(2)) for x in m.double().tolist()])
    relative = (value / truth.double() - 1)[1:].abs().max()
    assert 5e-5 < relative < 3.3e-4


@pytest.mark.parametrize("precise", [True, False], ids=["float32", "16 bits"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_infinities_and_nan(act, precise):
    """The limit; at minus infinity also what PyTorch has, NaN, where a product is one."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, -0.0, 0.0])
    value, slope = evaluate(x, act, precise)
    assert value[0] == torch.inf and value[2].isnan()
    assert value[1].isnan() or value[1] == (-torch.inf if act == "none" else 0)
    assert (value[5:] == 0).all()
    assert not slope[:2].isnan().any() and not slope[3:].isnan().any()
    assert slope[2].isnan() or act in ("none", "relu")
