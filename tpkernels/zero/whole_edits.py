"""Reading and editing whole parameters by hand: ``with manager.gathered(module): ...``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.comm.agreement import check_agreement, control_device
from tpkernels.comm.collectives import all_gather_bytes, all_reduce
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError, ConfigError
from tpkernels.zero.flat_buffer import FlatBuffer, Slot
from tpkernels.zero.unit import Unit


class WholeEdits:
    """Notices which whole parameters of ``units`` are edited in place from now on."""

    def __init__(self, units: list[Unit], group: Group) -> None:
        self._group = group
        self._watched = [
            (unit.buffers[which], index, slot, self._version(slot))
            for unit in units
            for which, index, slot in unit.slots()
        ]

    @staticmethod
    def _version(slot: Slot) -> int:
        return sum(tensor._version for tensor in slot.hidden)

    def _edited(self) -> list[tuple[FlatBuffer, int, Slot]]:
        return [(b, i, s) for b, i, s, before in self._watched if self._version(s) != before]

    def refuse(self) -> None:
        """Raise on every rank if any rank edited anything.

        Raises:
            ConfigError: naming the parameters; their shards are unchanged.
        """
        names = [slot.name for _, _, slot in self._edited()]
        count = torch.tensor([len(names)], device=control_device(self._group))
        counts = all_gather_bytes(count, self._group.name).flatten().tolist()
        if any(counts):
            ranks = [self._group.ranks[rank] for rank, count in enumerate(counts) if count]
            shown = f" ({', '.join(names[:5])})" if names else ""
            raise ConfigError(
                f"rank {', '.join(map(str, ranks))} edited gathered parameters{shown}, which are "
                "freed here: the edit would be lost. Fix: manager.gathered(module, writeback=True) "
                "with the same edit on every rank, or from_rank=0 to take rank 0's"
            )

    def write_back(self, from_rank: int | None) -> None:
        """Put the edits into the shards: every rank's, which must agree, or those of one rank.

        Raises:
            AgreementError: ranks edited different parameters, or gave them different values.
        """
        edited = self._edited()
        if from_rank is not None:
            edited = self._take_from(from_rank, edited)
        else:
            self._check_equal(edited)
        with torch.no_grad():
            for buffer, index, slot in edited:
                chunk = buffer.layout.chunk(index, buffer.group.rank)
                flat = _inner(slot).detach().reshape(-1)
                buffer.master[buffer.shard_range(index)].copy_(
                    flat[chunk.offset : chunk.offset + chunk.size]
                )

    def _check_equal(self, edited: list[tuple[FlatBuffer, int, Slot]]) -> None:
        values = {slot.name: _inner(slot).detach() for _, _, slot in edited}
        mask = self._mask(edited)
        try:
            check_agreement({"edited parameters": mask}, self._group, "edits in gathered()")
            check_agreement(values, self._group, "edits in gathered()")
        except AgreementError as error:
            raise AgreementError(
                f"{str(error).split(' Fix: ')[0]} Fix: make the same edit on every rank, or "
                "manager.gathered(module, writeback=True, from_rank=0)"
            ) from error

    def _mask(self, edited: list[tuple[FlatBuffer, int, Slot]]) -> Tensor:
        marked = {id(slot) for _, _, slot in edited}
        return torch.tensor([id(slot) in marked for _, _, slot, _ in self._watched]).to(torch.int32)

    def _take_from(
        self, source: int, edited: list[tuple[FlatBuffer, int, Slot]]
    ) -> list[tuple[FlatBuffer, int, Slot]]:
        mask = self._mask(edited).to(control_device(self._group))
        if self._group.rank != source:
            mask.zero_()
        mask = all_reduce(mask, self._group.name)
        chosen = [
            (b, i, s) for (b, i, s, _), on in zip(self._watched, mask.tolist(), strict=True) if on
        ]
        with torch.no_grad():
            for _, _, slot in chosen:
                inner = _inner(slot).detach()
                # a sum of one rank's values and zeros: the same bits on every rank
                mine = inner if self._group.rank == source else torch.zeros_like(inner)
                inner.copy_(all_reduce(mine, self._group.name))
        return chosen


def _inner(slot: Slot) -> Tensor:
    return slot.whole._local_tensor if isinstance(slot.whole, DTensor) else slot.whole
