"""The local ops, ``torch.ops.tpkernels.*``: schema, reference, fake, autograd and autocast.

Importing this module defines them and lets what is faster override what it has: the compiled
extension on CPU, and on CUDA what :mod:`tpkernels.ops.choice` says. The functions below are their
public faces; each docstring says what the op equals in plain PyTorch.
"""

from tpkernels.ops import choice, serve
from tpkernels.ops.gemm_act import (
    act_grad,
    gemm_act,
    gemm_act_aux,
    gemm_dact,
    gemm_dact_dbias,
    gemm_gelu,
)
from tpkernels.ops.gemm_glu import gemm_dglu, gemm_glu, gemm_glu_aux, glu_grad

choice.apply()
_on_cuda = serve.register("CUDA")  # initialises nothing: only names the kernels

__all__ = [
    "act_grad",
    "choice",
    "gemm_act",
    "gemm_act_aux",
    "gemm_dact",
    "gemm_dact_dbias",
    "gemm_dglu",
    "gemm_gelu",
    "gemm_glu",
    "gemm_glu_aux",
    "glu_grad",
]
