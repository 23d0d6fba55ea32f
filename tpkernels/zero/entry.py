"""``zero``: shard a model's parameters, gradients and optimizer states over data-parallel ranks."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.checkpoint import group_of
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError, TPKernelsWarning, UnsupportedModuleError
from tpkernels.shard_spec import spec_of
from tpkernels.zero.agreed_settings import check_settings
from tpkernels.zero.byte_sizes import UNLIMITED, format_bytes
from tpkernels.zero.config import ZeroConfig
from tpkernels.zero.construct import build_unit, check_parameters, gathered_bytes
from tpkernels.zero.engine import Engine
from tpkernels.zero.manager import ZeroManager
from tpkernels.zero.materialize import (
    agreed_seed,
    check_initialisers,
    materialise,
    materialise_buffers,
)
from tpkernels.zero.policies import resolve_offload
from tpkernels.zero.reduce_group import separate_reduce_group
from tpkernels.zero.scheduler import make_scheduler
from tpkernels.zero.streams import StreamTransfers
from tpkernels.zero.transfers import HostTransfers, Transfers
from tpkernels.zero.unit import Unit
from tpkernels.zero.units import find_units


def zero(
    module: nn.Module,
    mesh: GroupLike = None,
    *,
    stage: int = 3,
    prefetch_bytes: int | float | str = "256MiB",
    max_live_bytes: int | float | str | None = None,
    units: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    reshard_after_forward: bool = True,
    strict: bool = False,
    config: ZeroConfig | None = None,
) -> ZeroManager:
    """Shard ``module`` in place over the ranks of ``mesh``; it trains as before.

    Equivalent to training on one process with the batches of all ranks together: gradients are
    the mean over ranks. Stage 1 shards the optimizer's state, 2 also gradients, 3 also parameters,
    which are then gathered unit by unit, the next ones while this one computes.

    Args:
        module: built on any device; on ``meta`` its parameters are initialised unit by unit, so
            that the whole never exists on a rank.
        mesh: a 1-D ``DeviceMesh`` or ``ProcessGroup`` (None: all ranks), or a 2-D mesh whose
            first dimension replicates and whose second shards (hybrid sharding).
        prefetch_bytes: bytes that may be gathered and not in use; 0: no prefetch.
        max_live_bytes: bound of everything gathered and of gradients on their way, as far as the
            units in use allow.
        units: what is gathered together: classes or their names, modules, a size ("64MiB"), a
            policy of FSDP's; None: the repeated blocks, and one unit for the rest.
        mp_policy: a dtype, its name, or FSDP's ``MixedPrecision(Policy)``; master weights are
            fp32 whatever it says.
        offload_policy: ``"cpu"`` or FSDP's: master weights, gradients and optimizer states live
            on the CPU.
        reshard_after_forward: False keeps each unit gathered from forward to backward.
        strict: an error instead of a warning where a unit does not fit a budget.
        config: all of the above, and more, as a :class:`ZeroConfig`; then nothing else is given.

    Returns:
        The manager. Make the optimizer with its ``optimizer(cls, **kw)``, or of
        ``module.parameters()``, which are this rank's shards from here on.

    Raises:
        ConfigError, UnsupportedModuleError: what cannot work, named; before anything is sharded.
        AgreementError: the ranks hold different weights, or were given different settings.

    Warns:
        TPKernelsWarning: an optimizer was made before, or a unit does not fit a budget.

    Collective over the mesh.
    """
    given = {
        "stage": stage,
        "prefetch_bytes": prefetch_bytes,
        "max_live_bytes": max_live_bytes,
        "units": units,
        "mp_policy": mp_policy,
        "reshard_after_forward": reshard_after_forward,
        "strict": strict,
    }
    config = _config(config, given, offload_policy)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module must be an nn.Module, got {type(module).__name__}")
    _refuse_scripted(module)
    _refuse_sharded(module)
    _refuse_embeddings(module)
    group, replicas = _groups(mesh)
    device = _device(module, mesh, group)
    planned = find_units(module, config.units, param_dtype=config.precision.param_dtype)
    check_initialisers(module, planned)
    config.training.check_world(group.size * (1 if replicas is None else replicas.size))
    copies = group_of(module)
    check_settings(config, planned, group, replicas, copies)
    check_parameters(planned, group, copies, config.precision.param_dtype)
    _tell_oversized(
        {each.name: gathered_bytes(each, config, group.size, device) for each in planned}, config
    )
    _tell_optimizers(module)
    seed = None
    if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
        seed = agreed_seed([group] if replicas is None else [group, replicas])
        materialise_buffers(module, device, seed)
    transfers = _transfers(group, replicas, device, config)
    _place_buffers(module, device, config.precision.buffer_dtype)
    built = []
    for index, each in enumerate(planned):
        if seed is not None:
            each.parameters = materialise(module, each, device, seed + index)
        built.append(build_unit(index, each, group, config, device, transfers, copies))
        each.parameters = []  # the last reference to what was whole
    residents = _residents(built, config)
    sizes = [
        unit.bytes(resident=unit.index in residents, held=not config.reshard_after_forward)
        for unit in built
    ]
    scheduler = make_scheduler(
        sizes,
        config.prefetch_bytes,
        UNLIMITED if config.max_live_bytes is None else config.max_live_bytes,
        config.max_pending_reduces,
        config.reshard_after_backward,
    )
    engine = Engine(module, built, scheduler, group, replicas, config, transfers, residents)
    return ZeroManager(engine)


def _config(config: ZeroConfig | None, given: dict[str, Any], offload_policy: Any) -> ZeroConfig:
    if config is None:
        offload = resolve_offload(offload_policy)
        return ZeroConfig(
            **given, offload_optimizer=offload.optimizer, pin_memory=offload.pin_memory
        )
    if not isinstance(config, ZeroConfig):
        raise ConfigError(
            f"config must be a ZeroConfig, got {type(config).__name__}. Fix: "
            "ZeroConfig.from_deepspeed(path_or_dict) reads a DeepSpeed file"
        )
    defaults = zero.__kwdefaults__ or {}
    both = [name for name, value in given.items() if value != defaults[name]]
    both += ["offload_policy"] * (offload_policy is not None)
    if both:
        raise ConfigError(
            f"{', '.join(both)} given beside config. Fix: dataclasses.replace(config, "
            f"{both[0]}=...), or leave config out"
        )
    return config


def _refuse_scripted(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                f"{name or 'model'} was made by torch.jit.script or torch.jit.trace, whose "
                "parameters cannot be replaced by shards. Fix: give zero() the module it was made "
                "of"
            )


def _refuse_sharded(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if hasattr(each, "_get_fsdp_state"):
            raise UnsupportedModuleError(
                f"{name or 'model'} is under fully_shard already, and zero() would shard the "
                "shards. Fix: use one of zero and fully_shard for a module"
            )
    for name, parameter in module.named_parameters():
        spec = spec_of(parameter)
        if spec is not None and spec.dim is None:
            raise UnsupportedModuleError(
                f"{name} is sharded by zero() already. Fix: call it once, on the whole model"
            )
    if not any(True for _ in module.parameters()):
        raise UnsupportedModuleError(f"{type(module).__name__} has no parameters to shard")


def _refuse_embeddings(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if not isinstance(each, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if each.max_norm is not None:
            raise UnsupportedModuleError(
                f"{name or 'model'} has max_norm={each.max_norm}: its forward edits the gathered "
                "weight, which is freed afterwards, and the edit would be lost. Fix: max_norm=None"
            )
        if each.sparse and each.weight.requires_grad:
            raise UnsupportedModuleError(
                f"{name or 'model'} has sparse=True: sparse gradients cannot be reduced with those "
                "of the other parameters of its unit. Fix: sparse=False"
            )


def _tell_optimizers(module: nn.Module) -> None:
    own = {id(each) for each in module.parameters()}
    # by type: isinstance would run the __class__ of every lazy object there is
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    for each in found:
        groups = getattr(each, "param_groups", [])  # one whose constructor raised has none
        if any(id(p) in own for group in groups for p in group["params"]):
            warnings.warn(
                f"{type(each).__name__} was made of this model's parameters before zero(), which "
                "replaces them: it would step tensors that nothing uses. Fix: make it after "
                "zero(), with manager.optimizer(cls, **settings)",
                TPKernelsWarning,
                stacklevel=3,
            )


def _groups(mesh: GroupLike) -> tuple[Group, Group | None]:
    """(the ranks that share the parameters, those that replicate them)."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        names = mesh.mesh_dim_names or ("0", "1")
        # the mesh of each says which other ranks share the model
        parts = [mesh[name] if mesh.mesh_dim_names else None for name in names]
        replicas, group = (Group(mesh.get_group(i), parts[i], names[i]) for i in range(2))
        return group, replicas if replicas.size > 1 else None
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; zero() takes one that shards, "
            "or two of which the first replicates. Fix: mesh['dp_shard'] or "
            "mesh['dp_replicate', 'dp_shard']"
        )
    group = resolve_group(mesh)
    if not isinstance(mesh, (DeviceMesh, Group)):  # a bare group has no name for what it does
        group = Group(group.process_group, None, "dp_shard")
    return group, None


def _device(module: nn.Module, mesh: GroupLike, group: Group) -> torch.device:
    kind = None
    if isinstance(mesh, DeviceMesh):
        kind = mesh.device_type
    elif group.process_group is not None:
        kinds = {each.type for each in group.process_group._device_types}
        kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        kinds = {each.device.type for each in module.parameters()} - {"meta"}
        kind = "cuda" if "cuda" in kinds or (not kinds and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


def _transfers(
    group: Group, replicas: Group | None, device: torch.device, config: ZeroConfig
) -> Transfers:
    second = separate_reduce_group(group) if config.separate_reduce_group else None
    if device.type != "cuda":
        return HostTransfers(group, replicas, reduce_group=second)
    return StreamTransfers(
        group,
        replicas,
        device,
        reduce_group=second,
        offloads=config.offload_optimizer == "cpu",
        pin_memory=config.pin_memory,
    )


def _place_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move buffers to ``device``, floating-point ones to ``dtype`` if it is given."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and not buffer.is_meta:
                wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                each._buffers[name] = buffer.to(device, wanted)


def _residents(units: list[Unit], config: ZeroConfig) -> set[int]:
    """Units that stay gathered: all below stage 3, else the small ones, smallest first."""
    if config.stage < 3:
        return {unit.index for unit in units}
    sizes = {
        unit.index: sum(unit.buffers[which].layout.numel_of(i) for which, i, _ in unit.slots())
        for unit in units
    }
    chosen, total = set(), 0
    for index in sorted(sizes, key=lambda index: (sizes[index], index)):
        total += sizes[index]
        limit = config.persistence_limit
        if sizes[index] < config.persistence_threshold and (limit is None or total <= limit):
            chosen.add(index)
    return chosen


def _tell_oversized(total: dict[str, int], config: ZeroConfig) -> None:
    """Of ``total`` bytes by unit, say which do not fit a bound."""
    if config.stage < 3:
        return
    for setting, bound in (
        ("prefetch_bytes", config.prefetch_bytes or None),
        ("max_live_bytes", config.max_live_bytes),
    ):
        over = [name for name, size in total.items() if bound is not None and size > bound]
        if not over:
            continue
        largest = max(over, key=lambda name: total[name])
        text = (
            f"{setting}={format_bytes(bound or 0)} is less than {largest!r} needs, "
            f"{format_bytes(total[largest])} ({len(over)} of {len(total)} units do not fit); "
            "such a unit is gathered when it is used, not ahead. Fix: "
            f"{setting}={format_bytes(total[largest], round_up=True)!r}, or smaller units="
        )
        if config.strict:
            raise ConfigError(text)
        warnings.warn(text, TPKernelsWarning, stacklevel=3)
