"""Where compute and communication meet: differentiable ops by group name, and their plans."""

from tpkernels.overlap.all_gather_gemm import all_gather_gemm
from tpkernels.overlap.column import column_backward, column_gemm_act
from tpkernels.overlap.gemm_all_reduce import gemm_all_reduce
from tpkernels.overlap.gemm_reduce_scatter import gemm_reduce_scatter
from tpkernels.overlap.mlp import mlp
from tpkernels.overlap.plan import OverlapPlan, plan_gemm_all_reduce
from tpkernels.overlap.replicated import sum_replicated_gradient
from tpkernels.overlap.sequence_parts import sequence_sizes

__all__ = [
    "OverlapPlan",
    "all_gather_gemm",
    "column_backward",
    "column_gemm_act",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "mlp",
    "plan_gemm_all_reduce",
    "sequence_sizes",
    "sum_replicated_gradient",
]
