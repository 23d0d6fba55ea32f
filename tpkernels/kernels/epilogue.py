"""The activations of the epilogues and their derivatives, in fp32 registers.

Formulas and sources: ``tpkernels.reference.activation``. ``0.5 (1 + tanh(u)) = sigmoid(2u)``,
which needs one exponential and cannot overflow into a NaN for finite ``x``.
"""

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)  # the normal density at 0
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)  # tanh GELU, arXiv:1606.08415
CUBIC = tl.constexpr(0.044715)  # the same
# In products the tensor comes first: the interpreter takes `constexpr * tensor` for a constexpr.


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act_value(x, ACT: tl.constexpr):
    """``act(x)``."""
    if ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACT == "gelu_tanh":
        y = x * _logistic((x + x * x * x * CUBIC) * TWO_SQRT_2_OVER_PI)
    elif ACT == "silu":
        y = x * _logistic(x)
    elif ACT == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # a NaN stays one, unlike through tl.maximum
    elif ACT == "relu2":
        r = tl.where(x < 0.0, 0.0, x)
        y = r * r
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        y = x
    return y


@triton.jit
def _bounded(x, LIMIT: tl.constexpr):
    """``x`` within [-LIMIT, LIMIT], where a slope is at its limit; a NaN stays one."""
    x = tl.where(x > LIMIT, LIMIT, x)
    return tl.where(x < -LIMIT, -LIMIT, x)


@triton.jit
def act_slope(x, ACT: tl.constexpr):
    """``act'(x)``."""
    if ACT == "gelu":
        x = _bounded(x, 32.0)  # beyond, infinity times exp(-x^2 / 2) would be a NaN
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        d = cdf + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        x = _bounded(x, 32.0)
        s = _logistic((x + x * x * x * CUBIC) * TWO_SQRT_2_OVER_PI)
        d = s + x * s * (1.0 - s) * (1.0 + x * x * (3.0 * CUBIC)) * TWO_SQRT_2_OVER_PI
    elif ACT == "silu":
        x = _bounded(x, 1024.0)
        s = _logistic(x)
        d = s * (1.0 + x * (1.0 - s))
    elif ACT == "relu":
        d = tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "relu2":
        d = 2.0 * tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        d = tl.full(x.shape, 1.0, tl.float32)
    return d
