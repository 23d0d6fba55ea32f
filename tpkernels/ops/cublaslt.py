"""``gemm_act`` by cuBLASLt's fused epilogue, through ``torch._addmm_activation``, on CUDA.

What it relies on, read in ATen's ``native/cuda/Blas.cpp`` (``addmm_out_cuda_impl``; torch 2.11
and later, CUDA 12 and 13):

- ``use_gelu=True`` is the tanh form on CUDA whatever path is taken: cuBLASLt's
  ``CUBLASLT_EPILOGUE_GELU_BIAS``, or a GEMM and then ``gelu_(result, "tanh")`` (pytorch#104061;
  before torch 2.1 the latter was erf). On CPU the same call is the **erf** form, so CPU tensors
  are never served here.
- ``use_gelu=False`` is ReLU.
- It is fused where the bias is 1-D and contiguous, the result contiguous, M, N and K above 1 and
  the dtype float32, bfloat16 or float16 (float64 is let through as well, which is not served
  here), unless ``DISABLE_ADDMM_CUDA_LT=1`` is set or cuBLASLt finds no algorithm; then the same
  values come unfused. The activation is applied to the fp32 sums, before they are rounded.
- **K = 0 returns the bias without its activation**, so that never goes there.
- cuBLASLt's ReLU is documented as max(x, 0), which says nothing of NaN: not measured.

Whether it is faster is the measured table's to say.
"""

# M tokens, K in features, N out features

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels import reference

ACTIVATIONS = ("gelu_tanh", "relu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVES = "gemm_act with a bias and act gelu_tanh or relu, in float32, bfloat16 or float16, on CUDA"


def serves(op: str, dtype: torch.dtype, act: str, bias: bool) -> bool:
    """Whether such a call on a CUDA device is one that this can serve."""
    return op == "gemm_act" and act in ACTIVATIONS and bias and dtype in DTYPES


def gemm_act(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor, act: str) -> Tensor:
    """``act(F.linear(x, weight, bias))`` for CUDA tensors and an act of :data:`ACTIVATIONS`.

    x [M, K], weight [N, K], of any strides; bias [N] -> [M, N], contiguous.
    """
    if x_MK.shape[1] == 0:
        return reference.gemm_act(x_MK, weight_NK, bias_N, act)
    return torch._addmm_activation(
        bias_N.contiguous(), x_MK, weight_NK.t(), use_gelu=act == "gelu_tanh"
    )
