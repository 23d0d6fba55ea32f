"""Where compute and communication meet: differentiable ops by group name, and their plans."""

from tpkernels.overlap.column import column_backward, column_gemm_act
from tpkernels.overlap.gemm_all_reduce import gemm_all_reduce
from tpkernels.overlap.mlp import mlp
from tpkernels.overlap.plan import OverlapPlan, plan_gemm_all_reduce
from tpkernels.overlap.replicated import sum_replicated_gradient

__all__ = [
    "OverlapPlan",
    "column_backward",
    "column_gemm_act",
    "gemm_all_reduce",
    "mlp",
    "plan_gemm_all_reduce",
    "sum_replicated_gradient",
]
