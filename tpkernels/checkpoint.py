"""Whole state dicts of a sharded model, in the original layout and under the original keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels import envs
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.agreement import check_agreement
from tpkernels.comm.group import Group, GroupLike
from tpkernels.errors import AgreementError, CommunicationError, ConfigError
from tpkernels.modules.parameters import copy_from_full, gather_full

_GROUP = "_tpkernels_group"  # on the root of a parallelized model
DATA_GROUP = "_tpkernels_data_group"  # on the root of a model under ZeRO: the Group it is cut over


def group_of(module: nn.Module) -> Group | None:
    """The group ``module``, or the first split module inside it, is split over."""
    for each in module.modules():
        state = each.__dict__.get("_tp")
        for group in (
            each.__dict__.get(_GROUP),
            getattr(state, "group", None),
            each.__dict__.get("group"),
        ):
            if isinstance(group, Group):
                return group
    return None


def data_group_of(module: nn.Module) -> Group | None:
    """The group over which ZeRO sharded ``module``, or the first such module inside it."""
    found = (each.__dict__.get(DATA_GROUP) for each in module.modules())
    return next((group for group in found if isinstance(group, Group)), None)


def full_state_dict(
    model: nn.Module, *, cpu: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """The model's state dict as if it had never been sharded.

    Keys, shapes and dtypes are the original model's; tied weights stay one tensor under both
    keys. Works through tensor parallelism, ZeRO and ``fully_shard``. Under ZeRO trained weights
    come in the dtype of the master weights: fp32 where the model is in bf16.

    Args:
        cpu: move each tensor to the CPU as it is gathered.
        rank0_only: return ``{}`` on every rank but the first of those that share the model.

    Collective over all ranks that hold a part: call it on all of them.
    """
    require_model(model, "full_state_dict")
    group = group_of(model)
    keep = not rank0_only or is_first_rank(group or data_group_of(model))
    result: dict[str, Any] = {}
    gathered: dict[int, Tensor] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        if id(value) not in gathered:  # a tied parameter is one object on every rank
            full = gather_full(value, group)
            if not keep:
                full = full.new_empty(0)
            gathered[id(value)] = full.cpu() if cpu else full
        result[key] = gathered[id(value)]
    return result if keep else {}


def sharing_meshes(group: Group | None) -> list[dist.ProcessGroup]:
    """The process groups, one a dimension, that together hold the ranks sharing one model.

    Those of the mesh that ``group`` is a dimension of, without its pipeline stages, which hold
    other layers; else the group itself, else all ranks.
    """
    if not dist.is_initialized():
        return []
    if group is None:
        return [dist.group.WORLD]  # type: ignore[list-item]
    root = None if group._mesh is None else group._mesh._get_root_mesh()
    if root is None or root.ndim == 1 or not root.mesh_dim_names:
        return [] if group.process_group is None else [group.process_group]
    return [root.get_group(name) for name in root.mesh_dim_names if name != "pp"]


def is_first_rank(group: Group | None) -> bool:
    """Whether this rank is the first of those that share one model."""
    return all(each.rank() == 0 for each in sharing_meshes(group))


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a whole state dict into a sharded model: every rank takes its part.

    No weights are sent. Under ``zero`` the ranks compare what they were given (collective; unless
    ``TPKERNELS_CHECK=off``): call it on all of them.

    Args:
        state_dict: whole tensors under the original keys, on every rank.
        strict: raise when keys are missing or left over.

    Returns:
        (missing keys, unexpected keys).

    Raises:
        ConfigError: keys or shapes that do not fit; the model is unchanged then.
        AgreementError: ranks of a model under ``zero`` were given different values; likewise.
    """
    require_model(model, "load_full_state_dict")
    if not isinstance(state_dict, Mapping):
        raise ConfigError(
            f"load_full_state_dict: state_dict={shown(state_dict)} must be a dict of whole "
            "tensors. Fix: load_full_state_dict(model, torch.load(path)), of what "
            "tpkernels.full_state_dict(model) gave"
        )
    own = model.state_dict()
    missing = [key for key in own if key not in state_dict]
    unexpected = [key for key in state_dict if key not in own]
    if strict and (missing or unexpected):
        raise ConfigError(
            f"load_full_state_dict: missing keys {missing[:5]}, unexpected keys {unexpected[:5]} "
            f"({len(missing)} and {len(unexpected)} in all). Fix: strict=False to load the rest"
        )
    wanted = [key for key in own if key in state_dict and isinstance(own[key], Tensor)]
    for key in wanted:
        expected, given = global_shape(own[key]), state_dict[key]
        if not isinstance(given, Tensor) or tuple(given.shape) != expected:
            found = tuple(given.shape) if isinstance(given, Tensor) else shown(given)
            raise ConfigError(f"load_full_state_dict: {key} must be {expected}, got {found}")
    if (group := data_group_of(model)) is not None:
        values = {key: state_dict[key] for key in wanted}
        check_equal_wholes("load_full_state_dict", values, sharing_meshes(group))
    with torch.no_grad():
        for key in wanted:
            copy_from_full(own[key], state_dict[key])
    return missing, unexpected


def check_equal_wholes(
    what: str, values: Mapping[str, Tensor], groups: Iterable[GroupLike]
) -> None:
    """Compare whole tensors that every rank takes its part of, over each of ``groups``.

    Collective where there are any, unless ``TPKERNELS_CHECK=off``.

    Raises:
        AgreementError: on every rank, naming what differs.
    """
    values = {key: value for key, value in values.items() if not value.is_meta}
    if not values or envs.check() == "off":
        return
    for group in groups:
        if group is None:
            continue
        try:
            check_agreement(values, group, f"{what} of whole tensors")
        except AgreementError as error:
            raise AgreementError(
                f"{str(error).split(' Fix: ')[0]} Each rank takes its part of its own copy: the "
                "parts would be of different wholes. Fix: load the same file on every rank; "
                "TPKERNELS_CHECK=off skips the check"
            ) from error
        except CommunicationError as error:
            raise CommunicationError(
                f"{error} This was {what}, in which the ranks compare whole tensors. Fix: call it "
                "on every rank, for the same module"
            ) from error


def require_model(model: Any, what: str) -> None:
    """Raise :class:`ConfigError` unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{what}: model={shown(model)} must be an nn.Module. Fix: pass the model first"
        )


def shown(value: Any) -> str:
    """A wrong value and its type, for a message."""
    text = repr(value)
    return f"{text if len(text) < 40 else text[:37] + '...'} ({type(value).__name__})"


def global_shape(value: Tensor) -> tuple[int, ...]:
    """Shape of the whole that ``value`` is a part of; its own if it is none."""
    if isinstance(value, ChunkedTensor):
        return value.spec.whole_shape
    return tuple(value.shape)
