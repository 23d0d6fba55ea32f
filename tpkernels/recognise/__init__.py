"""What a dense model is made of: MLPs, attentions, vocabulary layers. Analysis only."""

from tpkernels.recognise.stacks import block_stacks
from tpkernels.recognise.structure import (
    AttentionStructure,
    Found,
    Kept,
    MLPStructure,
    Recognition,
    VocabularyStructure,
    is_leaf_linear,
    leaf_features,
)
from tpkernels.recognise.walk import recognise

__all__ = [
    "AttentionStructure",
    "Found",
    "Kept",
    "MLPStructure",
    "Recognition",
    "VocabularyStructure",
    "block_stacks",
    "is_leaf_linear",
    "leaf_features",
    "recognise",
]
