"""Whole state dicts of a sharded model, in the original layout and under the original keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError
from tpkernels.modules.parameters import copy_from_full, gather_full

_GROUP = "_tpkernels_group"  # on the root of a parallelized model


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


def full_state_dict(
    model: nn.Module, *, cpu: bool = False, rank0_only: bool = False
) -> dict[str, Any]:
    """The model's state dict as if it had never been sharded.

    Keys, shapes and dtypes are the original model's; tied weights stay one tensor under both
    keys. Works through tensor parallelism and ``fully_shard``.

    Args:
        cpu: move each tensor to the CPU as it is gathered.
        rank0_only: return ``{}`` on every rank but global rank 0.

    Collective over all ranks that hold a part: call it on all of them.
    """
    group = group_of(model)
    keep = not (rank0_only and torch.distributed.is_initialized() and torch.distributed.get_rank())
    result: dict[str, Any] = {}
    gathered: dict[tuple[Any, ...], Tensor] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            result[key] = value
            continue
        identity = _storage(value)
        if identity not in gathered:
            full = gather_full(value, group)
            if not keep:
                full = full.new_empty(0)
            gathered[identity] = full.cpu() if cpu else full
        result[key] = gathered[identity]
    return result if keep else {}


def _storage(value: Tensor) -> tuple[Any, ...]:
    """Two entries with one identity are one tied tensor; an empty part is nobody's alias."""
    local = getattr(value, "_local_tensor", value)
    if local.is_meta or local.numel() == 0:
        return (id(value),)
    with torch._C.DisableTorchFunctionSubclass():
        return (local.data_ptr(), local.dtype, tuple(value.shape), tuple(local.stride()))


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a whole state dict into a sharded model: every rank takes its part, nothing is sent.

    Args:
        state_dict: whole tensors under the original keys, on every rank.
        strict: raise when keys are missing or left over.

    Returns:
        (missing keys, unexpected keys).

    Raises:
        ConfigError: keys or shapes that do not fit; the model is unchanged then.
    """
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
        expected, given = _global_shape(own[key]), state_dict[key]
        if not isinstance(given, Tensor) or tuple(given.shape) != expected:
            shown = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise ConfigError(f"load_full_state_dict: {key} must be {expected}, got {shown}")
    with torch.no_grad():
        for key in wanted:
            copy_from_full(own[key], state_dict[key])
    return missing, unexpected


def _global_shape(value: Tensor) -> tuple[int, ...]:
    if isinstance(value, ChunkedTensor):
        return value.spec.global_shape
    return tuple(value.shape)
