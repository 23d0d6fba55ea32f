"""Offsets past 2^31 elements: outputs, inputs and strides that an int32 cannot address."""

# M tokens, K in features, N out features

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tpkernels.kernels.act_grad import act_grad
from tpkernels.kernels.gemm_act import gemm_act
from tpkernels.kernels.gemm_dact import gemm_dact
from tpkernels.kernels.gemm_dglu import gemm_dglu
from tpkernels.kernels.gemm_glu import gemm_glu
from tpkernels.testing import assert_two_times

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("memory")]

M, N, K = 65536 + 3, 32768 + 8, 64  # M N is 2^31 and 0.6 million more
LAST = slice(-3, None)


def draw(*shape):
    return torch.randn(*shape, device="cuda").mul_(0.3).to(torch.bfloat16)


def assert_rows(ours, formula, *inputs):
    """``ours``, the last rows of a result, is ``formula`` of those rows of the inputs."""
    eager, truth = formula(*inputs), formula(*(t.double() for t in inputs))
    assert_two_times(ours, eager, truth)


@pytest.mark.needs_gib(12)
def test_output_of_gemm_act_and_its_pre_activation():
    x, weight, bias = draw(M, K), draw(N, K), draw(N)
    y, pre = gemm_act(x, weight, bias, "gelu", aux=True)
    assert y.numel() > 2**31
    for rows in (LAST, slice(0, 3)):
        assert_rows(pre[rows], F.linear, x[rows], weight, bias)
        assert_rows(y[rows], lambda *a: F.gelu(F.linear(*a)), x[rows], weight, bias)


@pytest.mark.needs_gib(12)
def test_pre_activation_that_gemm_dact_reads():
    dy, weight = draw(M, K), draw(K, N)
    pre = torch.zeros(M, N, device="cuda", dtype=torch.bfloat16)
    pre[LAST] = draw(3, N)
    dh = gemm_dact(dy, weight, pre, "relu")
    assert_rows(dh[LAST], lambda d, w, p: (d @ w) * (p > 0), dy[LAST], weight, pre[LAST])
    assert bool((dh[1000:1003] == 0).all())


@pytest.mark.needs_gib(20)
def test_gated_forms():
    x, gate, up = draw(M, K), draw(N, K), draw(N, K)
    y = gemm_glu(x, gate, up, None, None, "silu")
    assert_rows(y[LAST], lambda a, g, u: F.silu(F.linear(a, g)) * F.linear(a, u), x[LAST], gate, up)
    dy, down = draw(M, K), draw(K, N)
    d_gate, d_up = gemm_dglu(dy, down, y, y, "relu")
    rows = (dy[LAST], down, y[LAST])
    assert_rows(d_gate[LAST], lambda d, w, p: (d @ w) * p * (p > 0), *rows)
    assert_rows(d_up[LAST], lambda d, w, p: (d @ w) * p.relu(), *rows)


@pytest.mark.needs_gib(14)
def test_elements():
    dy = torch.ones(2**31 + 5, device="cuda", dtype=torch.bfloat16)
    pre = torch.full_like(dy, -1.0)
    pre[-5:] = 1.0
    d_pre = act_grad(dy, pre, "relu")
    assert d_pre[-7:].tolist() == [0.0] * 2 + [1.0] * 5


@pytest.mark.needs_gib(10)
@pytest.mark.parametrize("stride", [2**30, 2**30 + 1], ids=["aligned", "not aligned"])
def test_rows_far_apart(stride):
    storage = torch.zeros(3 * stride + K, device="cuda", dtype=torch.bfloat16)
    x = storage.as_strided((4, K), (stride, 1))
    x.copy_(draw(4, K))
    weight = draw(136, K)
    y = gemm_act(x, weight, None, "none")
    assert_rows(y, F.linear, x.contiguous(), weight)
