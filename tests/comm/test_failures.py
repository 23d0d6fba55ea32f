"""A rank that dies, is late or does something else: an error that says so, never a hang."""

from __future__ import annotations

import datetime
import gc
import os
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from tpkernels import init_mesh
from tpkernels.comm import collectives
from tpkernels.comm.group import resolve_group
from tpkernels.errors import CommunicationError
from tpkernels.testing import RankError, rank_pool


def die_in_a_step(group, rank):
    name = resolve_group(group).name
    collectives.all_reduce(torch.ones(4), name)
    if group.rank() == rank:
        os._exit(3)
    collectives.all_reduce(torch.ones(4), name)


def test_a_killed_rank_is_named_by_the_others(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivors speak
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pools(2).run(die_in_a_step, 1)
    assert time.monotonic() - start < 30
    (survivor,) = [failure for failure in caught.value.failures if failure.rank == 0]
    assert isinstance(survivor.exception, CommunicationError)
    assert "all_reduce on group" in survivor.message
    assert "no sign of life from rank 1" in survivor.message


def limited_group():
    members = list(range(dist.get_world_size()))
    return dist.new_group(members, timeout=datetime.timedelta(seconds=1)).group_name


def different_then_late(group):
    told = []
    for operation in ("different", "late"):
        name = limited_group()
        try:
            if dist.get_rank() == 0:
                collectives.all_reduce_async(torch.ones(4), name).wait()
            elif operation == "different":
                collectives.all_gather(torch.ones(4), [4] * dist.get_world_size(), 0, name)
            told.append("no error")
        except CommunicationError as error:
            told.append(str(error))
    return told


def test_a_late_rank_is_told_from_one_that_does_something_else(pools):
    first, second = pools(2).run(different_then_late)
    for rank, told in enumerate((first[0], second[0])):
        assert f"global ranks [0, 1]) failed on rank {rank}: all ranks are alive" in told
        assert "different operations" in told and "TPKERNELS_TIMEOUT" in told
    assert "failed on rank 0: no sign of life from rank 1" in first[1]
    assert second[1] == "no error"


def different_shapes(group):
    collectives.all_reduce(torch.ones(4 + 1000 * group.rank()), resolve_group(group).name)


def test_different_shapes_end_the_run(pools):
    """Gloo itself ends the process; the agreement check is there to speak first."""
    start = time.monotonic()
    with pytest.raises(RankError):
        pools(2).run(different_shapes)
    assert time.monotonic() - start < 30


def test_the_rank_that_hosts_the_rendezvous_may_die_too(tmp_path):
    script = tmp_path / "three_ranks.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, torch, tpkernels
            from tpkernels.comm import collectives
            name = tpkernels.init_mesh(tp=3, device_type="cpu")["tp"].get_group().group_name
            collectives.all_reduce(torch.ones(2), name)
            if os.environ["RANK"] == "0":
                os._exit(0)
            collectives.all_reduce(torch.ones(2), name)
            """
        )
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TPKERNELS_TIMEOUT": "20",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1, 1]
    for error in errors[1:]:  # and not of the other survivor, nor of the one who speaks
        assert "CommunicationError" in error
        assert re.search(r"rank 0 \(process \d+\) is gone: its process has ended", error)


def groups_at_once(group):
    """Disjoint pairs, strided pairs and the world, interleaved: each call in its own group."""
    mesh = init_mesh(dp_shard=2, tp=2, device_type="cpu")
    names = {
        "pair": resolve_group(mesh["tp"]).name,
        "strided": resolve_group(mesh["dp_shard"]).name,
        "world": resolve_group(group).name,
    }
    rank, seen = float(group.rank()), []
    for step in range(5):
        pending = {
            key: collectives.all_reduce_async(torch.tensor([10 * step + rank]), name)
            for key, name in sorted(names.items(), key=lambda item: (step, item[0]))
        }
        seen.append({key: each.wait().item() for key, each in reversed(pending.items())})
    return seen


def test_sub_groups_disjoint_and_overlapping(pool):
    """TP-42, TP-44: a sub-group's collective is the sub-group's alone."""
    for rank, seen in enumerate(pool.run(groups_at_once)):
        for step, sums in enumerate(seen):
            pair = sum(10 * step + r for r in (rank // 2 * 2, rank // 2 * 2 + 1))
            strided = sum(10 * step + r for r in (rank % 2, rank % 2 + 2))
            assert sums == {"pair": pair, "strided": strided, "world": 40 * step + 6}


def one_pair_works_alone(group):
    mesh = init_mesh(dp_shard=2, tp=2, device_type="cpu")
    if group.rank() < 2:  # the other pair does nothing meanwhile
        return collectives.all_reduce(torch.ones(1), resolve_group(mesh["tp"]).name).item()


def test_a_sub_group_needs_no_other_rank(pool):
    """TP-42."""
    assert pool.run(one_pair_works_alone) == [2, 2, None, None]


def delete_on_one_rank(group):
    held = [resolve_group(group), resolve_group(init_mesh(tp=4, device_type="cpu")["tp"])]
    work = collectives.all_reduce_async(torch.ones(3), held[0].name)
    pending = [work]
    work.wait()
    if group.rank() == 0:
        del held, pending, work
        gc.collect()
    return collectives.all_reduce(torch.ones(1), resolve_group(group).name).item()


def test_no_collective_in_a_destructor(pool):
    """TP-50: objects dropped on one rank only leave the ranks in step."""
    assert pool.run(delete_on_one_rank) == [4.0] * 4
