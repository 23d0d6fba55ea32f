"""What a sharded model cannot be used for, said where it is tried, and not by wrong numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpkernels.checkpoint import DATA_GROUP
from tpkernels.errors import ConfigError, ShardedSaveError

if TYPE_CHECKING:
    from tpkernels.zero.engine import Engine
    from tpkernels.zero.flat_buffer import Slot
    from tpkernels.zero.unit import Unit


def attach_guards(engine: Engine) -> Callable[[], None]:
    """Refuse copies and pickles of the model, ``DistributedDataParallel`` over it, a forward after
    ``model.to(...)`` took its shards out of the memory that is gathered, and training what was
    added to it.

    Returns:
        Raises if something was added or taken out of that memory.
    """
    for module in engine.module.modules():
        module.__dict__[DATA_GROUP] = engine.group  # a part of the model is sharded over it too
        # pickle and copy.deepcopy look it up on the object
        module.__dict__["__reduce_ex__"] = functools.partial(_refuse_copy, engine.group.rank)
        module.__dict__["_ddp_params_and_buffers_to_ignore"] = _RefuseDDP()
    slots = [slot for unit in engine.units for _, _, slot in unit.slots()]
    known = frozenset(id(each) for slot in slots for each in (slot.shard, slot.whole))
    engine.module.register_forward_pre_hook(
        lambda root, _: _refuse_added(root, known) if torch.is_grad_enabled() else None,
        prepend=True,
    )
    for unit in engine.units:
        check = functools.partial(_check_unit, unit)
        for module in unit.modules:
            module.register_forward_pre_hook(check, prepend=True)

    def check_all() -> None:
        _refuse_added(engine.module, known)
        for unit in engine.units:
            _check_unit(unit)

    return check_all


def _refuse_copy(rank: int, protocol: Any) -> Any:
    raise ShardedSaveError(
        f"a model under zero() holds rank {rank}'s shards and the memory they are gathered in; it "
        "cannot be pickled or copied. Fix: torch.save(tpkernels.full_state_dict(model), path); for "
        "a copy, build the model again, load that and call zero() on it"
    )


class _RefuseDDP:
    """DistributedDataParallel reads the names to ignore before it sends anything."""

    def __iter__(self) -> Iterator[str]:
        raise ConfigError(
            "DistributedDataParallel over a model under zero() would overwrite every rank's shards "
            "with rank 0's. Fix: leave it out, zero() reduces the gradients; for replicas of "
            "sharded models, zero(model, mesh['dp_replicate', 'dp_shard'])"
        )


def _refuse_added(root: nn.Module, known: Container[int]) -> None:
    """Raise :class:`ConfigError` for a parameter that trains and whose id is not ``known``."""
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or id(parameter) in known:
                continue
            path = next(path for path, each in root.named_modules() if each is module)
            raise ConfigError(
                f"{path + '.' if path else ''}{name} was added or replaced after zero(): each rank "
                "would train its own, on its own gradients. Fix: add it (LoRA, resized embeddings, "
                "a new head) before zero(), or freeze it"
            )


def _check_unit(unit: Unit, *_: Any) -> None:
    """Raise :class:`ConfigError` unless all parameters are in the memory that is gathered."""
    if unit.shown:
        return  # it was checked when it was gathered
    for buffer in unit.buffers:
        for slot in buffer.slots:
            check_slot(slot, buffer.master)


def check_slot(slot: Slot, master: Tensor) -> None:
    """The same of one parameter, which is not gathered now."""
    shard = slot.shard
    in_place = (
        shard.dtype is master.dtype
        and shard.untyped_storage()._cdata == master.untyped_storage()._cdata
    )
    moved = next(
        ((owner, name) for owner, name in slot.owners if owner._parameters.get(name) is not shard),
        None if in_place else slot.owners[0],
    )
    if moved is None:
        return
    owner, name = moved
    now = owner._parameters.get(name)
    if now is None:
        what = "gone"
    elif (now.dtype, now.device) == (master.dtype, master.device):
        what = f"another tensor of {now.dtype} on {now.device}"
    else:
        what = f"{now.dtype} on {now.device}, the shards are {master.dtype} on {master.device}"
    raise ConfigError(
        f"{slot.name} is no longer in the memory that zero() gathers: model.to(), .half(), "
        f".cuda(), a wrapper or an assignment replaced it (now {what}). Fix: do that before "
        "zero(); mp_policy= sets the dtype that computes, manager.gathered(module, "
        "writeback=True) edits values"
    )
