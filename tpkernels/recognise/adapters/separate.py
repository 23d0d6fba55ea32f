"""Llama and kin: ``q_proj``, ``k_proj``, ``v_proj`` and an output layer in one module."""

from __future__ import annotations

from torch import nn

from tpkernels.recognise.attention import Projections, describe, uses_attention_interface
from tpkernels.recognise.structure import Matches, Refusal

_OUTPUTS = ("o_proj", "out_proj", "dense")


def match(module: nn.Module) -> Matches | Refusal | None:
    """The attention in ``module``, if it has these layers and uses the attention interface."""
    children = dict(module.named_children())
    outputs = [name for name in _OUTPUTS if name in children]
    if not {"q_proj", "k_proj", "v_proj"} <= children.keys() or len(outputs) != 1:
        return None
    if not uses_attention_interface(module):
        return None
    result = describe(module, Projections(q="q_proj", k="k_proj", v="v_proj", out=outputs[0]))
    return result if isinstance(result, Refusal) else [("", result)]
