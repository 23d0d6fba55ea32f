"""A second process group of the same ranks, so that gathers and reductions do not share a queue."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from tpkernels import envs
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError


def separate_reduce_group(group: Group) -> Group:
    """A group of the ranks of ``group`` with a communicator of its own; ``group`` if it is of one.

    Collective over ``group``; where the default process group is NCCL bound to a device
    (``init_process_group(device_id=...)``, as ``init_mesh`` makes it), over all ranks, each of
    which calls it for its own group: communicators are split off the default one.

    Raises:
        ConfigError: the ranks of ``group`` do not ascend, as those of a new group do.
    """
    if group.process_group is None:
        return group
    ranks = group.ranks
    if ranks != sorted(ranks):
        raise ConfigError(
            f"separate_reduce_group=True, but the ranks of {group!r} are not in ascending order, "
            "as those of a second group would be. Fix: separate_reduce_group=False"
        )
    _level_group_counts(group.process_group, ranks)
    made = dist.new_group(
        ranks,
        timeout=datetime.timedelta(seconds=envs.timeout()),
        use_local_synchronization=True,
        group_desc="zero_reduce",
    )
    return Group(made, None, group.mesh_dim)


def _level_group_counts(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Make every rank of ``group`` a member of equally many process groups, of as many as never.

    ``use_local_synchronization`` names a group by its ranks and that number: where it differs,
    ranks would wait for each other under different names; where it was the same before, for a
    group destroyed since, they would meet the addresses that one left in the store.
    """
    mine = len(dist.distributed_c10d._world.pg_names)
    counts: list[int] = [0] * group.size()
    dist.all_gather_object(counts, mine, group=group)
    level = [max(counts)]
    if group.rank() == 0:
        store = dist.distributed_c10d._get_default_store()
        key = f"tpkernels/zero_reduce/{'_'.join(map(str, ranks))}"  # one more than was used last
        used = store.add(key, 0)
        level = [max(max(counts), used)]
        store.add(key, level[0] + 1 - used)
    dist.broadcast_object_list(level, src=ranks[0], group=group)
    for _ in range(level[0] - mine):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
