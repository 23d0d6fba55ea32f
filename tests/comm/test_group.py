"""``resolve_group``: whatever the caller has in hand becomes a group, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpkernels import init_mesh
from tpkernels.comm.collectives import all_reduce
from tpkernels.comm.group import group_by_name, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.testing import RankError


def test_none_without_a_process_group_is_a_group_of_one():
    group = resolve_group(None)
    assert (group.size, group.rank, group.name, group.ranks) == (1, 0, "", [0])
    assert group_by_name("") is None


@pytest.mark.parametrize("given", ["tp", 2, [0, 1], torch.device("cpu")], ids=repr)
def test_other_types_are_refused(given):
    with pytest.raises(
        ConfigError, match=rf"DeviceMesh, a ProcessGroup or None, got {type(given).__name__}"
    ):
        resolve_group(given)


def facts(group):
    return (group.size, group.rank, group.ranks, group.mesh_dim)


def resolve_all_kinds(group):
    mesh = init_mesh(tp=2, device_type="cpu")
    from_mesh = resolve_group(mesh["tp"])
    strided = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = strided[dist.get_rank() % 2]
    from_strided = resolve_group(mine)
    return {
        "mesh": facts(from_mesh),
        "unnamed mesh": facts(resolve_group(init_device_mesh("cpu", (4,)))),
        "strided": facts(from_strided),
        "none": facts(resolve_group(None)),
        "same": resolve_group(from_mesh) is from_mesh and copy.deepcopy(from_mesh) is from_mesh,
        "by name": group_by_name(from_strided.name) is mine,
        "mesh of it": from_strided.mesh("cpu").get_group().group_name == mine.group_name,
        "sum": all_reduce(torch.tensor([dist.get_rank()]), from_strided.name).item(),
        "shown": repr(from_mesh),
    }


def test_meshes_process_groups_and_none(pool):
    """TP-42: a strided sub-group is that sub-group, never the world."""
    for rank, seen in enumerate(pool.run(resolve_all_kinds)):
        pair, strided = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert seen == {
            "mesh": (2, rank % 2, pair, "tp"),
            "unnamed mesh": (4, rank, [0, 1, 2, 3], "tp"),
            "strided": (2, rank // 2, strided, "tp"),
            "none": (4, rank, [0, 1, 2, 3], "tp"),
            "same": True,
            "by name": True,
            "mesh of it": True,
            "sum": sum(strided),
            "shown": f"Group(tp, rank {rank % 2} of 2, global ranks {pair})",
        }


def group_of_one(group):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    resolved = resolve_group(alone)
    return resolved.name, resolved.size, resolved.ranks


def test_a_process_group_of_one_is_the_group_of_one(pool):
    """TP-54: nothing is sent, and ops get the empty name."""
    assert pool.run(group_of_one) == [("", 1, [rank]) for rank in range(4)]


def two_dimensional(group):
    resolve_group(init_mesh(tp=2, device_type="cpu"))


def test_a_mesh_of_several_dimensions_is_refused_with_the_fix(pool):
    with pytest.raises(RankError, match=r"mesh has 5 dimensions .*mesh\['tp'\]"):
        pool.run(two_dimensional)


def not_a_member(group):
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        return resolve_group(pair).size
    try:
        resolve_group(pair)
    except ConfigError as error:
        return str(error)


def test_a_rank_outside_the_group_is_told(pool):
    told = "this rank is not a member of the given ProcessGroup"
    assert pool.run(not_a_member) == [2, 2, told, told]
