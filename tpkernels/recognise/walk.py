"""The recogniser: one pass over a model, structures out, nothing changed.

The outermost match wins. At every module, in this order: the adapters (families whose forward
stays), attention that users wrote, an MLP as a whole; then the children; and for layers that are
still left inside the repeated blocks, MLPs whose halves are siblings or inline in a forward.
What is left is kept and listed with the reason.

Adding a family
---------------
Most need nothing: MLPs are found by what their forward computes, and attention that is plain
PyTorch is proved equal to canonical attention. A family whose attention hands heads to an
interface function needs an adapter, one small file in ``adapters/``:

1. Write ``match(module)``: return None unless the module has the family's layers *and* its forward
   does what the family's does (``uses_attention_interface``, ``forward_reads``); names alone are
   not enough, another family may lay out the same names differently.
2. Say which layer is which with ``Projections`` and return ``describe(module, projections)``. It
   counts heads from the layers' widths, checks them against every number the module and its
   config state, and refuses parameters it does not know (a norm over all heads, sinks).
3. Append it to ``ADAPTERS`` in ``adapters/__init__.py`` and test it in
   ``tests/recognise/test_attention_interface.py`` with a small random config, one with grouped
   heads, one whose heads do not fill the hidden size and one that must be refused.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from tpkernels.recognise import adapters
from tpkernels.recognise.attention import KEEP_DENSE
from tpkernels.recognise.mlp import find_mlps, is_candidate
from tpkernels.recognise.plain_attention import attention_layers, match_plain_attention
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.siblings import match_siblings
from tpkernels.recognise.structure import (
    AttentionStructure,
    Found,
    Kept,
    MLPStructure,
    Recognition,
    Refusal,
    linear_problem,
    looks_linear,
)
from tpkernels.recognise.trace import Trace, Untraceable, stateless, trace
from tpkernels.recognise.vocabulary import match_vocabulary

_OUTSIDE = "outside the repeated blocks"
_OWN_MODULE = f"move these layers into a module whose forward does only that; or {KEEP_DENSE}"


def recognise(model: nn.Module) -> Recognition:
    """Describe the MLPs, attentions and vocabulary layers of a dense ``model``.

    Analysis only: no weight, buffer, attribute, mode, hook or random state changes, nothing is
    communicated and nothing is imported for the model's sake. Weights on the meta device are fine.
    """
    return _Walk(model).recognition()


class _Walk:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.scope = Scope(model)
        self.order = {module: i for i, module in enumerate(self.scope.names)}
        self.found: list[tuple[int, Found]] = []
        self.kept: list[tuple[int, Kept]] = []
        self.seen: set[nn.Module] = set()
        self.settled: set[nn.Module] = set()
        """Linear layers that belong to a structure or a refusal."""
        self.reasons: dict[nn.Module, tuple[str, str | None]] = {}

    def recognition(self) -> Recognition:
        self._vocabulary()
        self._visit(self.model)
        for module in self.scope.names:
            if looks_linear(module) and module not in self.settled:
                self._keep_linear(module)
        by_place = sorted(self.found, key=lambda item: item[0])
        kept = sorted(self.kept, key=lambda item: item[0])
        return Recognition([found for _, found in by_place], [k for _, k in kept])

    def _vocabulary(self) -> None:
        match = match_vocabulary(self.model, self.scope)
        if match.structure is not None:
            s = match.structure
            reason = f"token embedding and output head{', one weight' if s.tied else ''}"
            self.found.append((-1, Found("", "vocabulary", s, reason)))
            if s.head is not None:
                self.settled.add(self.model.get_submodule(s.head))
        for path, reason in match.kept.items():
            module = self.model.get_submodule(path)
            in_block = self.scope.in_block(module)
            self._keep(module, Kept(path, "embedding", reason, None, in_block))

    def _visit(self, module: nn.Module) -> None:
        if module in self.seen or looks_linear(module):
            return
        self.seen.add(module)
        if not self._open_layers(module) and not isinstance(module, nn.MultiheadAttention):
            return
        matches = adapters.match(module)
        if isinstance(matches, Refusal):
            self._refuse(module, matches)
            return
        refusal: Refusal | None = None
        if matches:
            for path, structure in matches:
                part = module.get_submodule(path)
                self.seen.add(part)
                if isinstance(structure, MLPStructure):
                    self._claim_or_explain(part, structure)
                    continue
                problem = self._claim(part, structure)
                if problem is not None:
                    self._refuse(part, problem)
        else:
            match = self._whole(module)
            if isinstance(match, AttentionStructure | MLPStructure):
                match = self._claim(module, match)
                if match is None:
                    return
            refusal = match
        before = len(self.kept) + len(self.found)
        for child in module.children():
            self._visit(child)
        attention_inside = len(self.kept) + len(self.found) > before
        if refusal is not None and self._open_layers(module) and not attention_inside:
            self._refuse(module, refusal)
        if self._open_layers(module) and self.scope.may_split_leaves(module):
            self._leaves(module)

    def _whole(self, module: nn.Module) -> AttentionStructure | MLPStructure | Refusal | None:
        """A structure that could replace ``module``: few linear layers and nothing else in it."""
        layers = _layers(module)
        if any(layer in self.settled for layer in layers) or not 2 <= len(layers) <= 4:
            return None
        if any(linear_problem(layer) for layer in layers):
            return None
        attention = match_plain_attention(module, self.scope)
        if attention is not None or not is_candidate(module, layers):
            return attention
        try:
            mlps = find_mlps(trace(module, stateless), self.scope).structures
        except Untraceable:
            return None
        return mlps[0] if len(mlps) == 1 and mlps[0].whole else None

    def _leaves(self, module: nn.Module) -> None:
        """MLPs among the layers that nothing inside ``module`` has claimed."""
        siblings = match_siblings(module, self.scope)
        if siblings is not None and not self._any_settled(module, siblings):
            self._claim_or_explain(module, siblings)
        if not self._open_layers(module):
            return
        try:
            traced = self._trace_open(module)
        except Untraceable as error:
            self._explain(self._open_layers(module), f"{self._name(module)}: {error}", _OWN_MODULE)
            return
        matches = find_mlps(traced, self.scope)
        for structure in matches.structures:
            if not self._any_settled(module, structure):
                self._claim_or_explain(module, structure)
        inline = [module.get_submodule(path) for path in attention_layers(traced)]
        reason = f"{self._name(module)} computes attention inside a larger forward"
        self._explain(inline, reason, _OWN_MODULE)
        for path, reason in matches.problems.items():
            self._explain([module.get_submodule(path)], f"{reason} (in {self._name(module)})")

    def _trace_open(self, module: nn.Module) -> Trace:
        """Trace ``module`` through the children that still have open layers, if that works."""

        def closed(m: nn.Module) -> bool:
            return stateless(m) or not self._open_layers(m)

        def closed_or_custom(m: nn.Module) -> bool:
            return closed(m) or not isinstance(m, nn.Sequential)

        try:
            return trace(module, closed)
        except Untraceable:
            return trace(module, closed_or_custom)

    def _claim(
        self, module: nn.Module, structure: AttentionStructure | MLPStructure
    ) -> Refusal | None:
        """Take the layers of ``structure``, unless somebody else uses one of them."""
        kind: Literal["mlp", "attention"] = "attention"
        if isinstance(structure, MLPStructure):
            kind = "mlp"
        layers = {path: module.get_submodule(path) for path in structure.leaves}
        if isinstance(structure, AttentionStructure) and structure.how == "mha":
            layers["in_proj"] = module
        for path, layer in layers.items():
            problem = self.scope.sharing_problem(layer, module)
            if problem is not None:
                return Refusal(f"{path!r} cannot be split: {problem}", KEEP_DENSE, kind=kind)
        self.settled.update(layers.values())
        path, *aliases = self.scope.names[module]
        found = Found(path, kind, structure, _reason(structure), tuple(aliases))
        self.found.append((self.order[module], found))
        return None

    def _claim_or_explain(self, module: nn.Module, structure: MLPStructure) -> None:
        problem = self._claim(module, structure)
        if problem is not None:
            layers = [module.get_submodule(path) for path in structure.leaves]
            self._explain(layers, problem.reason, problem.fix)

    def _refuse(self, module: nn.Module, refusal: Refusal) -> None:
        """Keep everything in ``module`` with one reason."""
        self.settled.update(_layers(module))
        in_block = self.scope.in_block(module)
        path = self.scope.path(module)
        self._keep(module, Kept(path, refusal.kind, refusal.reason, refusal.fix, in_block))

    def _keep_linear(self, layer: nn.Module) -> None:
        if any(looks_linear(parent) for parent in self.scope.parents.get(layer, [])):
            return  # a part of a wrapped layer, which is kept itself
        path, in_block = self.scope.path(layer), self.scope.in_block(layer)
        if self.scope.block_items and not in_block:
            self._keep(layer, Kept(path, "linear", linear_problem(layer) or _OUTSIDE, None, False))
            return
        unknown = "no MLP or attention that it belongs to was recognised"
        reason, fix = self.reasons.get(layer, (unknown, KEEP_DENSE))
        reason = linear_problem(layer) or reason
        self._keep(layer, Kept(path, "linear", reason, fix, in_block))

    def _keep(self, module: nn.Module, kept: Kept) -> None:
        self.kept.append((self.order[module], kept))

    def _explain(self, layers: list[nn.Module], reason: str, fix: str | None = KEEP_DENSE) -> None:
        for layer in layers:
            self.reasons.setdefault(layer, (reason, fix))

    def _open_layers(self, module: nn.Module) -> list[nn.Module]:
        return [layer for layer in _layers(module) if layer not in self.settled]

    def _any_settled(self, module: nn.Module, structure: MLPStructure) -> bool:
        return any(module.get_submodule(path) in self.settled for path in structure.leaves)

    def _name(self, module: nn.Module) -> str:
        return f"{type(module).__name__} {self.scope.path(module)!r}"


def _layers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if looks_linear(m)]


def _reason(structure: AttentionStructure | MLPStructure) -> str:
    if isinstance(structure, MLPStructure):
        act = structure.act or "not one of ours"
        scope = "the whole module" if structure.whole else "its layers alone"
        return f"{structure.kind} MLP with activation {act}, {scope}"
    heads = f"{structure.num_heads} heads of {structure.head_dim}"
    if structure.num_kv_heads != structure.num_heads:
        heads += f", {structure.num_kv_heads} of keys and values"
    return f"{'cross-' if structure.cross else ''}attention, {heads}"
