"""Edits by hand that no version counter shows, such as those through ``.data``: found by value.

with manager.gathered(module, writeback=True): ...      edits of whole parameters
parameter.data.add_(0.1)                                edits of shards, of which a copy is kept
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tpkernels.chunked_tensor import local_values
from tpkernels.comm.agreement import check_agreement, control_device
from tpkernels.comm.collectives import all_gather_bytes, all_reduce
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError, ConfigError
from tpkernels.zero.flat_buffer import FlatBuffer, Slot
from tpkernels.zero.unit import Unit
from tpkernels.zero.whole_places import displaced, put_all_back, take_in

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EDITED, _STEPPED, _MISFIT, _GONE = 1, 2, 3, 4


def own_part_differs(buffer: FlatBuffer) -> Tensor:
    """Which elements of this rank's part of the whole are not its shard's: bools, [S].

    Equivalent to ``buffer.own != buffer.master.to(buffer.own.dtype)`` by bits; two NaN are equal.
    The whole must have been waited for.
    """
    own, master = buffer.own, buffer.master.detach().to(buffer.own.device, buffer.own.dtype)
    if own.dtype.is_complex:
        own, master = torch.view_as_real(own).flatten(), torch.view_as_real(master).flatten()
    words = _WORDS[own.element_size()]
    differs = own.view(words) != master.view(words)
    if own.dtype.is_floating_point:
        differs &= ~(own.isnan() & master.isnan())
    return differs.view(buffer.layout.shard_numel, -1).any(1)


class WholeEdits:
    """Notices which whole parameters of ``units`` are edited from now on.

    Each element is in the part of one rank, which compares it with its shard; a parameter that
    differs on any rank is edited. Version counters are asked too: they show an edit of one rank
    in another rank's part. A parameter that was given other memory (``p.data = x``) or replaced
    (``m.p = Parameter(x)``) is edited; :meth:`put_back` undoes what is not taken of that.

    Inside one another: what the inner one writes to the shards is no edit to the outer one.
    """

    def __init__(self, units: list[Unit], group: Group) -> None:
        self._group = group
        self._units = units
        self._watched = [
            (unit, unit.buffers[which], index, slot)
            for unit in units
            for which, index, slot in unit.slots()
        ]
        self._seen = [False] * len(self._watched)  # edited, as counters or replaced memory say
        self._stepped = [False] * len(self._watched)
        self._misfits: dict[int, str] = {}
        self.written: set[int] = set()  # ids of slots
        self._take_in()
        self._seen = [False] * len(self._watched)
        self.resume(self.written)
        # Inside another gathered(): its edits are for that one to judge.
        self._before = self._different()

    def note(self) -> None:
        """Keep what counters and memory say so far, before they change for another reason."""
        self._take_in()
        for place, (_, buffer, _, slot) in enumerate(self._watched):
            self._seen[place] |= _version(slot) != self._versions[place]
            self._stepped[place] |= buffer.master._version != self._masters[place]

    def resume(self, written: Collection[int]) -> None:
        """Counters as they are now mean nothing; slots whose ids are ``written`` are as new."""
        self._versions = [_version(slot) for _, _, _, slot in self._watched]
        self._masters = [buffer.master._version for _, buffer, _, _ in self._watched]
        for place, (_, _, _, slot) in enumerate(self._watched):
            if id(slot) in written:
                self._seen[place] = self._before[place] = False

    def put_back(self) -> None:
        """Every parameter to the memory that is gathered."""
        put_all_back(self._units)

    def _take_in(self) -> None:
        self._misfits = {}
        for place, (unit, buffer, index, _) in enumerate(self._watched):
            found = displaced(unit, buffer, index) if buffer.is_allocated else None
            if found is None:
                continue
            if found.values is None:
                self._misfits[place] = found.misfit
            else:
                take_in(unit, buffer, index, found.values)
                self._seen[place] = True

    def _different(self) -> list[bool]:
        """Of each watched parameter, whether this rank's part of it differs from its shard."""
        differs: dict[int, Tensor] = {}
        parts = []
        for _, buffer, index, _ in self._watched:
            if not buffer.is_allocated:
                parts.append(torch.zeros((), dtype=torch.bool, device=buffer.whole.device))
                continue
            if id(buffer) not in differs:
                differs[id(buffer)] = own_part_differs(buffer)
            parts.append(differs[id(buffer)][buffer.shard_range(index)].any())
        return torch.stack(parts).tolist() if parts else []

    def _marks(self, *, by_version: bool) -> list[list[int]]:
        """What each rank says of each watched parameter, [R][n]; collective."""
        mine = []
        for place, differs in enumerate(self._different()):
            new = differs and not self._before[place]
            edited = new or (by_version and self._seen[place])
            stepped = new and self._stepped[place]
            mark = _MISFIT if place in self._misfits else _STEPPED if stepped else int(edited)
            mine.append(mark if self._watched[place][1].is_allocated else _GONE)
        row = torch.tensor(mine, dtype=torch.uint8, device=control_device(self._group))
        marks = all_gather_bytes(row, self._group.name).tolist()
        if gone := self._named(marks, _GONE):
            raise ConfigError(
                f"{', '.join(gone[:5])} were freed inside gathered(), by manager.reset() or after "
                "an error in a pass: edits of them are lost. Fix: call manager.reset() outside of "
                "manager.gathered(), and let errors leave it"
            )
        if unfit := self._named(marks, _MISFIT):
            here = [f"{self._watched[at][3].name} {why}" for at, why in self._misfits.items()]
            told = f"; here {', '.join(here[:5])}" if here else ""
            raise ConfigError(
                "gathered parameters were replaced by what does not fit their memory "
                f"({', '.join(unfit[:5])}{told}), as model.half(), .to(), a resize or "
                "an assignment does; nothing is written to the shards. Fix: do that before zero() "
                "(mp_policy= sets the dtype that computes); inside gathered(writeback=True) write "
                "values with parameter.copy_(values)"
            )
        if late := self._named(marks, _STEPPED):
            raise ConfigError(
                f"the shards of {', '.join(late[:5])} changed while they were gathered: the "
                "gathered copy is older than they are, and edits of it cannot be told from that. "
                "Fix: optimizer.step(), and other changes of shards, outside of manager.gathered()"
            )
        return marks

    def _named(self, marks: list[list[int]], mark: int) -> list[str]:
        """Names of the parameters of which any rank says ``mark``."""
        said = zip(self._watched, zip(*marks, strict=True), strict=True)
        return [watched[3].name for watched, by in said if mark in by]

    def units(self) -> list[int]:
        """The units that are watched: copies of them may hold edits that are not in the shards."""
        return sorted({unit.index for unit, *_ in self._watched})

    def refuse(self) -> list[int]:
        """Raise on every rank if any rank edited anything; else no unit is edited.

        Raises:
            ConfigError: naming the parameters; their shards are unchanged.
        """
        self.note()
        marks = self._marks(by_version=True)
        if not any(map(any, marks)):
            return []
        ranks = [str(self._group.ranks[rank]) for rank, row in enumerate(marks) if any(row)]
        names = [slot.name for _, _, _, slot in self._chosen(marks)]
        raise ConfigError(
            f"rank {', '.join(ranks)} found gathered parameters edited ({', '.join(names[:5])}), "
            "which are freed here: the edit would be lost. Fix: manager.gathered(module, "
            "writeback=True) with the same edit on every rank, or from_rank=0 to take rank 0's"
        )

    def write_back(self, from_rank: int | None) -> list[int]:
        """Put the edits into the shards: every rank's, which must agree, or those of one rank.

        Returns:
            The units that were edited.

        Raises:
            AgreementError: ranks edited different parameters, or gave them different values.
            ConfigError: a parameter was replaced by one of another shape, dtype or device.
        """
        self.note()
        if from_rank is not None:
            self._take_from(from_rank)
        edited = self._chosen(self._marks(by_version=from_rank is None))
        if from_rank is None:
            self._check_equal(edited)
        with torch.no_grad():
            for _, buffer, index, _ in edited:
                part = buffer.shard_range(index)
                buffer.master[part].copy_(buffer.own[part])
        self.written = {id(slot) for _, _, _, slot in edited}
        return sorted({unit.index for unit, *_ in edited})

    def _chosen(self, marks: list[list[int]]) -> list[tuple[Unit, FlatBuffer, int, Slot]]:
        return [
            each
            for each, said in zip(self._watched, zip(*marks, strict=True), strict=True)
            if any(said)
        ]

    def _check_equal(self, edited: list[tuple[Unit, FlatBuffer, int, Slot]]) -> None:
        values = {slot.name: local_values(slot.whole).detach() for _, _, _, slot in edited}
        try:
            check_agreement(values, self._group, "edits in gathered()")
        except AgreementError as error:
            raise AgreementError(
                f"{str(error).split(' Fix: ')[0]} Fix: make the same edit on every rank, or "
                "manager.gathered(module, writeback=True, from_rank=0)"
            ) from error

    def _take_from(self, source: int) -> None:
        """Every whole is that of rank ``source``, bit for bit."""
        for buffer in {id(buffer): buffer for _, buffer, _, _ in self._watched}.values():
            if buffer.is_allocated:
                raw = buffer.whole.data.view(torch.uint8)
            else:
                raw = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=buffer.whole.device)
            # as bytes, of which all but one rank's are zeros: a sum that changes nothing
            mine = raw if self._group.rank == source else torch.zeros_like(raw)
            raw.copy_(all_reduce(mine, self._group.name))


def _version(slot: Slot) -> int:
    return sum(tensor._version for tensor in slot.hidden)
