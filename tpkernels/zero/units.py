"""Units: which parameters are gathered and freed together. Planning only, nothing is sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tpkernels.errors import ConfigError
from tpkernels.zero.unit_selection import is_called, select_heads

ROOT = "(root)"  # name of the root unit; no module path has parentheses


class UnitParameter(NamedTuple):
    """One parameter of a unit: its first name, itself, and every (module, attribute) it has."""

    fqn: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]


@dataclass(eq=False)
class UnitModules:
    """Parameters that are gathered while any of ``modules`` runs.

    Attributes:
        name: path of the first module; ``"(root)"`` for the root unit.
        modules: whose forward begins and ends the unit's use, in the order of the model.
        parameters: in the order of ``model.named_parameters()``.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[UnitParameter]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(each.parameter.numel() for each in self.parameters)


def find_units(
    module: nn.Module, units: Any = None, *, param_dtype: torch.dtype | None = None
) -> list[UnitModules]:
    """The units of ``module``, in its order (the root's first); each parameter is in exactly one.

    ``units`` says whose forward a unit is; what none of them holds is the root unit's:

    - None: the repeated blocks: in the outermost ``ModuleList``, ``ModuleDict`` or ``Sequential``
      that holds several modules of one class, the children that have children of their own. A
      model without such blocks: each child of the root, ``Sequential`` opened, so that there is
      something to prefetch.
    - classes, class names (``["LlamaDecoderLayer"]``), modules, or one of these.
    - a size (``"64MiB"``): neighbours in the order of the model, gathered together up to that many
      bytes of ``param_dtype`` (None: of each parameter's own); a module larger than that is opened,
      a module without children is never split.
    - a policy: a callable ``module -> bool``, or FSDP's ``ModuleWrapPolicy``, ``CustomPolicy``,
      ``functools.partial(transformer_auto_wrap_policy, ...)``, ``size_based_auto_wrap_policy``,
      ``lambda_auto_wrap_policy``.

    A unit inside another owns its parameters. A parameter with several owners (tied weights, a
    module under two names) goes to the smallest unit that holds them all, so that it is gathered
    while any of them runs; often that is the root. Modules inside ``nn.MultiheadAttention``,
    ``nn.TransformerEncoderLayer`` and tensor-parallel modules are read by these without being
    called, so no unit begins there. A unit without parameters is left out, the root's too.

    Raises:
        ConfigError: ``units`` is of another kind, names or picks what does not exist, picks a
            module that is never called (a ``ModuleList``), or the model has lazy parameters.
    """
    occurrences = _walk(module)
    _refuse_lazy(occurrences)
    heads = select_heads(module, units, param_dtype)
    plan = _Plan(module, heads)
    for occurrence in occurrences:
        plan.see(occurrence)
    return plan.units()


class _Occurrence(NamedTuple):
    path: str
    chain: tuple[nn.Module, ...]  # from the root to the module itself

    @property
    def module(self) -> nn.Module:
        return self.chain[-1]


def _walk(root: nn.Module) -> list[_Occurrence]:
    """Every path to every module, parents first: a module under two names occurs twice."""
    found: list[_Occurrence] = []

    def visit(path: str, chain: tuple[nn.Module, ...]) -> None:
        found.append(_Occurrence(path, chain))
        for name, child in chain[-1]._modules.items():
            if child is not None and not any(child is above for above in chain):
                visit(f"{path}.{name}" if path else name, (*chain, child))

    visit("", (root,))
    return found


def _refuse_lazy(occurrences: list[_Occurrence]) -> None:
    for path, chain in occurrences:
        for name, parameter in chain[-1]._parameters.items():
            if parameter is not None and nn.parameter.is_lazy(parameter):
                raise ConfigError(
                    f"module: {f'{path}.{name}'.lstrip('.')!r} has no shape yet, and only "
                    "parameters with one can be sharded. Fix: run one forward before zero"
                )


class _Plan:
    """Parameters and the units that hold each of their occurrences.

    Everything is keyed by ``id`` of objects that ``_modules`` and ``_entries`` keep alive: a
    module may define ``__eq__``, and a tensor does.
    """

    def __init__(self, root: nn.Module, heads: list[list[nn.Module]]) -> None:
        self._modules: list[list[nn.Module]] = [[root]]  # of each unit; the root's is first
        self._unit_of_head: dict[int, int] = {id(root): 0}
        for group in heads:
            members = [each for each in group if id(each) not in self._unit_of_head]
            if members:
                self._unit_of_head |= {id(each): len(self._modules) for each in members}
                self._modules.append(members)
        self._first_path: dict[int, str] = {0: ROOT}
        self._entries: dict[int, UnitParameter] = {}
        self._candidates: dict[int, list[int]] = {}  # units that hold all owners, largest first

    def see(self, occurrence: _Occurrence) -> None:
        above = [self._unit_of_head.get(id(each)) for each in occurrence.chain]
        units = [unit for unit in above if unit is not None]
        if above[-1] is not None:
            self._first_path.setdefault(above[-1], occurrence.path)
        for attribute, parameter in occurrence.module._parameters.items():
            if parameter is None:
                continue
            key, owner = id(parameter), (occurrence.module, attribute)
            if key not in self._entries:
                fqn = f"{occurrence.path}.{attribute}".lstrip(".")
                self._entries[key] = UnitParameter(fqn, parameter, [owner])
                self._candidates[key] = units
                continue
            owners = self._entries[key].owners
            if not any(module is owner[0] and name == attribute for module, name in owners):
                owners.append(owner)
            self._candidates[key] = [unit for unit in self._candidates[key] if unit in units]

    def units(self) -> list[UnitModules]:
        parameters: dict[int, list[UnitParameter]] = {}
        for key, entry in self._entries.items():
            parameters.setdefault(self._candidates[key][-1], []).append(entry)
        ordered = [unit for unit in self._first_path if unit in parameters]
        result = [
            UnitModules(self._first_path[unit], self._modules[unit], parameters[unit])
            for unit in ordered
        ]
        for unit in result:
            _refuse_uncalled(unit)
        return result


def _refuse_uncalled(unit: UnitModules) -> None:
    for each in unit.modules:
        if unit.name != ROOT and not is_called(each):
            raise ConfigError(
                f"units: {unit.name!r} is a {type(each).__name__}, which has no forward of its "
                "own, so that nothing would gather its parameters. Fix: name the class of its "
                "children, or the module that holds it"
            )
