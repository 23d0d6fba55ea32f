"""Is a whole parameter still where it is gathered? ``p.data = x`` and ``m.p = Parameter(x)`` move
it: what computes would be memory that is neither sharded nor gathered again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.chunked_tensor import local_values
from tpkernels.zero.flat_buffer import FlatBuffer, Slot
from tpkernels.zero.unit import Unit


class Displaced(NamedTuple):
    """What a parameter shows instead of its place: the values, or why they cannot be taken."""

    values: Tensor | None
    misfit: str


def displaced(unit: Unit, buffer: FlatBuffer, index: int) -> Displaced | None:
    """What replaced whole parameter ``index`` of ``buffer``; None: it is in its place."""
    slot = buffer.slots[index]
    if unit.shown:
        shown = [module._parameters.get(attribute) for module, attribute in slot.owners]
        others = [each for each in shown if each is not slot.whole and each is not slot.shard]
        if others:
            return _fitting(others[0], slot, all(each is others[0] for each in shown))
    with torch._C.DisableTorchFunctionSubclass():
        if _where(slot.hidden[0]) == _where(slot.place):
            return None
    return _fitting(slot.whole, slot, True)


def take_in(unit: Unit, buffer: FlatBuffer, index: int, values: Tensor) -> None:
    """``values`` into the place of the parameter, and the parameter there."""
    buffer.slots[index].place.copy_(local_values(values.detach()))
    put_back(unit, buffer, index)


def put_back(unit: Unit, buffer: FlatBuffer, index: int) -> None:
    """The parameter to its place; autograd's count of its versions goes on."""
    slot = buffer.slots[index]
    with torch._C.DisableTorchFunctionSubclass():
        slot.hidden[0].data = slot.place
    if unit.shown:
        for module, attribute in slot.owners:
            module._parameters[attribute] = slot.whole


def put_all_back(units: list[Unit]) -> list[str]:
    """Every parameter of ``units`` to its place; the names of those that were not in it.

    Backward through what was computed with them is an error from here on.
    """
    names = []
    for unit in units:
        for which, index, slot in unit.slots():
            if displaced(unit, unit.buffers[which], index) is not None:
                put_back(unit, unit.buffers[which], index)
                unit.buffers[which].outdate()
                names.append(slot.name)
    return names


def _where(values: Tensor) -> tuple[Any, ...]:
    memory = values.untyped_storage()._cdata, values.storage_offset()
    return (*memory, values.shape, values.stride(), values.dtype)


def _fitting(new: nn.Parameter | None, slot: Slot, everywhere: bool) -> Displaced:
    if new is None:
        return Displaced(None, "is gone")
    if not everywhere:
        return Displaced(None, "is replaced in one of the modules that share it")
    if isinstance(new, DTensor) and isinstance(slot.whole, DTensor):
        same = new.placements == slot.whole.placements
    else:
        same = isinstance(new, DTensor) is isinstance(slot.whole, DTensor)
    values = local_values(new)
    said, wanted = _said(values), _said(slot.place)
    if not same or said != wanted:
        return Displaced(None, f"is now {said if same else type(new).__name__}, not {wanted}")
    if new.requires_grad != slot.whole.requires_grad:
        return Displaced(None, f"has requires_grad={new.requires_grad} now")
    return Displaced(new, "")


def _said(values: Tensor) -> str:
    kind = "" if values.layout == torch.strided else f" {values.layout}"
    return f"{tuple(values.shape)} {values.dtype} on {values.device}{kind}"
