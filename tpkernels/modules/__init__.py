"""Tensor-parallel ``nn.Module``s, each usable alone, by class swap, and as a ``ParallelStyle``."""

from tpkernels.modules.attention import TPAttention
from tpkernels.modules.cross_entropy import vocab_parallel_cross_entropy
from tpkernels.modules.embedding import VocabParallelEmbedding
from tpkernels.modules.head_partition import HeadPartition
from tpkernels.modules.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.modules.mlp import TPMLP
from tpkernels.modules.multihead_attention import TPMultiheadAttention
from tpkernels.modules.sequence import SequenceShards
from tpkernels.modules.sequence_parallel import SequenceParallel

__all__ = [
    "TPMLP",
    "ColumnParallelLinear",
    "HeadPartition",
    "RowParallelLinear",
    "SequenceParallel",
    "SequenceShards",
    "TPAttention",
    "TPMultiheadAttention",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]
