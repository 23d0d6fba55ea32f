"""``clip_grad_norm_``: the one true global norm over all axes, every parameter counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.checkpoint import group_of
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.collectives import all_reduce, all_reduce_max
from tpkernels.comm.group import GroupLike, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.modules.parameters import holders


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
    key-value head held by several ranks counts once; meshes may be mixed.

    Args:
        parameters: a model, or parameters in the same order on all ranks.
        group: whose ranks share head-split parameters (default: the model's own group, or for
            bare parameters all ranks; a parameter that is a DTensor knows its own).
        norm_type: p >= 1, or ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite.

    Returns:
        The total norm, fp32 (fp64 when a gradient is), the same on all ranks.
    """
    if not norm_type >= 1.0:
        raise ConfigError(f"norm_type={norm_type!r} must be at least 1, or math.inf")
    if isinstance(parameters, nn.Module):
        split_group = group_of(parameters) if group is None else resolve_group(group)
        parameters = parameters.parameters()
    else:
        split_group = None if group is None else resolve_group(group)
        if isinstance(parameters, Tensor):
            parameters = [parameters]
    grads = [(p, p.grad) for p in parameters if p.grad is not None]
    total = _total_norm(grads, norm_type, split_group)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # 1e-6 as in torch.nn.utils
    with torch.no_grad():
        for _, grad in grads:
            local = _local(grad)
            local.mul_(scale.to(local.device, local.dtype))
    return total


def _local(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        return grad._local_tensor
    return grad.plain() if isinstance(grad, ChunkedTensor) else grad


def _total_norm(
    grads: list[tuple[Tensor, Tensor]], norm_type: float, split_group: GroupLike
) -> Tensor:
    infinite = math.isinf(norm_type)
    sums: dict[tuple[str, ...], Tensor] = {}  # names of the groups to add over -> partial sum
    for parameter, grad in grads:
        names: tuple[str, ...]
        local = _local(grad).detach()
        wide = local.to(torch.promote_types(local.dtype, torch.float32))
        if isinstance(grad, DTensor):
            names = tuple(str(each.group_name) for each in holders(grad))
        elif isinstance(parameter, ChunkedTensor):
            group = resolve_group(split_group)
            if group.size != len(parameter.spec.layout):
                raise ConfigError(
                    f"group has {group.size} ranks, but a parameter of shape "
                    f"{parameter.spec.global_shape} is split over {len(parameter.spec.layout)}. "
                    "Fix: pass the group it is split over, for example group=mesh['tp'], or the "
                    "model instead of its parameters"
                )
            names = (str(group.name),)
            wide = wide / _counted(parameter, wide, norm_type)
        else:
            names = ()
        part = _power(wide, norm_type)
        if names not in sums:
            sums[names] = part
        else:
            sums[names] = torch.maximum(sums[names], part) if infinite else sums[names] + part
    total = torch.zeros(())
    # In the order of the parameters, alike on every rank; the groups' names are not.
    for names, part in sums.items():
        for name in names:
            part = all_reduce_max(part, name) if infinite else all_reduce(part, name)
        total = torch.maximum(total.to(part), part) if infinite else total.to(part) + part
    return total if infinite else total ** (1.0 / norm_type)


def _power(values: Tensor, norm_type: float) -> Tensor:
    if values.numel() == 0:
        return values.new_zeros(())
    if math.isinf(norm_type):
        return values.abs().amax()
    return torch.linalg.vector_norm(values, norm_type) ** norm_type


def _counted(parameter: ChunkedTensor, values: Tensor, norm_type: float) -> Tensor:
    """By what to divide each row so that r holders' r equal contributions add up to one."""
    spec = parameter.spec
    divisor = values.new_ones(values.shape[spec.dim])
    if not math.isinf(norm_type):
        for chunk in spec.chunks:
            rows = slice(chunk.local_offset, chunk.local_offset + chunk.size)
            divisor[rows] = spec.replicas(chunk) ** (1.0 / norm_type)
    shape = [1] * values.dim()
    shape[spec.dim] = -1
    return divisor.view(shape)
