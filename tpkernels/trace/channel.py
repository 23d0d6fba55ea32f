"""How ranks that record reach each other: through the rendezvous store, never by collectives.

A store works while the group's own backend is busy, broken or destroyed, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tpkernels import envs
from tpkernels.comm.group import Group
from tpkernels.errors import CommunicationError

_SLICE = timedelta(milliseconds=500)  # of a wait: then Ctrl-C and failures are looked for
_PIECE = 4 << 20  # bytes a key: a store refuses values of more than 8 MiB
_meetings: Counter[tuple[int, ...]] = Counter()  # of the same ranks, so far; the same on all


class Channel:
    """Keys that the ranks of one recording share.

    Args:
        store: ours alone: a wait holds it.
        seconds: that one wait may take; None: ``TPKERNELS_TIMEOUT``.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, seconds: float | None = None
    ) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size
        self._seconds = seconds

    @staticmethod
    def of(group: Group) -> Channel:
        """Of the ranks of a group; collective in that each call meets those of the others."""
        ranks = tuple(group.ranks)
        _meetings[ranks] += 1
        name = f"tpkernels/trace/{'-'.join(map(str, ranks))}/{_meetings[ranks]}"
        store: Any = dist.distributed_c10d._get_default_store()
        return Channel(dist.PrefixStore(name, store.clone()), group.rank, group.size)

    @staticmethod
    def of_launcher() -> Channel | None:
        """Of all ranks that ``torchrun`` started, by the store that it hosts; None: it has none."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        world = int(os.environ["WORLD_SIZE"])
        prefix = dist.PrefixStore(f"tpkernels/trace/launcher/{attempt}", store)
        return Channel(prefix, int(os.environ["RANK"]), world)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> str:
        return self._store.get(key).decode()

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def wait(self, key: str, rank: int) -> None:
        """Until ``rank`` has set ``key``.

        Raises:
            CommunicationError: it has not within the time limit, or said that it failed.
        """
        limit = envs.timeout() if self._seconds is None else self._seconds
        end = time.monotonic() + limit
        while True:
            try:
                left = timedelta(seconds=max(0.001, end - time.monotonic()))
                return self._store.wait([key], min(_SLICE, left))
            except dist.DistStoreError as error:
                if self._store.check([f"failed/{rank}"]):
                    raise CommunicationError(
                        f"trace: rank {rank} left its recording early: {self.get(f'failed/{rank}')}"
                    ) from None
                if time.monotonic() >= end:
                    raise CommunicationError(
                        f"trace: rank {rank} did not come within {limit:g} s "
                        "(TPKERNELS_TIMEOUT); recording begins and ends on all ranks together"
                    ) from error

    def fail(self, reason: str) -> None:
        """Tell whoever waits for this rank that it will not come."""
        with contextlib.suppress(RuntimeError):  # whoever hosts the store has gone
            self.set(f"failed/{self.rank}", reason)

    def send(self, name: str, text: str) -> None:
        """Some megabytes, for rank 0 to :meth:`receive`."""
        packed = zlib.compress(text.encode(), 1)
        pieces = [packed[at : at + _PIECE] for at in range(0, len(packed), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{name}/{self.rank}/{number}", piece)
        self.set(f"{name}/{self.rank}", str(len(pieces)))

    def receive(self, name: str, rank: int) -> str:
        """What ``rank`` sends; its keys are deleted."""
        self.wait(f"{name}/{rank}", rank)
        keys = [f"{name}/{rank}/{number}" for number in range(int(self.get(f"{name}/{rank}")))]
        packed = b"".join(self._store.get(key) for key in keys)
        for key in keys:
            self.delete(key)
        return zlib.decompress(packed).decode()
