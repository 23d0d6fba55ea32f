"""BERT and kin: ``query``, ``key``, ``value`` in a child, the output layer in its sibling."""

from __future__ import annotations

from torch import nn

from tpkernels.recognise.attention import (
    KEEP_DENSE,
    Projections,
    describe,
    uses_attention_interface,
)
from tpkernels.recognise.siblings import begins_with_linear
from tpkernels.recognise.structure import Matches, Refusal, is_leaf_linear, leaf_features


def match(module: nn.Module) -> Matches | Refusal | None:
    """The attention of ``module``, found at the parent of both halves."""
    cores = [name for name, child in module.named_children() if _is_core(child)]
    if len(cores) != 1:
        return None
    (core,) = cores
    siblings = {name: child for name, child in module.named_children() if name != core}
    query = module.get_submodule(f"{core}.query")
    if not is_leaf_linear(query):
        return Refusal(
            f"'{core}.query' is a {type(query).__qualname__}, not an nn.Linear", KEEP_DENSE
        )
    width = leaf_features(query)[1]
    outputs = {name: begins_with_linear(child, width) for name, child in siblings.items()}
    found = [f"{name}.{layer}" for name, layer in outputs.items() if layer is not None]
    if len(found) != 1:
        reason = f"no sibling of {core!r} begins with one linear layer of {width} features"
        return Refusal(reason, KEEP_DENSE)
    layers = {
        role: f"{core}.{name}" for role, name in (("q", "query"), ("k", "key"), ("v", "value"))
    }
    result = describe(module, Projections(**layers, out=found[0], core=core))
    return result if isinstance(result, Refusal) else [("", result)]


def _is_core(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_children()}
    return {"query", "key", "value"} <= names and uses_attention_interface(module)
