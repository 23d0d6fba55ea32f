"""Plain PyTorch: the specification of every op, and what serves where nothing faster does."""

from tpkernels.reference.activation import ACTIVATIONS, activation, activation_grad
from tpkernels.reference.gemm_act import gemm_act, gemm_act_aux, gemm_dact
from tpkernels.reference.gemm_glu import gemm_dglu, gemm_glu, gemm_glu_aux, glu_grad

__all__ = [
    "ACTIVATIONS",
    "activation",
    "activation_grad",
    "gemm_act",
    "gemm_act_aux",
    "gemm_dact",
    "gemm_dglu",
    "gemm_glu",
    "gemm_glu_aux",
    "glu_grad",
]
