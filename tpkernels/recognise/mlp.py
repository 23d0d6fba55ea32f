"""MLPs by dataflow: what lies between two linear layers decides, not what they are called.

For every linear ``down`` of a traced forward, the *region* is everything between its input and
the linears before it. If those are one linear, or two of the same input, and the region computes
an element-wise function of their outputs (found by evaluating it), the two or three layers are
an MLP::

    x ---> up ----> [ region: act, product, dropout ] ---> down
     \\-> gate --/

It is ``whole`` when nothing else happens in the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from tpkernels.recognise.activation import is_elementwise, match_formula, same, splits_features
from tpkernels.recognise.probes import probe
from tpkernels.recognise.prove import formula_problem
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import (
    ActivationName,
    MLPForm,
    MLPStructure,
    has_hooks,
    leaf_features,
)
from tpkernels.recognise.trace import (
    Trace,
    dropout_of,
    evaluate,
    linears_before,
    signature_of,
)
from tpkernels.reference.activation import activation


@dataclass
class MLPMatches:
    """The MLPs of one forward, and why its other linears are none (by path)."""

    structures: list[MLPStructure]
    problems: dict[str, str]


@dataclass
class _Region:
    """The nodes between linear layers: ``sources`` are the linears, in order of the graph."""

    sources: list[fx.Node]
    nodes: list[fx.Node]


class _NoMLP(Exception):
    """A linear layer is not the second half of an MLP; the message says why."""


def find_mlps(trace: Trace, scope: Scope) -> MLPMatches:
    """All MLPs whose layers are called in the forward that ``trace`` shows."""
    structures: list[MLPStructure] = []
    problems: dict[str, str] = {}
    taken: set[str] = set()
    calls = [str(node.target) for node in trace.linears]
    for down in trace.linears:
        path = str(down.target)
        if not isinstance(down.args[0], fx.Node) or down.args[0].op == "placeholder":
            continue  # the first half of something, if anything
        try:
            region = _region_before(trace, down)
            for node in (down, *region.sources):
                if calls.count(str(node.target)) > 1:
                    raise _NoMLP(f"the layer {node.target!r} is called twice")
                if node.target in taken:
                    raise _NoMLP(f"{node.target!r} already belongs to another MLP")
            structure = _structure(trace, scope, region, down)
        except _NoMLP as problem:
            problems[path] = str(problem)
            continue
        structures.append(structure)
        taken.update(structure.leaves)
    for down in trace.linears:
        if str(down.target) in problems:
            for source in linears_before(trace, down):
                problems.setdefault(
                    str(source.target), f"{down.target!r}: {problems[str(down.target)]}"
                )
    return MLPMatches(structures, {p: why for p, why in problems.items() if p not in taken})


def _region_before(trace: Trace, down: fx.Node) -> _Region:
    sources: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    stack = list(down.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in sources or node in nodes:
            continue
        if trace.is_linear(node):
            sources.add(node)
            continue
        if node.op == "placeholder":
            raise _NoMLP(f"the input {node.name!r} reaches it without a linear layer between")
        if node.op == "get_attr":
            raise _NoMLP(f"the tensor {node.target!r} takes part before it")
        if node.op == "call_module" and dropout_of(trace, node) is None:
            module = trace.submodule(node)
            if not is_elementwise(module):
                kind = type(module).__name__
                raise _NoMLP(f"{kind} {node.target!r}, not element-wise, lies before it")
        nodes.add(node)
        stack.extend(node.all_input_nodes)
    order = list(trace.graph.nodes)
    inside = sources | nodes
    for node in inside:
        outside = [user for user in node.users if user not in nodes and user is not down]
        if outside:
            raise _NoMLP(f"the hidden {node.name!r} is also used by {outside[0].name!r}")
    for path in (str(n.target) for n in inside if n.op == "call_module"):
        between = _containers(path, str(down.target))
        if not trace.is_linear_path(path):
            between = [*between, path]
        hooked = [name for name in between if has_hooks(trace.module.get_submodule(name))]
        if hooked:
            raise _NoMLP(f"{hooked[0]!r} between the layers has a hook")
    if not sources:
        raise _NoMLP("no linear layer before it")
    return _Region([n for n in order if n in sources], [n for n in order if n in nodes])


def _containers(path: str, down: str) -> list[str]:
    """The modules around ``path`` that ``down`` lies outside of."""
    parts = path.split(".")
    names = [".".join(parts[:i]) for i in range(1, len(parts))]
    return [name for name in names if not down.startswith(f"{name}.")]


def _structure(trace: Trace, scope: Scope, region: _Region, down: fx.Node) -> MLPStructure:
    path = str(down.target)
    inner, active = _strip_dropouts(trace, down.args[0])
    computing = [n for n in region.nodes if dropout_of(trace, n) is None]
    inside = [n for n in region.nodes if dropout_of(trace, n) is not None and n not in inner]
    key = signature_of(trace), path
    if key not in scope.regions:
        scope.regions[key] = _analyse(trace, region, down, active)
    form = scope.regions[key]
    exact = form.structure.act is not None and not inside and len(inner) < 2
    outer = _whole(trace, region, down, inner) if exact else None
    if outer is None and not form.splits:
        raise _NoMLP("what lies between the layers is not element-wise or has a fixed width")
    if outer is None and form.structure.act == "none" and form.structure.kind == "plain":
        raise _NoMLP("no activation lies between it and the linear layer before it")
    structure = replace(
        form.structure,
        whole=outer is not None,
        act_module=_activation_module(trace, scope, region, form.structure, computing),
        inner_dropout=_dropout(trace, inner),
        outer_dropout=_dropout(trace, outer or []),
    )
    problem = formula_problem(trace, scope, structure) if structure.whole else None
    if problem is not None:
        raise _NoMLP(problem)
    return structure


def _dropout(trace: Trace, nodes: list[fx.Node]) -> str | float | None:
    return (dropout_of(trace, nodes[0]) or None) if nodes else None


def _analyse(trace: Trace, region: _Region, down: fx.Node, active: fx.Node) -> MLPForm:
    """What the region computes, and whether it can do so for a part of the features."""
    hidden = leaf_features(trace.submodule(down))[0]
    widths = [leaf_features(trace.submodule(node))[1] for node in region.sources]
    paths = [str(node.target) for node in region.sources]

    def function(*values: Tensor) -> Tensor:
        known = dict(zip(region.sources, values, strict=True))
        return evaluate(trace, active, known)

    if len(region.sources) == 2:
        if region.sources[0].args[0] is not region.sources[1].args[0]:
            raise _NoMLP("the two layers before it have different inputs")
        if widths != [hidden, hidden]:
            raise _NoMLP(f"it takes {hidden} features, the layers before it give {widths}")
        structure = _gated(function, paths, hidden)
    elif len(region.sources) > 2:
        raise _NoMLP(f"{len(region.sources)} linear layers come together before it")
    elif widths[0] == hidden:
        act = match_formula(function, hidden)
        structure = MLPStructure("plain", up=paths[0], down="", act=act)
    elif widths[0] == 2 * hidden:
        structure = _fused(function, paths[0], hidden)
    else:
        raise _NoMLP(f"it takes {hidden} features, the layer before it gives {widths[0]}")
    structure = replace(structure, down=str(down.target))
    if structure.kind == "gated_fused":
        function = _on_halves(function, structure.gate_first)
    inputs = 1 if structure.kind == "plain" else 2
    return MLPForm(structure, splits_features(function, hidden, inputs))


def _gated(function: Callable[..., Tensor], paths: list[str], hidden: int) -> MLPStructure:
    def swapped(a: Tensor, b: Tensor) -> Tensor:
        return function(b, a)

    first, second = paths
    for gate, up, f in ((first, second, function), (second, first, swapped)):
        act = _gate_activation(f, hidden)
        if act is not None:
            return MLPStructure("gated", up=up, down="", gate=gate, act=act)
    return MLPStructure("gated", up=second, down="", gate=first, act=None)


def _fused(function: Callable[..., Tensor], up: str, hidden: int) -> MLPStructure:
    for gate_first in (True, False):
        act = _gate_activation(_on_halves(function, gate_first), hidden)
        if act is not None:
            return MLPStructure("gated_fused", up=up, down="", act=act, gate_first=gate_first)
    return MLPStructure("gated_fused", up=up, down="", act=None)


def _on_halves(function: Callable[..., Tensor], gate_first: bool) -> Callable[..., Tensor]:
    order = (lambda a, b: (a, b)) if gate_first else (lambda a, b: (b, a))
    return lambda gate, up: function(torch.cat(order(gate, up), dim=-1))


def _gate_activation(function: Callable[..., Tensor], hidden: int) -> ActivationName | None:
    """The act for which ``function(gate, up)`` is ``act(gate) * up``."""
    act = match_formula(lambda gate: function(gate, torch.ones_like(gate)), hidden)
    if act is None:
        return None
    gate, up = probe(2, 2, 3, hidden, seed=3).unbind()
    try:
        with torch.no_grad():
            return act if same(function(gate, up), activation(gate, act) * up) else None
    except Exception:  # whatever user code raises: not the product
        return None


def _strip_dropouts(trace: Trace, node: object) -> tuple[list[fx.Node], fx.Node]:
    """Dropouts at the end of a chain, outermost first, and the node before them."""
    assert isinstance(node, fx.Node)
    dropouts = []
    while dropout_of(trace, node) is not None:
        dropouts.append(node)
        node = node.all_input_nodes[0]
    return dropouts, node


def _activation_module(
    trace: Trace,
    scope: Scope,
    region: _Region,
    structure: MLPStructure,
    computing: list[fx.Node],
) -> str | None:
    """The activation module over the first layer (the gate), if it could become an identity."""
    activated = structure.gate or structure.up
    source = next(node for node in region.sources if node.target == activated)
    modules = [node for node in computing if node.op == "call_module"]
    products = len(computing) - len(modules)
    if structure.kind == "gated_fused" or len(modules) != 1 or structure.act is None:
        return None
    if products != len(region.sources) - 1 or modules[0].args != (source,):
        return None
    module = trace.submodule(modules[0])
    return str(modules[0].target) if scope.only_inside(module, trace.module) else None


def _whole(
    trace: Trace, region: _Region, down: fx.Node, inner: list[fx.Node]
) -> list[fx.Node] | None:
    """The dropout after ``down``, if the forward is the MLP and nothing else; None if not."""
    if not isinstance(trace.output, fx.Node) or trace.kwargs_read:
        return None
    outer, last = _strip_dropouts(trace, trace.output)
    first = trace.placeholders[0]
    if last is not down or len(outer) > 1 or region.sources[0].args != (first,):
        return None
    accounted = {*region.sources, *region.nodes, down, *inner, *outer, *trace.placeholders}
    if any(n not in accounted and n.op != "output" for n in trace.graph.nodes):
        return None
    if any(p.users for p in trace.placeholders[1:]):
        return None
    layers = [trace.submodule(node) for node in (*region.sources, down)]
    own = {id(p) for layer in layers for p in layer.parameters()}
    tensors = (*trace.module.parameters(), *trace.module.buffers())
    if any(id(tensor) not in own for tensor in tensors):
        return None
    inside = (m for m in trace.module.modules() if m is not trace.module)
    if any(has_hooks(m) for m in inside):
        return None
    return outer


def is_candidate(module: nn.Module, leaves: list[nn.Module]) -> bool:
    """Whether ``module`` could be an MLP as a whole: two or three linears and no other tensors."""
    if len(leaves) not in (2, 3):
        return False
    own = {id(p) for leaf in leaves for p in leaf.parameters()}
    return all(id(p) in own for p in module.parameters())
