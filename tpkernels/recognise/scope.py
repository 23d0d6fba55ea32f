"""The tree around a module: names, repeated blocks, and who else holds a layer or a weight."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from tpkernels.recognise.structure import (
    AttentionStructure,
    MLPForm,
    is_leaf_linear,
    looks_linear,
)


class Scope:
    """An index of one model, made once; reads the tree and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[nn.Module, list[str]] = {}
        self.parents: dict[nn.Module, list[nn.Module]] = {}
        self.owners: dict[int, list[str]] = {}
        """Every name of a parameter object, through distinct modules."""
        self.proven: set[str] = set()
        """Signatures of computations already compared with their formula by running them."""
        self.regions: dict[tuple[str, str], MLPForm] = {}
        """What lies before a linear layer, by the signature of the graph and the layer's path."""
        self._attentions: list[tuple[str, list[Tensor], AttentionStructure]] = []
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        for module, (name, *_) in self.names.items():
            for child in module._modules.values():
                if child is not None:
                    self.parents.setdefault(child, []).append(module)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
        self.block_items = [item for module in self.names for item in repeated_items(module)]
        self._in_blocks = {inner for item in self.block_items for inner in item.modules()}

    def path(self, module: nn.Module) -> str:
        """The first name of ``module``."""
        return self.names[module][0]

    def in_block(self, module: nn.Module) -> bool:
        """Whether ``module`` is a repeated block or lies inside one."""
        return module in self._in_blocks

    def may_split_leaves(self, module: nn.Module) -> bool:
        """Whether layers inline in this forward may be split: in the blocks, if there are any."""
        return self.in_block(module) or not self.block_items

    def only_inside(self, module: nn.Module, owner: nn.Module) -> bool:
        """Whether every name of ``module`` leads through ``owner``."""
        if module is owner:
            return True
        parents = self.parents.get(module, [])
        return bool(parents) and all(self.only_inside(parent, owner) for parent in parents)

    def sharing_problem(self, leaf: nn.Module, owner: nn.Module) -> str | None:
        """Why ``leaf`` cannot be split as part of ``owner``: somebody else uses it too."""
        if not self.only_inside(leaf, owner):
            elsewhere = [n for n in self.names[leaf] if not n.startswith(f"{self.path(owner)}.")]
            return f"its layer is used elsewhere too, as {(elsewhere or self.names[leaf])[0]!r}"
        for key, parameter in leaf._parameters.items():
            names = self.owners.get(id(parameter), [])
            if len(names) > 1:
                mine = f"{self.path(leaf)}.{key}"
                other = next((name for name in names if name != mine), names[0])
                return f"its {key} is the same parameter as {other!r}"
        return None

    def proved_attention(self, signature: str, buffers: list[Tensor]) -> AttentionStructure | None:
        """The structure proved for the same graph, sizes and buffers; None if there is none."""
        for known, tensors, structure in self._attentions:
            same = known == signature and len(tensors) == len(buffers)
            if same and all(map(torch.equal, tensors, buffers)):
                return structure
        return None

    def remember_attention(
        self, signature: str, buffers: list[Tensor], structure: AttentionStructure
    ) -> None:
        """Keep a proof for the other blocks of the model."""
        self._attentions.append((signature, buffers, structure))


def repeated_items(module: nn.Module) -> list[nn.Module]:
    """Items of a ModuleList or Sequential that are repeated blocks.

    Blocks hold linear layers and share their class with another item; the only item of
    a ModuleList is one too (a model of one layer).
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    items = [item for item in module.children() if _is_compound(item)]
    count = Counter(type(item) for item in items)
    alone = isinstance(module, nn.ModuleList) and len(module) == 1
    return [item for item in items if alone or count[type(item)] > 1]


def _is_compound(module: nn.Module) -> bool:
    if is_leaf_linear(module) or looks_linear(module):
        return False
    return any(looks_linear(m) or isinstance(m, nn.MultiheadAttention) for m in module.modules())
