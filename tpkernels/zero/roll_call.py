"""Do all ranks perform the same collective? Asked beside each one, before its result is used.

Two blocks of one size look alike to a collective: should one rank skip a block that another runs,
their weights would be mixed and nothing would say so. So each gather and each reduction is
accompanied by 32 bytes that say what it is, compared when it is waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tpkernels import envs
from tpkernels.comm.collectives import Pending, all_gather_bytes_async
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError

_KINDS = ("gathers", "reduces the gradients of")
GATHER, REDUCE = range(2)


class RollCall:
    """Compares what the ranks of ``group`` are about to do.

    Args:
        names: of the units, as ranks say them.
        explain: what this rank can say about a difference in a unit's gradients.
    """

    def __init__(self, group: Group, names: list[str], explain: Callable[[int], str]) -> None:
        self._group, self._names, self._explain = group, names, explain
        types = (
            {d.type for d in group.process_group._device_types} if group.process_group else set()
        )
        # On CUDA alone the host would have to wait for the device to compare.
        self._can = "cpu" in types

    def start(self, kind: int, unit: int, detail: Iterable[int] = ()) -> Pending | None:
        """Say what comes next; ``detail`` must be equal too (which gradients there are)."""
        if not self._can or envs.check() == "off":
            return None
        digest = zlib.crc32(repr(tuple(detail)).encode())
        row = torch.tensor([kind, unit, digest, 0], dtype=torch.int64)
        return all_gather_bytes_async(row, self._group.name)

    def finish(self, pending: Pending | None) -> None:
        """Compare.

        Raises:
            AgreementError: on every rank, naming what each does.
        """
        if pending is None:
            return
        rows: Tensor = pending.wait()
        mine = rows[self._group.rank]
        if bool((rows == mine).all()):
            return
        said = [
            f"rank {self._group.ranks[rank]} {_KINDS[int(row[0])]} {self._names[int(row[1])]!r}"
            for rank, row in enumerate(rows)
        ]
        name = self._names[int(mine[1])]
        if bool((rows[:, :2] == mine[:2]).all()):
            raise AgreementError(
                f"the ranks of {self._group!r} have gradients for different parameters of "
                f"{name!r}; {self._explain(int(mine[1]))}. Fix: let every rank take "
                "the same branch, or zero(..., config=ZeroConfig(find_unused_parameters="
                "True)), which counts a missing gradient as zero"
            )
        raise AgreementError(
            f"the ranks of {self._group!r} run different modules: {', '.join(said)}; "
            f"{self._explain(int(mine[1]))}. Fix: let every rank call the same modules in the same "
            "order (with an empty or masked input where it has none), or make the whole branch one "
            "unit"
        )
