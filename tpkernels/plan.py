"""Plans given as a dictionary: module path -> style, as ``parallelize_module`` takes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    TPAttention,
    TPMultiheadAttention,
    VocabParallelEmbedding,
)
from tpkernels.modules.class_swap import recorded
from tpkernels.modules.style import SwapStyle
from tpkernels.recognise import recognise
from tpkernels.recognise.structure import Found
from tpkernels.replace import Replacement, plan_replacement

_LEAVES = (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    TPMultiheadAttention,
    VocabParallelEmbedding,
)
_RECOGNISED = {TPMLP: "mlp", TPAttention: "attention"}


def replacements_from_plan(
    model: nn.Module, plan: Mapping[str, Any], group: Group
) -> list[Replacement]:
    """One checked replacement for each module that a path of ``plan`` matches.

    ``*`` matches within one level of the path. Styles: our classes or their ``.style(...)``;
    ``TPMLP`` and ``TPAttention`` as classes take the structure that is recognised at the path; any
    other ``ParallelStyle`` is applied as PyTorch would.

    Raises:
        ConfigError: an empty plan, a path that matches nothing, or a style that is none.
        UnsupportedModuleError: a class whose structure is not recognised at the path.
    """
    names = dict(model.named_modules())
    example = next(iter(list(names)[1:]), "")
    if not plan:
        raise ConfigError(
            f"plan={plan!r} splits nothing. Fix: name at least one module, such as "
            f"plan={{{example!r}: tpkernels.ColumnParallelLinear}}, or give plan='auto'"
        )
    for pattern in plan:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"plan: the key {pattern!r} must be a str, a module path. Fix: use a name of "
                f"model.named_modules(), such as {example!r}"
            )
    found: dict[str, Found] | None = None
    result = []
    for pattern, style in plan.items():
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise ConfigError(
                f"plan: {pattern!r} matches no module of {type(model).__name__}. Fix: use a name "
                f"of model.named_modules(), such as {example!r}"
            )
        for name in matches:
            if isinstance(style, type) and style in _RECOGNISED:
                if found is None:
                    found = {each.path: each for each in recognise(model).found}
                result.append(_recognised(model, name, _RECOGNISED[style], found, group))
            else:
                result.append(_styled(names[name], name, style, group))
    return result


def _matches(name: str, pattern: str) -> bool:
    parts, atoms = name.split("."), pattern.split(".")
    return len(parts) == len(atoms) and all(
        fnmatch.fnmatchcase(part, atom) for part, atom in zip(parts, atoms, strict=True)
    )


def _recognised(
    model: nn.Module, name: str, kind: str, found: dict[str, Found], group: Group
) -> Replacement:
    if name not in found or found[name].kind != kind:
        raise UnsupportedModuleError(
            f"plan: no {kind} was recognised at {name!r}. Fix: name its layers one by one "
            "(ColumnParallelLinear, RowParallelLinear)"
        )
    return plan_replacement(model, found[name], group)


def _styled(module: nn.Module, name: str, style: Any, group: Group) -> Replacement:
    if isinstance(style, type) and style in _LEAVES:
        style = style.style()  # type: ignore[attr-defined]
    if isinstance(style, SwapStyle):
        ours = style

        def apply_ours() -> None:
            ours.apply_to(module, group, name)

        return Replacement(name, "plan", ours.cls.__name__, "as planned", apply_ours)
    if isinstance(style, ParallelStyle):
        return Replacement(
            name, "plan", type(style).__name__, "as planned", _torch_style(module, style, group)
        )
    raise ConfigError(
        f"plan: {name!r} has style {style!r}; allowed: ColumnParallelLinear, RowParallelLinear, "
        "SequenceParallel, TPMLP, TPAttention, TPMultiheadAttention, VocabParallelEmbedding, their "
        ".style(...), or a torch.distributed.tensor.parallel style"
    )


def _torch_style(module: nn.Module, style: ParallelStyle, group: Group) -> Callable[[], None]:
    def apply() -> None:
        if group.size > 1:
            parameter = next(module.parameters(), None)
            device_type = "cpu" if parameter is None else parameter.device.type
            with recorded(module):
                style._apply(module, group.mesh(device_type))

    return apply
