"""``gemm_act`` by oneDNN's fused epilogue, ``mkldnn::_linear_pointwise``, on CPU.

The operator that torch.compile lowers ``act(F.linear(...))`` to (ATen's
``native/mkldnn/Linear.cpp``). It takes plain weights as well as prepacked ones. It has no relu2,
no float64, and no float16 on processors without AVX-512 FP16: those are refused.

Where it serves without being asked for is said by the measured table of the compiled kernels
(``csrc/ops/cpu_table.cpp``): fp32 only, since in bf16 it was no faster than the library's GEMM and
an epilogue after it.
"""

# M tokens, K in features, N out features

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.library import NAMESPACE, rows
from tpkernels.ops.checks import check_gemm_act

DTYPES = (torch.float32, torch.bfloat16)
SERVES = "gemm_act, act not relu2, in float32 or bfloat16, on CPU"
_ATTRIBUTES = {  # act -> attr, algorithm
    "none": ("none", "none"),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", "none"),
    "relu": ("relu", "none"),
}


def available() -> bool:
    """Whether this PyTorch has oneDNN and it is not switched off."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def serves(op: str, dtype: torch.dtype, act: str) -> bool:
    """Whether such a call on CPU tensors is one that this can serve."""
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return op == "gemm_act" and act in _ATTRIBUTES and dtype in DTYPES


def register(op_names: tuple[str, ...], require: Callable[..., Any]) -> torch.library.Library:
    """Serve CPU tensors by oneDNN until the library returned is destroyed.

    Args:
        op_names: the local ops; all but ``gemm_act`` are refused.
        require: ``choice.choose``, which raises for what cannot be served.
    """

    def gemm_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
        check_gemm_act("gemm_act", x, weight, bias, act)
        x_MK = rows(x)
        (m, k), n = x_MK.shape, weight.shape[0]
        require("gemm_act", x.device, x.dtype, m, n, k, act=act, bias=bias is not None)
        if 0 in (m, n, k):  # nothing to multiply
            return reference.gemm_act(x, weight, bias, act)
        attribute, algorithm = _ATTRIBUTES[act]
        contiguous = None if bias is None else bias.contiguous()
        y_MN = torch.ops.mkldnn._linear_pointwise(
            x_MK.contiguous(), weight.contiguous(), contiguous, attribute, [], algorithm
        )
        return y_MN.reshape(*x.shape[:-1], n)

    def refused(op: str) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            first = next(arg for arg in args if isinstance(arg, Tensor))
            require(op, first.device, first.dtype, 0, 0, 0, act=args[-1])
            raise AssertionError(f"{op} is not served by oneDNN")

        return kernel

    library = torch.library.Library(NAMESPACE, "IMPL")
    for name in op_names:
        library.impl(name, gemm_act if name == "gemm_act" else refused(name), "CPU")
    return library
