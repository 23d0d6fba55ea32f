"""The local ops, ``torch.ops.tpkernels.*``: schema, reference, fake, autograd and autocast.

Importing this module defines them and lets the compiled extension override what it has. The
functions below are their public faces; each docstring says what the op equals in plain PyTorch.
"""

from tpkernels.ops import choice
from tpkernels.ops.gemm_act import act_grad, gemm_act, gemm_act_aux, gemm_dact, gemm_gelu
from tpkernels.ops.gemm_glu import gemm_dglu, gemm_glu, gemm_glu_aux, glu_grad

choice.apply()

__all__ = [
    "act_grad",
    "choice",
    "gemm_act",
    "gemm_act_aux",
    "gemm_dact",
    "gemm_dglu",
    "gemm_gelu",
    "gemm_glu",
    "gemm_glu_aux",
    "glu_grad",
]
