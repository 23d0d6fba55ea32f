"""Do all ranks perform the same collective? Asked beside each one, before its result is used.

Two blocks of one size look alike to a collective: should one rank skip a block that another runs,
their weights would be mixed and nothing would say so. So each gather and each reduction is
accompanied by 32 bytes that say what it is, compared when it is waited for.

Where sizes differ, a collective that is sent regardless kills the process (Gloo). So one that did
not always follow the ones before it is compared first, and sent then. What a rank expects depends
on collectives that all ranks agreed on, so where ranks part, at least one of them sends nothing.
"""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tpkernels import envs
from tpkernels.comm.collectives import Pending
from tpkernels.comm.exchange import all_gather_bytes_async
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError, TPKernelsWarning

_KINDS = ("gathers", "reduces the gradients of", "begins a forward while it still holds")
GATHER, REDUCE, COMPARE = range(3)
_CONTEXT = 8  # collectives whose sequence says what comes next
_CONTEXTS = 20_000  # remembered at most; then all are learned anew

_What = tuple[int, int, int]  # kind, unit, digest of the details


class _Call:
    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.is_compared = False
        self.error: AgreementError | None = None


class RollCall:
    """Compares what the ranks of ``group`` are about to do.

    Args:
        names: of the units, as ranks say them.
        explain: what this rank can say about a difference in a unit's gradients.
        fills: whether missing gradients count as zero (``find_unused_parameters``).
    """

    def __init__(
        self,
        group: Group,
        names: list[str],
        explain: Callable[[int], str],
        fills: bool = False,
    ) -> None:
        self._group, self._names, self._explain = group, names, explain
        self._fills = fills
        types = (
            {d.type for d in group.process_group._device_types} if group.process_group else set()
        )
        # On CUDA alone the host would have to wait for the device to compare.
        self._can = "cpu" in types
        if group.size > 1 and not self._can and envs.check() != "off":
            warnings.warn(
                f"the backend of {group!r} serves only {', '.join(sorted(types))}: ranks that run "
                "different modules are not found out. Fix: torch.distributed.init_process_group("
                "'cpu:gloo,cuda:nccl'), as tpkernels.init_mesh does",
                TPKernelsWarning,
                stacklevel=5,
            )
        self._started: deque[_Call] = deque()  # and not yet compared, in order
        self._recent: tuple[_What, ...] = ()
        self._followers: dict[tuple[_What, ...], _What | None] = {}  # None: several
        self._broken: str | None = None

    def start(self, kind: int, unit: int, detail: Iterable[int] = ()) -> _Call | None:
        """Say what comes next; ``detail`` must be equal too (which gradients there are).

        Raises:
            AgreementError: the ranks differ; this one must not send.
        """
        if not self._can or envs.check() == "off":
            return None
        self._refuse_if_broken()
        digest = zlib.crc32(repr(tuple(detail)).encode())
        expected = self._expects((kind, unit, digest))
        row = torch.tensor([kind, unit, digest, int(expected)], dtype=torch.int64)
        call = _Call(all_gather_bytes_async(row, self._group.name))
        self._started.append(call)
        if not expected:
            self.finish(call)
        return call

    def finish(self, call: _Call | None) -> None:
        """Compare it, after all that started before it.

        Raises:
            AgreementError: on every rank, naming what each does.
        """
        while call is not None and not call.is_compared:
            self._refuse_if_broken()
            first = self._started.popleft()
            first.is_compared = True
            rows = first.pending.wait()
            try:
                self._compare(rows)
            except AgreementError as error:
                first.error = error
                if bool(rows[:, 3].any()):  # some rank has sent what others will not receive
                    self._broken = str(error)
                raise
        if call is not None and call.error is not None:
            raise call.error

    @property
    def is_broken(self) -> bool:
        """Whether ranks parted and some had sent already: nothing can follow that."""
        return self._broken is not None

    def restart(self) -> None:
        """Begin anew, when what was sent is ignored. Every rank is broken, and does this."""
        self._broken = None
        self._started.clear()
        self._recent = ()
        self._followers.clear()

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise AgreementError(
                f"the ranks of {self._group!r} parted before, and what was sent then keeps them "
                "from going on. Fix: on all ranks manager.reset(), if their groups are Gloo's and "
                f"without replicas, or else start again from a checkpoint. Before: {self._broken}"
            )

    def _expects(self, what: _What) -> bool:
        """Whether ``what`` has always followed the last few collectives; learns it."""
        known = self._followers.get(self._recent, what)
        expected = self._recent in self._followers and known == what
        if len(self._followers) >= _CONTEXTS:
            self._followers.clear()
        self._followers[self._recent] = what if known == what else None
        self._recent = (*self._recent, what)[-_CONTEXT:]
        return expected and envs.check() != "always"

    def _compare(self, rows: Tensor) -> None:
        mine = rows[self._group.rank]
        if bool((rows[:, :3] == mine[:3]).all()):
            return
        said = [
            f"rank {self._group.ranks[rank]} {_KINDS[int(row[0])]} {self._names[int(row[1])]!r}"
            for rank, row in enumerate(rows)
        ]
        name = self._names[int(mine[1])]
        if bool((rows[:, :2] == mine[:2]).all()) and int(mine[0]) != COMPARE:
            fix = (
                "find_unused_parameters=True is set, and counts what a unit that runs lacks as "
                "zero; let every rank call the same units, or put the parameters of all branches "
                "into one unit (units=)"
                if self._fills
                else "let every rank take the same branch, or zero(..., config=ZeroConfig("
                "find_unused_parameters=True)), which counts a missing gradient as zero"
            )
            raise AgreementError(
                f"the ranks of {self._group!r} have gradients for different parameters of "
                f"{name!r}; {self._explain(int(mine[1]))}. Fix: {fix}"
            )
        more = (
            " (find_unused_parameters=True is set, and counts what a unit that runs lacks as zero; "
            "it does not run a unit that others run)"
            if self._fills
            else "; where a parameter has a gradient on some ranks only, zero(..., "
            "config=ZeroConfig(find_unused_parameters=True))"
        )
        raise AgreementError(
            f"the ranks of {self._group!r} run different modules: {', '.join(said)}; "
            f"{self._explain(int(mine[1]))}. Fix: let every rank call the same modules in the same "
            "order (with an empty or masked input where it has none) and compute its loss from the "
            "same ones (times 0 where it does not count), or put the parameters of the whole "
            f"branch into one unit (units=){more}"
        )
