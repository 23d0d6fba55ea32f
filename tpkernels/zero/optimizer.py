"""``manager.optimizer``: a ``torch.optim`` optimizer over this rank's shards."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.errors import ConfigError, TPKernelsWarning, UnsupportedModuleError
from tpkernels.optimizer_checkpoint import own_parts, refuse_unmarked_parts

# Each element's update depends on that element's gradient and state alone, so parts can be stepped.
ELEMENT_WISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_WHY_NOT = {
    "Adafactor": "it factors the second moment of whole rows and columns",
    "LBFGS": "its line search takes dot products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it needs sparse gradients",
}


def make_optimizer(
    cls: type[torch.optim.Optimizer],
    shards: list[nn.Parameter],
    param_groups: Iterable[Any] | None,
    settings: dict[str, Any],
    *,
    element_wise: bool,
) -> torch.optim.Optimizer:
    """``cls(param_groups or shards, **settings)``, if it may see parts of parameters.

    Its ``load_state_dict`` takes parts, or whole tensors, of which each rank takes its part.

    Raises:
        UnsupportedModuleError: an optimizer that is not known to be element-wise.
        ConfigError: parameters that are not this model's shards.

    Warns:
        TPKernelsWarning: a group without parameters.
    """
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"cls={cls!r} must be an optimizer class. Fix: manager.optimizer(torch.optim.AdamW, "
            "lr=3e-4)"
        )
    if not element_wise:
        _refuse_others(cls)
    groups = shards if param_groups is None else _checked(param_groups, shards)
    if "foreach" in inspect.signature(cls).parameters and not {"foreach", "fused"} & set(settings):
        settings = {**settings, "foreach": True}  # torch's default is so only for plain tensors
    made = cls(groups, **settings)
    _tell_empty_groups(made)
    made.register_load_state_dict_pre_hook(own_parts)
    made.register_state_dict_post_hook(refuse_unmarked_parts)
    return made


def _tell_empty_groups(made: torch.optim.Optimizer) -> None:
    empty = [str(number) for number, each in enumerate(made.param_groups) if not each["params"]]
    if empty:
        warnings.warn(
            f"param_groups[{', '.join(empty)}] of {len(made.param_groups)} has no parameters, so "
            "that its settings (weight_decay, lr) apply to none. Shards are 1-D: p.ndim and "
            "p.shape do not tell matrices from vectors. Fix: group by name "
            "(model.named_parameters()), or by len(tpkernels.spec_of(p).whole_shape)",
            TPKernelsWarning,
            stacklevel=4,
        )


def _refuse_others(cls: type) -> None:
    known = {getattr(torch.optim, name) for name in ELEMENT_WISE if hasattr(torch.optim, name)}
    if cls in known:
        return
    name = cls.__name__
    why = _WHY_NOT.get(name, "it is not known to be element-wise")
    fix = (
        "use one of these"
        if name in _WHY_NOT
        else "use one of these, or say manager.optimizer(..., element_wise=True) if each element's "
        "update depends on that element alone"
    )
    raise UnsupportedModuleError(
        f"{name} cannot step shards: {why}, and a shard is a part of a flattened parameter. "
        f"Allowed: {', '.join(ELEMENT_WISE)}. Fix: {fix}"
    )


def _checked(param_groups: Any, shards: list[nn.Parameter]) -> list[Any]:
    if isinstance(param_groups, nn.Module) or not isinstance(param_groups, Iterable):
        raise ConfigError(
            f"param_groups is a {type(param_groups).__name__}; allowed: parameters, or groups of "
            "them. Fix: manager.optimizer(cls, model.parameters(), ...), or leave it out for all"
        )
    groups = list(param_groups)
    own = {id(shard) for shard in shards}
    for number, group in enumerate(groups):
        members = group["params"] if isinstance(group, dict) else group
        named = isinstance(members, tuple) and len(members) == 2 and isinstance(members[0], str)
        members = [members] if isinstance(members, Tensor) or named else list(members)
        if isinstance(group, dict):
            group["params"] = members  # a generator is read once
        for each in members:
            each = each[1] if isinstance(each, tuple) else each
            if not isinstance(each, Tensor):
                raise ConfigError(
                    f"param_groups[{number}] holds {type(each).__name__} where a parameter "
                    "belongs. Fix: a list of parameters, of (name, parameter), or of dicts with "
                    "'params'"
                )
            if id(each) not in own:
                raise ConfigError(
                    f"param_groups[{number}] holds a tensor of shape {tuple(each.shape)} that is "
                    "not a shard of this model. Fix: build the groups from model.parameters() or "
                    "named_parameters() after zero()"
                )
    return groups
