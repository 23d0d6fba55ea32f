"""GPT-2 and kin: ``c_attn`` holds [q | k | v] (cross attention: [k | v] beside ``q_attn``)."""

from __future__ import annotations

from torch import nn

from tpkernels.recognise.attention import (
    Projections,
    describe,
    forward_reads,
    uses_attention_interface,
)
from tpkernels.recognise.structure import Matches, Refusal


def match(module: nn.Module) -> Matches | Refusal | None:
    """The attention in ``module``, if its forward splits ``c_attn`` in blocks of ``split_size``.

    A module with the same names that splits otherwise (GPTBigCode) is not this family.
    """
    children = dict(module.named_children())
    if not {"c_attn", "c_proj"} <= children.keys() or not uses_attention_interface(module):
        return None
    if not forward_reads(module, "split_size"):
        return None
    query = "q_attn" if "q_attn" in children else None
    result = describe(module, Projections(q=query, qkv="c_attn", out="c_proj"))
    if isinstance(result, Refusal):
        return result
    if result.num_heads != result.num_kv_heads:
        return Refusal(
            f"c_attn has blocks of {result.num_heads} query and {result.num_kv_heads} key heads, "
            "but its forward splits equal blocks"
        )
    return [("", result)]
