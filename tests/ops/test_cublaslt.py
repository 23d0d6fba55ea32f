"""The fused cuBLASLt epilogue: what is handed to it, and what never is. Values on CUDA: ``gpu``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.samples import act_of
from tpkernels import ops
from tpkernels.ops import choice, cublaslt
from tpkernels.testing import assert_two_times


def as_on_cuda(bias, x, weight, *, beta=1, alpha=1, use_gelu=False):
    """``_addmm_activation`` as ATen's CUDA code is written, K = 0 included."""
    pre = torch.addmm(bias, x, weight, beta=beta, alpha=alpha)
    if x.shape[1] == 0:
        return pre
    return F.gelu(pre, approximate="tanh") if use_gelu else F.relu(pre)


@pytest.mark.parametrize("act", cublaslt.ACTIVATIONS)
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (1, 7, 3), (5, 1, 1), (5, 0, 3), (0, 7, 3)])
def test_the_call_means_gemm_act(monkeypatch, act, m, k, n):
    monkeypatch.setattr(torch, "_addmm_activation", as_on_cuda)
    x, weight, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(2 * n)[::2]
    y = cublaslt.gemm_act(x, weight, bias, act)
    torch.testing.assert_close(y, act_of(F.linear(x, weight, bias), act))
    assert y.is_contiguous()


def test_on_cpu_torch_s_call_is_the_other_gelu():
    """So CPU tensors must not be served by it, and are not."""
    x, weight, bias = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    pre = F.linear(x, weight, bias)
    y = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    torch.testing.assert_close(y, F.gelu(pre))
    assert not torch.allclose(y, F.gelu(pre, approximate="tanh"), atol=1e-6)
    on_cpu = torch.device("cpu")
    assert "cublaslt" not in choice.candidates("gemm_act", on_cpu, x.dtype, "gelu_tanh", True)


@pytest.mark.gpu
@pytest.mark.parametrize("act", cublaslt.ACTIVATIONS)
@pytest.mark.parametrize("dtype", cublaslt.DTYPES, ids=str)
@pytest.mark.parametrize(
    "size", [(64, 128, 96), (1, 128, 96), (33, 1, 96), (17, 0, 5), (300, 70, 1)]
)
def test_values_on_cuda(act, dtype, size):
    m, k, n = size
    torch.manual_seed(0)
    shapes = ((m, k), (n, k), (n,))
    x, weight, bias = (torch.randn(s, device="cuda").to(dtype) for s in shapes)
    truth = act_of(F.linear(x.double(), weight.double(), bias.double()), act)
    with choice.using("cublaslt"):
        y = ops.gemm_act(x, weight, bias, act)
    assert_two_times(y, act_of(F.linear(x, weight, bias), act), truth)
