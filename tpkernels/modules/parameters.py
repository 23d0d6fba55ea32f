"""Sharded parameters: how they are made from dense ones, unwrapped for compute, and rejoined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.collectives import all_gather, all_reduce_async
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.shard_spec import (
    Chunk,
    ShardSpec,
    attach_spec,
    chunk_sizes,
    layout_from_sizes,
    spec_of,
)


def split_spec(shape: Sequence[int], dim: int, group: Group, sizes: list[int]) -> ShardSpec:
    """The spec of a plain split of ``shape`` along ``dim`` into ``sizes`` rows per rank."""
    return layout_spec(shape, dim, group, layout_from_sizes(sizes))


def layout_spec(
    shape: Sequence[int], dim: int, group: Group, layout: tuple[tuple[Chunk, ...], ...]
) -> ShardSpec:
    """The spec of a split into several chunks per rank, or with replicas."""
    return ShardSpec(
        tuple(shape), dim, layout, group.rank, group.mesh_dim, group_name=str(group.name)
    )


def is_plain_split(spec: ShardSpec) -> bool:
    """Whether DTensor's ``Shard(dim)`` says the same: one chunk a rank, sized as it sizes them."""
    if spec.dim is None or spec.within is not None:
        return False
    return spec.layout == layout_from_sizes(chunk_sizes(spec.rows, len(spec.layout)))


def make_parameter(
    local: Tensor, spec: ShardSpec, group: Group, requires_grad: bool
) -> nn.Parameter:
    """A parameter that holds ``local`` and says what it is.

    A DTensor where its placements can say it (so that ``fully_shard`` in 2-D, DCP and PyTorch's
    tools understand it), else a :class:`ChunkedTensor`; an ordinary one on a group of one.
    """
    data: Tensor
    if group.size == 1:
        data = local
    elif spec.dim is not None and is_plain_split(spec):
        stride = torch.empty(spec.global_shape, device="meta").stride()
        data = DTensor.from_local(
            local,
            group.mesh(local.device.type),
            [Shard(spec.dim)],
            run_check=False,
            shape=torch.Size(spec.global_shape),
            stride=stride,
        )
    else:
        data = ChunkedTensor.wrap(local, spec)
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    attach_spec(parameter, spec)
    return parameter


def shard_parameter_(module: nn.Module, name: str, spec: ShardSpec, group: Group) -> None:
    """Replace a dense parameter of ``module`` (and its gradient) by this rank's part, in place.

    Does nothing on a group of one, for a missing parameter, or for a tied one that its other
    owner has already split.
    """
    dense = module._parameters.get(name)
    if dense is None or group.size == 1 or spec_of(dense) is not None:
        return
    if dense._backward_hooks or getattr(dense, "_post_accumulate_grad_hooks", None):
        raise UnsupportedModuleError(
            f"{name} of a {type(module).__name__} has hooks on its gradient, which its part would "
            "not keep. Fix: register them after parallelize"
        )
    part = make_parameter(spec.take(dense.detach()), spec, group, dense.requires_grad)
    if dense.grad is not None:
        part.grad = make_parameter(spec.take(dense.grad), spec, group, False).detach()
    module._parameters[name] = part


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's values as an ordinary tensor, differentiable; unwrapped once a forward.

    Raises:
        UnsupportedModuleError: a range of the flattened tensor, which no module computes with.
    """
    if isinstance(parameter, ChunkedTensor):
        if parameter.spec.dim is None:
            parameter.refuse("this module's forward")
        return parameter.plain()
    if isinstance(parameter, DTensor):
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return parameter._local_tensor
        return parameter.to_local()
    return parameter


def local_part(
    parameter: Tensor, group: Group, name: str, owner: nn.Module | None = None
) -> Tensor:
    """:func:`local_tensor` of a parameter that must be split when ``group`` has several ranks.

    ``name``, and whose it is: for the error.

    Raises:
        ConfigError: it is an ordinary tensor: the sum over ranks would count the whole R times.
    """
    if group.size > 1 and not isinstance(parameter, (ChunkedTensor, DTensor)):
        what = name if owner is None else f"{type(owner).__name__}.{name}"
        raise ConfigError(
            f"{what} holds an ordinary tensor {tuple(parameter.shape)} where this rank's part of a "
            "split parameter belongs (load_state_dict(..., assign=True) leaves it so). Fix: "
            "tpkernels.load_full_state_dict(model, state_dict)"
        )
    return local_tensor(parameter)


def gather_full(tensor: Tensor, group: Group | None) -> Tensor:
    """The whole tensor from every rank's part; collective unless it is an ordinary tensor.

    A part of a part (sharded over dp_shard within a split over tp) is gathered level by level.
    ``group`` is for parts that do not know their own: the group they are split over.

    Raises:
        ConfigError: a part whose group is neither known nor given, or is of another size.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if not isinstance(tensor, ChunkedTensor):
        return tensor.detach()
    part = tensor.plain().detach()
    for spec in tensor.spec.levels:
        part = _gathered(part, spec, group)
    return part


def _gathered(part: Tensor, spec: ShardSpec, group: Group | None) -> Tensor:
    """The tensor of ``spec.global_shape`` from every rank's part of it, a new one."""
    full = part.new_empty(spec.global_shape)
    if spec.is_copied:
        spec.put(part, full)
        return full
    name, dim = name_of_group(spec, group), spec.dim or 0
    sizes = [spec.rows_of(rank) for rank in range(len(spec.layout))]
    if spec.dim is None and len(sizes) * max(sizes) > 2 * sum(sizes):
        # Most of it lies on a few ranks, and the others would send as much padding. A sum of
        # bytes, of which one rank has each and the others zero, is exact whatever they mean.
        spec.put(part, full.zero_())
        all_reduce_async(full.view(-1).view(torch.uint8), name).wait()
        return full
    parts = all_gather(part, sizes, dim, name).split(sizes, dim)
    for rank, each in enumerate(parts):
        spec.put(each, full, rank)
    return full


def name_of_group(spec: ShardSpec, group: Group | None) -> str:
    """The name of the group whose ranks hold the parts of ``spec``: its own, or ``group``'s.

    Raises:
        ConfigError: neither is known, or ``group`` is another.
    """
    world = len(spec.layout)
    if spec.group_name or world == 1:
        return spec.group_name if world > 1 else ""
    if group is None or group.size != world:
        given = "no group is known" if group is None else f"group has {group.size} ranks"
        raise ConfigError(
            f"{given}, but a parameter of shape {spec.global_shape} is split over {world}. "
            f"Fix: pass the group it is split over, for example group=mesh[{spec.mesh_dim!r}], or "
            "the model instead of its parameters"
        )
    if spec.dim is None and group.mesh_dim != spec.mesh_dim:
        raise ConfigError(
            f"a parameter of shape {spec.global_shape} is sharded over {spec.mesh_dim!r}, but the "
            f"given group is {group.mesh_dim!r}. Fix: give its ShardSpec the group_name of "
            f"{spec.mesh_dim!r}"
        )
    return str(group.name)


def gather_gradient(parameter: Tensor, group: Group | None) -> Tensor | None:
    """The whole gradient of a parameter, as in the dense model; collective like gather_full."""
    grad = parameter.grad
    if isinstance(parameter, ChunkedTensor) and isinstance(grad, Tensor):
        grad = grad if isinstance(grad, ChunkedTensor) else ChunkedTensor.wrap(grad, parameter.spec)
    return None if grad is None else gather_full(grad, group)


def copy_from_full(tensor: Tensor, full: Tensor) -> None:
    """Write this rank's part of ``full`` into ``tensor``, in place, without communication."""
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        part = full
        for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
            part = part.narrow(dim, start if size else 0, size)
        tensor._local_tensor.copy_(part)
    elif isinstance(tensor, ChunkedTensor):
        local = tensor.plain().detach()
        for box in tensor.spec.boxes():
            box.view(local).copy_(box.of(full))
    else:
        tensor.copy_(full)


def holders(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The groups over which a DTensor's parts are spread (not those it is replicated over)."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(dim)
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    ]
