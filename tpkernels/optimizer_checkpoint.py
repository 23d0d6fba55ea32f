"""Whole optimizer states of a sharded model, under the names of its parameters."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.checkpoint import (
    data_group_of,
    global_shape,
    group_of,
    is_first_rank,
    require_model,
    shown,
)
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError, TPKernelsWarning, UnsupportedModuleError
from tpkernels.modules.parameters import copy_from_full, gather_full

# State of one number, whatever the parameter's shape, in the optimizers of torch.optim.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# Settings that older versions of PyTorch lacked, which its load_state_dict fills in.
_MAY_LACK = frozenset(
    {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
)
_DECIDE_FIELDS = ("amsgrad", "momentum", "centered")  # settings by which there are more fields


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    cpu: bool = False,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """The optimizer's state dict as if ``model`` had never been sharded.

    Equivalent to PyTorch's ``get_optimizer_state_dict`` of the unsharded model: ``state`` and each
    group's ``params`` go by parameter name. A parameter that was never stepped has no state.

    Args:
        cpu: move each tensor to the CPU as it is gathered.
        rank0_only: return ``{}`` on every rank but the first of those that share the model.

    Collective over all ranks that hold a part: call it on all of them.

    Raises:
        UnsupportedModuleError: the optimizer keeps parts that do not say of which whole.
    """
    require_model(model, "full_optimizer_state_dict")
    _require_optimizer(optimizer, "full_optimizer_state_dict")
    group = group_of(model)
    keep = not rank0_only or is_first_rank(group or data_group_of(model))
    names = {identity: name for name, identity in reversed(_identities(model).items())}
    own = optimizer.state_dict()
    refuse_unmarked_parts(optimizer, own)
    name_of: dict[Any, str] = {}
    for number, parameter in _numbered(optimizer, own):
        if id(parameter) not in names:
            raise ConfigError(
                f"the optimizer steps a tensor of shape {tuple(parameter.shape)} that is not in "
                "the model's state dict. Fix: give the model that the optimizer was built for"
            )
        name_of[number] = names[id(parameter)]
    state: dict[Any, dict[str, Any]] = {}
    for number, name in name_of.items():  # the same order on every rank
        if number not in own["state"]:
            continue
        entries = state[name] = {}
        for key, value in own["state"][number].items():
            if isinstance(value, Tensor):
                is_part = isinstance(value, (ChunkedTensor, DTensor))
                value = gather_full(value, group) if is_part else value.detach().clone()
                value = value.cpu() if cpu and keep else value
            if keep:
                entries[key] = value
    groups = [
        {**each, "params": [name_of[number] for number in each["params"]]}
        for each in own["param_groups"]
    ]
    return {"state": state, "param_groups": groups} if keep else {}


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load whole optimizer states by name: every rank takes its part, nothing is sent.

    Groups are matched by the trained parameters in them; a group without any by its place. The
    optimizer may be fresh. A parameter without state has none after it.

    Args:
        state_dict: of :func:`full_optimizer_state_dict`, or PyTorch's ``get_optimizer_state_dict``
            of a plain model; on every rank.

    Raises:
        ConfigError: parameters, groups, settings, fields or shapes that do not fit; nothing is
            changed then.

    Warns:
        TPKernelsWarning: trained parameters without state, though others have it.
    """
    require_model(model, "load_full_optimizer_state_dict")
    _require_optimizer(optimizer, "load_full_optimizer_state_dict")
    check_whole_state(state_dict)
    identities = _identities(model)
    own = optimizer.state_dict()
    number_of = {id(parameter): number for number, parameter in _numbered(optimizer, own)}
    state: dict[Any, Any] = {}
    for name, entries in state_dict["state"].items():
        number = number_of.get(identities.get(name, 0))
        if number is None:
            raise ConfigError(
                f"load_full_optimizer_state_dict: {name!r} has state, but the optimizer does not "
                "step such a parameter of the model. Fix: build the optimizer of the same "
                "parameters, or delete the entry"
            )
        state[number] = entries
    groups = [
        {**_group_for(index, group, state_dict["param_groups"], identities), "params": own_numbers}
        for index, (group, own_numbers) in enumerate(
            zip(
                optimizer.param_groups,
                (each["params"] for each in own["param_groups"]),
                strict=True,
            )
        )
    ]
    if len(state_dict["param_groups"]) != len(groups):
        raise ConfigError(
            f"load_full_optimizer_state_dict: {len(state_dict['param_groups'])} param_groups, the "
            f"optimizer has {len(groups)}. Fix: build the optimizer with the same groups"
        )
    names = {
        number_of[identity]: name
        for name, identity in reversed(identities.items())
        if identity in number_of
    }
    loaded = {"state": state, "param_groups": groups}
    check_settings(optimizer, groups)
    check_fields(optimizer, loaded, names)
    optimizer.load_state_dict(own_parts(optimizer, loaded, names))


def own_parts(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    names: Mapping[Any, str] | None = None,
) -> dict[str, Any]:
    """``state_dict`` with this rank's part of every whole tensor in it.

    Its parameters are matched by their places in the groups, as ``Optimizer.load_state_dict`` does;
    ``names`` is how a message calls them.

    Raises:
        ConfigError: a tensor of another shape, or another rank's or world's part.
    """
    parameters = dict(_numbered(optimizer, state_dict))
    called = names or {}
    single = set(_NUMBERS)
    for place, entries in state_dict["state"].items():
        if place in parameters and global_shape(parameters[place]):
            single |= {k for k, v in entries.items() if isinstance(v, Tensor) and v.dim() == 0}
    state = {
        place: entries
        if place not in parameters
        else {
            key: value
            if not isinstance(value, Tensor)
            else value.clone()
            if value.dim() == 0 and key in single
            else _own_part(f"{key} of {called.get(place, place)!r}", value, parameters[place])
            for key, value in entries.items()
        }
        for place, entries in state_dict["state"].items()
    }
    groups = _with_lost_settings(optimizer, state_dict["param_groups"])
    return {**state_dict, "state": state, "param_groups": groups}


def _with_lost_settings(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """``set_optimizer_state_dict`` loses those of a group without parameters that is not last."""
    if len(groups) != len(optimizer.param_groups):
        return groups  # load_state_dict says so
    lost = [number for number, each in enumerate(groups) if each.keys() == {"params"}]
    if lost:
        warnings.warn(
            f"the state dict has no settings of param_groups{lost}, as PyTorch's "
            "set_optimizer_state_dict leaves a group without parameters before other groups; those "
            "it was built with are kept. Fix: make it the last group, or "
            "tpkernels.load_full_optimizer_state_dict",
            TPKernelsWarning,
            stacklevel=3,
        )
    return [
        {**own, "params": each["params"]} if number in lost else each
        for number, (own, each) in enumerate(zip(optimizer.param_groups, groups, strict=True))
    ]


def _require_optimizer(optimizer: Any, what: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{what}: optimizer={shown(optimizer)} must be a torch.optim.Optimizer. Fix: pass the "
            "model first, then its optimizer"
        )


def check_whole_state(state_dict: Any) -> None:
    """Raise :class:`ConfigError` unless it has the form of an optimizer's state dict by name."""
    is_dict = isinstance(state_dict, Mapping)
    lacks = [key for key in ("state", "param_groups") if not is_dict or key not in state_dict]
    wrong = f"{shown(state_dict)} without {' and '.join(map(repr, lacks))}" if lacks else ""
    if not lacks:
        state, groups = state_dict["state"], state_dict["param_groups"]
        if not isinstance(state, Mapping):
            wrong = f"state={shown(state)}, not a dict"
        elif not isinstance(groups, (list, tuple)):
            wrong = f"param_groups={shown(groups)}, not a list"
        for number, each in enumerate(() if wrong else groups):
            if not isinstance(each, Mapping) or "params" not in each:
                wrong = f"param_groups[{number}]={shown(each)}, without 'params'"
        for name, entries in ({} if wrong else state).items():
            if not isinstance(entries, Mapping):
                wrong = f"state of {name!r}={shown(entries)}, not a dict"
    if wrong:
        raise ConfigError(
            f"load_full_optimizer_state_dict: the state dict is {wrong}. Fix: what "
            "tpkernels.full_optimizer_state_dict(model, optimizer) gave, on every rank (with "
            "rank0_only=True it is empty on the others)"
        )


def check_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Raise :class:`ConfigError` for groups of another optimizer, or with damaged settings.

    What a scheduler or a user added to a group may be there or not.
    """
    for number, (own, given) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        label = f"load_full_optimizer_state_dict: param_groups[{number}] of the state dict"
        if given.keys() == {"params"}:
            continue  # own_parts warns
        lacks = [key for key in optimizer.defaults if key not in given and key not in _MAY_LACK]
        if lacks:
            others = sorted(given.keys() - own.keys())
            raise ConfigError(
                f"{label} lacks {', '.join(lacks)}, which {type(optimizer).__name__} has"
                f"{' and has ' + ', '.join(others) if others else ''}: it is damaged or of another "
                "optimizer. Fix: load it into an optimizer of the class that was saved"
            )
        for key in optimizer.defaults:
            if key in given and not _is_alike(given[key], own[key]):
                raise ConfigError(
                    f"{label} has {key}={shown(given[key])} where a value like {own[key]!r} "
                    "belongs. Fix: load an undamaged file"
                )


def _is_alike(given: Any, own: Any) -> bool:
    """Whether it may be a setting in the place of ``own``: a number, or numbers."""
    if isinstance(own, (list, tuple)):
        alike = isinstance(given, (list, tuple)) and len(given) == len(own)
        return alike and all(map(_is_alike, given, own))
    if isinstance(own, bool):
        return given is None or isinstance(given, int)
    if not isinstance(own, (int, float, Tensor)):
        return True
    return isinstance(given, (numbers.Real, Tensor)) and not isinstance(given, bool)


def check_fields(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], names: Mapping[Any, str]
) -> None:
    """Raise :class:`ConfigError` for parameters and fields that are missing or unlike the others.

    What the optimizer holds already says what belongs, and else the other parameters of the group.

    Warns:
        TPKernelsWarning: trained parameters without state, which a fresh optimizer cannot judge.
    """
    states = state_dict["state"]
    if not states:
        return
    parameters = dict(_numbered(optimizer, state_dict))
    fresh: list[str] = []
    for own, group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        held: dict[Any, Mapping[str, Any]] = {}
        if all(own.get(key) == group.get(key) for key in _DECIDE_FIELDS):
            held = {place: optimizer.state.get(parameters[place], {}) for place in group["params"]}
        given = [states[place] for place in group["params"] if place in states]
        others = {key: value for each in given for key, value in each.items()}
        tensors = {
            key
            for each in (*given, *held.values())
            for key, value in each.items()
            if isinstance(value, Tensor)
        }
        for place in group["params"]:
            name, made = names.get(place, str(place)), held.get(place) or {}
            if place not in states:
                if made:
                    _refuse_state(f"nothing of {name!r}, of which the optimizer has state")
                fresh += [name] if parameters[place].requires_grad else []
                continue
            entries = states[place]
            belongs = made.keys() or others.keys()
            if lacks := sorted(belongs - entries.keys()):
                _refuse_state(f"no {', '.join(lacks)} of {name!r}")
            if more := sorted(entries.keys() - belongs):
                _refuse_state(
                    f"{', '.join(more)} of {name!r}, which {type(optimizer).__name__} does not keep"
                )
            for key, value in entries.items():
                number = key in _NUMBERS and isinstance(value, (int, float))
                if key in tensors and not number and not isinstance(value, Tensor):
                    _refuse_state(f"{shown(value)} as {key} of {name!r}, not a tensor")
    if fresh:
        warnings.warn(
            f"load_full_optimizer_state_dict: the state dict has no state of {len(fresh)} trained "
            f"parameters ({', '.join(fresh[:5])}), though of others: they start anew, which is "
            "right if they were never stepped. Fix: if they were, load an undamaged file",
            TPKernelsWarning,
            stacklevel=3,
        )


def _refuse_state(what: str) -> NoReturn:
    raise ConfigError(
        f"load_full_optimizer_state_dict: the state dict has {what}. Fix: load an undamaged file, "
        "of an optimizer of the same class and settings; what was saved before a parameter's first "
        "step goes into a fresh optimizer"
    )


def refuse_unmarked_parts(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise for state of a shard that would be saved as if one rank's part were the whole.

    Raises:
        UnsupportedModuleError: naming the state.
    """
    for place, parameter in _numbered(optimizer, state_dict):
        if not isinstance(parameter, ChunkedTensor):
            continue
        for key, value in state_dict["state"].get(place, {}).items():
            if isinstance(value, Tensor) and value.dim() and not isinstance(value, ChunkedTensor):
                raise UnsupportedModuleError(
                    f"{type(optimizer).__name__} keeps {key!r} of a shard as an ordinary tensor "
                    f"{tuple(value.shape)}: a checkpoint would take one rank's part for the whole. "
                    f"Fix: let it make {key!r} with torch.zeros_like(parameter)"
                )


def _own_part(label: str, given: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(given, ChunkedTensor):
        if not isinstance(parameter, ChunkedTensor) or given.spec != parameter.spec:
            raise ConfigError(
                f"{label}: the state dict holds another part, {given!r}, than this rank's "
                f"parameter, {tuple(parameter.shape)} of {global_shape(parameter)}. Fix: load it "
                "with torch.distributed.checkpoint, which reshards"
            )
        return given
    if isinstance(given, DTensor):
        if isinstance(parameter, DTensor) and parameter.placements == given.placements:
            return given
        given = given.full_tensor()
    if tuple(given.shape) != global_shape(parameter):
        raise ConfigError(
            f"{label} must be whole, of shape {global_shape(parameter)}, got {tuple(given.shape)}. "
            "Fix: save tpkernels.full_optimizer_state_dict(model, optimizer), or load parts with "
            "torch.distributed.checkpoint"
        )
    part = torch.zeros_like(parameter.detach(), dtype=given.dtype)
    copy_from_full(part, given)
    return part


def _identities(model: nn.Module) -> dict[str, int]:
    """Of every name of every parameter; a tied one has several. Shards, whatever is gathered."""
    return {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}


def _numbered(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> list[tuple[Any, Tensor]]:
    """(what ``state_dict`` calls it, parameter), by their places in the groups."""
    places = (place for group in state_dict["param_groups"] for place in group["params"])
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return list(zip(places, parameters))  # noqa: B905 (load_state_dict names unequal lengths)


def _group_for(
    index: int, group: dict[str, Any], loaded: list[dict[str, Any]], identities: dict[str, int]
) -> dict[str, Any]:
    """The one of ``loaded`` that holds the trained parameters of ``group``."""
    trained = {id(each) for each in group["params"] if each.requires_grad}
    if not trained:
        if index < len(loaded):
            return loaded[index]
        found: list[int] = []
    else:
        held = [{identities.get(name, 0) for name in each["params"]} for each in loaded]
        found = [number for number, each in enumerate(held) if each & trained]
        if len(found) == 1 and trained <= held[found[0]]:
            return loaded[found[0]]
    raise ConfigError(
        f"load_full_optimizer_state_dict: param_groups[{index}] of the optimizer holds "
        f"{len(trained)} trained parameters, which are in param_groups {found} of the state dict. "
        "Fix: build the optimizer with the groups that were saved"
    )
