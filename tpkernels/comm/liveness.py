"""Which ranks of a group are still there, asked only after a collective has failed.

Survivors of a failure all come here within moments of each other (a closed connection cascades),
leave a mark in the rendezvous store and wait briefly for the others' marks. Who is missing is asked
once for a failure: the operations that fail in its wake are told the same at once.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch.distributed as dist

GRACE = 3.0  # seconds between the first survivor's failure and the last one's
REMEMBERED = 60.0  # seconds in which failures of a group are the wake of one failure
_POLL = 0.02  # seconds

_asking = threading.Lock()  # forward and backward run in threads of their own
_answers: dict[str, tuple[list[int], float]] = {}  # group name -> missing, until when that counts


def missing_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of ``group`` that leave no mark within :data:`GRACE`; [] if none is missing.

    Never this rank. Rank 0 alone if the store does not answer, which it hosts.
    """
    with _asking:
        missing, until = _answers.get(group.group_name, ([], 0.0))
        if time.monotonic() >= until:
            missing = _ask(group)
            if missing:  # else all marks are there, and to ask again takes no time
                _answers[group.group_name] = missing, time.monotonic() + REMEMBERED
        return missing


def _ask(group: dist.ProcessGroup) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    prefix, own = f"tpkernels/alive/{group.group_name}/", dist.get_rank()
    unseen = dist.get_process_group_ranks(group)
    seen: list[int] = []
    answered = threading.Event()

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the connection is closed
            store.set(f"{prefix}{own}", "failed")
            end = time.monotonic() + GRACE
            while True:
                for rank in [rank for rank in unseen if store.check([f"{prefix}{rank}"])]:
                    seen.append(rank)
                    unseen.remove(rank)
                if not unseen or time.monotonic() > end:
                    return answered.set()
                time.sleep(_POLL)

    # In a thread: a store whose host is frozen, and not dead, never answers.
    thread = threading.Thread(target=look, daemon=True, name="tpkernels-liveness")
    thread.start()
    thread.join(GRACE + 1)
    if answered.is_set() or 0 in seen:  # rank 0 that left its mark may leave first
        return [rank for rank in unseen if rank != own]
    return [0] if own != 0 else []
