"""The Triton kernels against float64, interpreted: sizes, tails, layouts, dtypes, tiles."""

# M tokens, K summed, N columns of the output

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted import DTYPES, LAYOUTS, SMALL, matrix, needs_interpreter
from tpkernels import reference
from tpkernels.errors import ConfigError
from tpkernels.kernels import available
from tpkernels.testing import assert_two_times

if available.triton_status().available:
    from tpkernels.kernels.act_grad import act_grad, glu_grad
    from tpkernels.kernels.config import configs
    from tpkernels.kernels.gemm_act import gemm_act
    from tpkernels.kernels.gemm_dact import gemm_dact
    from tpkernels.kernels.gemm_dglu import gemm_dglu
    from tpkernels.kernels.gemm_glu import gemm_glu

pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]

sizes = st.integers(0, 130) | st.sampled_from(range(16, 130, 16))  # some to be read in vectors
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(LAYOUTS)
gelus = st.sampled_from(("gelu", "gelu_tanh"))
activations = st.sampled_from(reference.ACTIVATIONS)
seeds = st.integers(0, 2**31)


def tiles(op):
    """Small tiles and those that are tuned on either architecture; None: the default rule."""
    tuned = [c for cap in ((8, 0), (9, 0)) for c in configs(op, torch.bfloat16, cap)]
    return st.sampled_from([*SMALL, *SMALL, *tuned, None])


def judge(ours, eager, truth, names):
    """Every result within twice eager's error; all contiguous, of the inputs' dtype."""
    for a, b, c, name in zip(ours, eager, truth, names, strict=True):
        assert a.dtype is b.dtype and a.is_contiguous()
        assert_two_times(a, b, c, name=name)


def wide(*tensors):
    return [None if t is None else t.double() for t in tensors]


@settings(max_examples=220)
@given(st.data(), sizes, sizes, sizes, dtypes, layouts, layouts, gelus, seeds)
def test_gemm_gelu(data, m, n, k, dtype, x_layout, w_layout, act, seed):
    aux, with_bias = data.draw(st.booleans()), data.draw(st.booleans())
    config = data.draw(tiles("gemm_act"))
    x, w = matrix(m, k, dtype, x_layout, seed), matrix(n, k, dtype, w_layout, seed + 1)
    b = matrix(1, n, dtype, "strided", seed + 2)[0] if with_bias else None
    found = gemm_act(x, w, b, act, aux=aux, config=config)
    count = 2 if aux else 1
    judge(
        found if aux else (found,),
        reference.gemm_act_aux(x, w, b, act)[:count],
        reference.gemm_act_aux(*wide(x, w, b), act)[:count],
        ("y", "pre")[:count],
    )


@settings(max_examples=50)
@given(st.data(), sizes, sizes, sizes, dtypes, layouts, layouts, activations, seeds)
def test_gemm_dact(data, m, n, k, dtype, w_layout, pre_layout, act, seed):
    dbias = data.draw(st.booleans())
    dy, w = matrix(m, k, dtype, "contiguous", seed), matrix(k, n, dtype, w_layout, seed + 1)
    pre = matrix(m, n, dtype, pre_layout, seed + 2)
    found = gemm_dact(dy, w, pre, act, dbias=dbias, config=data.draw(tiles("gemm_dact")))

    def plain(dy, w, pre):
        dh = reference.gemm_dact(dy, w, pre, act)
        return (dh, dh.sum(0)) if dbias else (dh,)

    results = found if dbias else (found,)
    judge(results, plain(dy, w, pre), plain(*wide(dy, w, pre)), ("dh", "dbias")[: len(results)])


@settings(max_examples=30)
@given(st.data(), sizes, sizes, sizes, dtypes, layouts, layouts, activations, seeds)
def test_gemm_glu(data, m, n, k, dtype, gate_layout, up_layout, act, seed):
    aux, with_bias = data.draw(st.booleans()), data.draw(st.booleans())
    x = matrix(m, k, dtype, data.draw(layouts), seed)
    w_gate, w_up = matrix(n, k, dtype, gate_layout, seed + 1), matrix(n, k, dtype, up_layout, seed)
    b_up = matrix(1, n, dtype, "contiguous", seed + 2)[0] if with_bias else None
    inputs = (x, w_gate, w_up, None, b_up)
    found = gemm_glu(*inputs, act, aux=aux, config=data.draw(tiles("gemm_glu")))
    count = 3 if aux else 1
    judge(
        found if aux else (found,),
        reference.gemm_glu_aux(*inputs, act)[:count],
        reference.gemm_glu_aux(*wide(*inputs), act)[:count],
        ("y", "gate", "up")[:count],
    )


@settings(max_examples=30)
@given(st.data(), sizes, sizes, sizes, dtypes, layouts, layouts, activations, seeds)
def test_gemm_dglu(data, m, n, k, dtype, gate_layout, up_layout, act, seed):
    dy, w = matrix(m, k, dtype, "contiguous", seed), matrix(k, n, dtype, "contiguous", seed + 1)
    gate, up = matrix(m, n, dtype, gate_layout, seed + 2), matrix(m, n, dtype, up_layout, seed)
    inputs = (dy, w, gate, up)
    judge(
        gemm_dglu(*inputs, act, config=data.draw(tiles("gemm_dglu"))),
        reference.gemm_dglu(*inputs, act),
        reference.gemm_dglu(*wide(*inputs), act),
        ("d_gate", "d_up"),
    )


@settings(max_examples=30)
@given(sizes, sizes, dtypes, layouts, activations, seeds)
def test_element_wise_gradients(m, n, dtype, layout, act, seed):
    dy, gate, up = (matrix(m, n, dtype, layout, seed + i) for i in range(3))
    one, two = wide(dy, gate), wide(dy, gate, up)
    judge(
        (act_grad(dy, gate, act), *glu_grad(dy, gate, up, act)),
        (reference.activation_grad(dy, gate, act), *reference.glu_grad(dy, gate, up, act)),
        (reference.activation_grad(*one, act), *reference.glu_grad(*two, act)),
        ("d_pre", "d_gate", "d_up"),
    )


@pytest.mark.parametrize("config", SMALL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_are_exact_and_the_same_every_time(config, dtype):
    # Below 256 in magnitude, which bfloat16 still holds.
    x, w, b = (torch.randint(-1, 2, shape).to(dtype) for shape in ((37, 40), (48, 40), (48,)))
    before = [t.clone() for t in (x, w, b)]
    y, pre = gemm_act(x, w, b, "relu", aux=True, config=config)
    expected = F.linear(x, w, b)
    torch.testing.assert_close(pre, expected, atol=0, rtol=0)
    torch.testing.assert_close(y, F.relu(expected), atol=0, rtol=0)
    again = gemm_act(x, w, b, "relu", aux=True, config=config)
    assert all(torch.equal(a, b) for a, b in zip((y, pre), again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((x, w, b), before, strict=True))
    dh, dbias = gemm_dact(x, w.t(), pre, "relu", dbias=True, config=config)
    exact = reference.gemm_dact(x.double(), w.t().double(), pre.double(), "relu")
    torch.testing.assert_close(dh, exact.to(dtype), atol=0, rtol=0)
    torch.testing.assert_close(dbias, exact.sum(0).to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_nan_and_infinity_stay_in_their_rows(tma):
    """What the tile loads beyond a matrix, or a neighbour's NaN, reaches no other row."""
    x, w, pre = torch.ones(20, 24), torch.ones(40, 24), torch.ones(20, 40)
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    config = SMALL[1 if tma else 0]
    y = gemm_act(x, w, None, "gelu", config=config)
    assert y[3].isnan().all() and y[7].isposinf().all()
    assert (y.isfinite().all(1).sum() == 18) and torch.equal(y[0], y[19])
    dh, dbias = gemm_dact(x, w.t().contiguous(), pre, "gelu", dbias=True, config=config)
    assert dh[3].isnan().all() and dh.isfinite().all(1).sum() == 18
    assert dbias.isnan().all()


@pytest.mark.parametrize("act", reference.ACTIVATIONS)
def test_slopes_at_infinity_are_their_limits(act):
    """Where a formula would multiply infinity by zero."""
    ends = torch.tensor([[-torch.inf, -3e38, 3e38, torch.inf, torch.nan]])
    slope = act_grad(torch.ones_like(ends), ends, act)[0]
    above = {"relu2": torch.inf}.get(act, 1.0)
    below = {"none": 1.0}.get(act, 0.0)
    assert ((slope[:2].abs() - below).abs() < 1e-15).all()
    assert slope[3] == above and slope[2] > 0
    assert slope[4].isnan() or act in ("relu", "none")


def test_a_dtype_that_the_kernels_lack_is_refused():
    """TP-11."""
    x = torch.ones(2, 3, dtype=torch.float64)
    for call in (
        lambda: gemm_act(x, x, None, "gelu"),
        lambda: gemm_dact(x, x.t(), x[:, :2], "gelu"),
        lambda: act_grad(x, x, "gelu"),
    ):
        with pytest.raises(ConfigError, match="have no float64; allowed: float32, bfloat16, fl"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: gemm_act(t(3, 4), t(5, 6), None, "gelu"), r"\(5, 6\) was given where \(5, 4\)"),
        (lambda t: gemm_act(t(3, 4), t(5, 4), t(1, 4)[0], "gelu"), r"bias must be \(5,\)"),
        (lambda t: gemm_act(t(3, 4), t(5, 4).half(), None, "gelu"), "all need one dtype"),
        (lambda t: gemm_dact(t(3, 4), t(4, 5), t(2, 5), "gelu"), r"\(2, 5\) was given where \(3"),
        (lambda t: gemm_glu(t(3, 4), t(5, 4), t(6, 4), None, None, "silu"), r"\(6, 4\) was given"),
        (lambda t: gemm_dglu(t(3, 4), t(4, 5), t(3, 5), t(3, 6), "silu"), r"\(3, 6\) was given"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_they_are_read(call, message):
    with pytest.raises(ConfigError, match=message):
        call(torch.ones)


def test_an_infinite_weight_s_bias_gradient_is_infinite():
    """Rows past M are zeros, and zero times infinity is not a number."""
    dy, w, pre = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)
    w[0, 2] = torch.inf
    for config in SMALL:
        dh, dbias = gemm_dact(dy, w, pre, "relu", dbias=True, config=config)
        assert torch.equal(dbias, dh.sum(0)) and dbias.isinf().sum() == 1


def test_tf32_is_rounded_and_not_cut_off():
    setting = torch.backends.cuda.matmul
    before, setting.fp32_precision = setting.fp32_precision, "tf32"
    try:
        x, w = (
            matrix(40, 64, torch.float32, "contiguous", 1),
            matrix(24, 64, torch.float32, "contiguous", 2),
        )
        x[0, 0], x[1, 0] = torch.nan, torch.inf
        for config in SMALL:
            y = gemm_act(x, w, None, "none", config=config)
            assert y[0].isnan().all() and y[1].isinf().all()
            truth = x[2:].double() @ w.t().double()
            error = float((y[2:] - truth).norm() / truth.norm())
            assert 1.5e-4 < error < 3.5e-4  # 2.95e-4 by rounding to 10 bits, 7.7e-4 by cutting off
    finally:
        setting.fp32_precision = before


def test_offsets_beyond_two_to_the_31_elements():
    """TP-47, TP-56: a row that begins 2^31 elements on, in inputs of few rows."""
    rows_apart = 1 << 30
    storage = torch.empty(2 * rows_apart + 64, dtype=torch.float16)  # pages are touched on use
    x = storage.as_strided((3, 16), (rows_apart, 1))
    pre = storage[16:].as_strided((3, 24), (rows_apart, 1))
    x.copy_(torch.randn(3, 16))
    pre.copy_(torch.randn(3, 24))
    w = torch.randn(24, 16).half()
    for config in SMALL[:2]:
        y = gemm_act(x, w, None, "gelu", config=config)
        assert torch.equal(y, gemm_act(x.contiguous(), w, None, "gelu", config=config))
        dh = gemm_dact(x, w.t(), pre, "gelu", config=config)
        same = gemm_dact(x.contiguous(), w.t(), pre.contiguous(), "gelu", config=config)
        assert torch.equal(dh, same)
