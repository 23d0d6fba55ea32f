"""``clip_grad_norm_``: the one true global norm over all axes, every parameter counted once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.checkpoint import group_of
from tpkernels.chunked_tensor import ChunkedTensor, local_values
from tpkernels.comm.collectives import all_reduce, all_reduce_max
from tpkernels.comm.group import GroupLike, group_by_name, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.modules.parameters import holders, name_of_group
from tpkernels.shard_spec import ShardSpec


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: GroupLike = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``.

    Equivalent to ``torch.nn.utils.clip_grad_norm_`` on the single-process model: a split
    parameter's parts are added up over the ranks that hold them, a replicated one counts once, a
    key-value head held by several ranks counts once; meshes may be mixed. One all-reduce a group
    of each distinct set of groups.

    Args:
        parameters: a model, or parameters in the same order on all ranks.
        max_norm: > 0; ``math.inf`` measures only.
        group: whose ranks share head-split parameters that do not know it (default: the model's
            own group, or for bare parameters all ranks). DTensors, ``parallelize`` and ``zero``
            tell each parameter its own.
        norm_type: p >= 1, or ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The total norm, fp32 (fp64 when a gradient is), the same on all ranks.
    """
    if not _is_number(max_norm) or not max_norm > 0:
        raise ConfigError(
            f"max_norm={max_norm!r} must be a number > 0. Fix: clip_grad_norm_(model, 1.0); "
            "math.inf measures only, zero_grad() removes gradients"
        )
    if not _is_number(norm_type) or not norm_type >= 1.0:
        raise ConfigError(
            f"norm_type={norm_type!r} must be at least 1, or math.inf. Fix: norm_type=2.0"
        )
    if isinstance(parameters, nn.Module):
        split_group = group_of(parameters) if group is None else resolve_group(group)
        parameters = parameters.parameters()
    else:
        split_group = None if group is None else resolve_group(group)
        if isinstance(parameters, Tensor):
            parameters = [parameters]
    grads = [(p, p.grad) for p in parameters if p.grad is not None or _is_range(p)]
    total = _total_norm(grads, norm_type, split_group)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils
    with torch.no_grad():
        for _, grad in grads:
            if grad is not None:
                local = local_values(grad)
                local.mul_(scale.to(local.device, local.dtype))
    return total


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_range(parameter: Tensor) -> bool:
    """Whether it is a range of a flattened one: ranks take part whose range has no gradient."""
    return (
        isinstance(parameter, ChunkedTensor)
        and parameter.spec.dim is None
        and parameter.requires_grad
    )


def _total_norm(
    grads: list[tuple[Tensor, Tensor | None]], norm_type: float, split_group: GroupLike
) -> Tensor:
    infinite = math.isinf(norm_type)
    sums: dict[tuple[str, ...], Tensor] = {}  # names of the groups to add over -> partial sum
    for parameter, grad in grads:
        names: tuple[str, ...] = ()
        local = parameter.new_zeros(0) if grad is None else local_values(grad).detach()
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        if isinstance(grad, DTensor):
            names = tuple(str(each.group_name) for each in holders(grad))
            part = _power(wide, norm_type)
        elif isinstance(parameter, ChunkedTensor):
            names = _names(parameter.spec, split_group)
            part = (
                _held_once(parameter.spec, wide, norm_type) if grad is not None else _power(wide, 1)
            )
        else:
            part = _power(wide, norm_type)
        part = part.to(_reducible_device(part.device, names))
        if names not in sums:
            sums[names] = part
        else:
            both = sums[names].to(part.device), part
            sums[names] = torch.maximum(*both) if infinite else both[0] + both[1]
    total = torch.zeros(())
    # In the order of the parameters, alike on every rank; the groups' names are not.
    for names, part in sums.items():
        for name in names:
            part = all_reduce_max(part, name) if infinite else all_reduce(part, name)
        total = torch.maximum(total.to(part), part) if infinite else total.to(part) + part
    return total if infinite else total ** (1.0 / norm_type)


def _names(spec: ShardSpec, split_group: GroupLike) -> tuple[str, ...]:
    """The names of the groups that hold the parts of ``spec``, from the inner level outwards.

    Those of copies too: ranks that cut their copies unlike round unlike, and must yet agree.
    """
    return tuple(
        level.group_name or name_of_group(level, resolve_group(split_group))
        for level in spec.levels
        if len(level.layout) > 1
    )


def _held_once(spec: ShardSpec, values: Tensor, norm_type: float) -> Tensor:
    """The power sum of this rank's part, in which what r ranks hold counts as an r-th of it.

    The sum over all ranks then counts every element once.
    """
    if math.isinf(norm_type) or not any(level.is_replicated for level in spec.levels):
        return _power(values, norm_type)
    total = values.new_zeros(())
    for box in spec.boxes():
        total += _power(box.view(values), norm_type) / box.replicas
    return total


def _reducible_device(device: torch.device, names: tuple[str, ...]) -> torch.device:
    """``device``, or the GPU if the groups' backends cannot reduce a tensor on the CPU.

    Raises:
        ConfigError: they can reduce neither there nor on a GPU.
    """
    for name in names:
        group = group_by_name(name)
        able = {device.type} if group is None else {each.type for each in group._device_types}
        if device.type in able:
            continue
        if "cuda" in able and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise ConfigError(
            f"gradients are on {device.type!r}, but the group they are added up over reduces only "
            f"on {sorted(able)}. Fix: dist.init_process_group('cpu:gloo,cuda:nccl'), or keep the "
            "gradients on the group's device"
        )
    return device


def _power(values: Tensor, norm_type: float) -> Tensor:
    if values.numel() == 0:
        return values.new_zeros(())
    if math.isinf(norm_type):
        return values.abs().amax()
    return torch.linalg.vector_norm(values, norm_type) ** norm_type
