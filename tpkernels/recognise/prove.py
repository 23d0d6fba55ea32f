"""Formulas evaluated beside what a module computes: a structure is claimed only if they agree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tpkernels.recognise.probes import probe
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import MLPStructure, leaf_features
from tpkernels.recognise.trace import Trace, in_mode, signature_of
from tpkernels.reference.activation import activation

# The module and its formula round in another order; both in the module's dtype.
ROUNDINGS = 64

Linear = Callable[[str, Tensor], Tensor]


def formula_problem(trace: Trace, scope: Scope, structure: MLPStructure) -> str | None:
    """Why the module does not compute its MLP formula; None if it does (or has no real weights).

    The module runs in evaluation on [2, 3, features]; one module for each class and set of sizes.
    """
    features = leaf_features(trace.module.get_submodule(structure.up))[0]
    return run_problem(trace, scope, repr(structure), (2, 3, features), _mlp_formula(structure))


def run_problem(
    trace: Trace,
    scope: Scope,
    claim: str,
    shape: tuple[int, ...],
    formula: Callable[[Tensor, Linear], Tensor],
) -> str | None:
    """Run the module itself on a random input and compare with ``formula(x, linear)``.

    Nothing is left behind: no gradient, random state or mode. Skipped where weights have no
    values (meta), and for a computation of the same class, sizes and ``claim`` already proven.
    """
    module = trace.module
    weight = next(module.parameters())
    if any(p.is_meta for p in module.parameters()):
        return None
    signature = f"{signature_of(trace)} {claim} {weight.dtype} {weight.device}"
    if signature in scope.proven:
        return None
    x = probe(*shape, seed=5).to(weight.device, weight.dtype)
    try:
        with torch.no_grad(), in_mode(module, training=False):
            result = module.forward(x)
            expected = formula(x, lambda path, x: apply_linear(module.get_submodule(path), x))
    except Exception as error:  # the user's own code: whatever it raises is the reason
        return f"running it raised {type(error).__name__}: {str(error)[:200]}"
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return "running it did not give one tensor of the expected shape"
    if not bool(torch.isfinite(expected).all()):
        return None  # weights without values yet (``to_empty``): nothing to compare
    limit = ROUNDINGS * torch.finfo(weight.dtype).eps * float(expected.abs().max())
    if not float((result - expected).abs().max()) <= limit:
        return "running it gave another result than its formula"
    scope.proven.add(signature)
    return None


def apply_linear(leaf: nn.Module, x: Tensor) -> Tensor:
    """What a linear leaf computes, without calling it."""
    weight, bias = leaf.weight, leaf.bias
    assert isinstance(weight, Tensor)
    y = x @ (weight.t() if isinstance(leaf, nn.Linear) else weight)
    return y + bias if isinstance(bias, Tensor) else y


def probe_linears(module: nn.Module, paths: tuple[str, ...]) -> Linear:
    """Random weights for linear leaves, of the real sizes: real ones may be zero or missing."""
    probes = {}
    for seed, path in enumerate(paths, start=100):
        inputs, outputs = leaf_features(module.get_submodule(path))
        weight = probe(inputs, outputs, seed=seed) * inputs**-0.5
        has_bias = isinstance(module.get_submodule(path).bias, Tensor)
        probes[path] = weight, has_bias * probe(outputs, seed=seed + 1000)
    return lambda path, x: x @ probes[path][0] + probes[path][1]


def _mlp_formula(structure: MLPStructure) -> Callable[[Tensor, Linear], Tensor]:
    def formula(x: Tensor, linear: Linear) -> Tensor:
        assert structure.act is not None
        up = linear(structure.up, x)
        if structure.gate is not None:
            hidden = activation(linear(structure.gate, x), structure.act) * up
        elif structure.kind == "gated_fused":
            a, b = up.chunk(2, dim=-1)
            gate, up = (a, b) if structure.gate_first else (b, a)
            hidden = activation(gate, structure.act) * up
        else:
            hidden = activation(up, structure.act)
        return linear(structure.down, hidden)

    return formula
