"""Which ranks of a group are still there, asked only after a collective has failed.

Survivors of a failure all come here within moments of each other (a closed connection cascades),
leave a mark in the rendezvous store and wait briefly for the others' marks.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

GRACE = datetime.timedelta(seconds=3)  # between the first survivor's failure and the last one's


def missing_ranks(group: dist.ProcessGroup) -> list[int]:
    """Global ranks of ``group`` that leave no mark within :data:`GRACE`; [] if unknown."""
    try:
        store = dist.distributed_c10d._get_default_store()
        prefix = f"tpkernels/alive/{group.group_name}/"
        members = dist.get_process_group_ranks(group)
        store.set(f"{prefix}{dist.get_rank()}", "failed")
        missing = []
        for rank in members:
            try:
                store.wait([f"{prefix}{rank}"], GRACE)
            except RuntimeError:
                missing.append(rank)
        return missing
    except RuntimeError:
        # The store itself was on the rank that is gone: rank 0 hosts it.
        return [0] if dist.get_rank() != 0 else []
