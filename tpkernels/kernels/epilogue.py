"""The activations of the epilogues and their derivatives, in fp32 registers.

Formulas and sources: ``tpkernels.reference.activation``. ``0.5 (1 + tanh(u)) = sigmoid(2u)``,
which needs one exponential and cannot overflow into a NaN for finite ``x``.

``PRECISE`` is for float32 results. Without it, for results that are rounded to 16 bits: the same
functions to within float16's rounding error in a half of the instructions, since a
tile's epilogue takes time from its tensor cores.
"""

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)  # the normal density at 0
LOG2_E = tl.constexpr(1.4426950408889634)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)  # tanh GELU, arXiv:1606.08415
CUBIC = tl.constexpr(0.044715)  # the same
# exp(m^2 / 2) Phi(-m) on [0, 6], relative error 9e-5, 3.2e-4 as float32 evaluates it, in ascending
# powers (scripts/fit_epilogue.py).
TAIL_BOUND = tl.constexpr(6.0)
TAIL_0 = tl.constexpr(4.999550645e-01)
TAIL_1 = tl.constexpr(-3.976211080e-01)
TAIL_2 = tl.constexpr(2.429830848e-01)
TAIL_3 = tl.constexpr(-1.173994454e-01)
TAIL_4 = tl.constexpr(4.343939596e-02)
TAIL_5 = tl.constexpr(-1.171249100e-02)
TAIL_6 = tl.constexpr(2.182625410e-03)
TAIL_7 = tl.constexpr(-2.632123470e-04)
TAIL_8 = tl.constexpr(1.835864671e-05)
TAIL_9 = tl.constexpr(-5.601606989e-07)
# In products the tensor comes first: the interpreter takes `constexpr * tensor` for a constexpr.


@triton.jit
def _positive(x):
    """``max(x, 0)``; a NaN stays one."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _logistic(x, PRECISE: tl.constexpr):
    """(s, e) with s = sigmoid(x) = 1 / (1 + e) and e = exp(-x), so that 1 - s is e s."""
    if PRECISE:
        e = tl.exp(-x)
        s = 1.0 / (1.0 + e)
    else:  # two instructions of the special function unit, where a division takes more
        e = tl.exp2(x * -LOG2_E)
        r = tl.rsqrt(1.0 + e)
        s = r * r
    return s, e


@triton.jit
def _normal_tail(x):
    """(m, e, p) with m = min(|x|, 6), e = exp(-x^2 / 2) and Phi(-|x|) = e p, but tiny past 6."""
    m = tl.minimum(tl.abs(x), TAIL_BOUND)
    e = tl.exp2(x * x * (-0.5 * LOG2_E))
    p = m * TAIL_9 + TAIL_8
    p = p * m + TAIL_7
    p = p * m + TAIL_6
    p = p * m + TAIL_5
    p = p * m + TAIL_4
    p = p * m + TAIL_3
    p = p * m + TAIL_2
    p = p * m + TAIL_1
    p = p * m + TAIL_0
    return m, e, p


@triton.jit
def act_value(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    """``act(x)``."""
    if ACT == "gelu":
        if PRECISE:
            y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
        else:  # x Phi(x) = max(x, 0) - |x| Phi(-|x|)
            m, e, p = _normal_tail(x)
            y = _positive(x) - m * e * p
    elif ACT == "gelu_tanh":
        u = x * (x * x * (TWO_SQRT_2_OVER_PI * CUBIC) + TWO_SQRT_2_OVER_PI)
        s, e = _logistic(u, PRECISE)
        y = x * s
    elif ACT == "silu":
        s, e = _logistic(x, PRECISE)
        y = x * s
    elif ACT == "relu":
        y = _positive(x)
    elif ACT == "relu2":
        r = _positive(x)
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
def act_slope(x, ACT: tl.constexpr, PRECISE: tl.constexpr):
    """``act'(x)``."""
    if ACT == "gelu":
        if PRECISE:
            x = _bounded(x, 32.0)  # beyond, infinity times exp(-x^2 / 2) would be a NaN
            cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
            d = cdf + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
        else:  # d at -m, and 1 - d at m; a NaN goes through the comparison's other side
            m, e, p = _normal_tail(x)
            below = e * (p - m * INV_SQRT_2PI)
            d = tl.where(x < 0.0, below, tl.where(x >= 0.0, 1.0 - below, x))
    elif ACT == "gelu_tanh":
        x = _bounded(x, 8.0)  # where e is still finite, and s or 1 - s below 1e-20
        square = x * x
        u = x * (square * (TWO_SQRT_2_OVER_PI * CUBIC) + TWO_SQRT_2_OVER_PI)
        s, e = _logistic(u, PRECISE)
        inner = square * (3.0 * TWO_SQRT_2_OVER_PI * CUBIC) + TWO_SQRT_2_OVER_PI
        d = s + x * inner * s * (e * s)
    elif ACT == "silu":
        x = _bounded(x, 1024.0)  # infinity times 1 - s, or minus infinity times s, is a NaN
        s, e = _logistic(x, PRECISE)
        d = s * (1.0 + x * (1.0 - s))
    elif ACT == "relu":
        d = tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "relu2":
        d = 2.0 * _positive(x)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
        d = tl.full(x.shape, 1.0, tl.float32)
    return d
