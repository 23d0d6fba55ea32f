"""Making and destroying groups on ``tpshm``: who serves them and why, and that nothing is left."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
import time
import tomllib
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels import doctor, native
from tpkernels.comm import peers, tpshm
from tpkernels.comm.peers import Meeting, make_peers
from tpkernels.errors import CommunicationError


def mappings():
    with open("/proc/self/maps") as lines:
        return sum("memfd:tpkernels" in line for line in lines)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def make_and_destroy(group, rounds):
    seen = []
    for _ in range(rounds):
        made = dist.new_group(backend="tpshm")
        dist.all_reduce(torch.ones(100_000), group=made)
        assert mappings() > 0
        dist.destroy_process_group(made)
        del made
        gc.collect()
        seen.append((mappings(), descriptors()))
    return seen


def test_nothing_is_left_of_destroyed_groups(pools):
    """TP-50: memory and descriptors, over 50 groups."""
    for seen in pools(2).run(make_and_destroy, 50, timeout=60):
        assert [maps for maps, _ in seen] == [0] * 50
        assert seen[-1][1] <= seen[4][1]


def leave_alone(group):
    """One rank destroys the group, in no agreement with the other."""
    made = dist.new_group(backend="tpshm")
    rank = group.rank()
    dist.all_reduce(torch.ones(4), group=made)
    began = time.monotonic()
    if rank == 0:
        dist.destroy_process_group(made)
        told = ""
        try:
            made._get_backend(torch.device("cpu")).barrier().wait()
        except (dist.DistBackendError, RuntimeError) as error:
            told = str(error)
    else:
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(4), group=made)
        told = str(caught.value)
    return told, time.monotonic() - began


def test_a_rank_that_leaves_alone_waits_for_nobody(pools):
    """TP-50: no collective where a group goes; who still uses it is told."""
    first, second = pools(2).run(leave_alone)
    assert first[1] < 1
    assert "rank 0" in second[0] and "has left the group" in second[0]


def leave_pending(group):
    """Destroys the group while an operation waits for a rank that does not come."""
    made = dist.new_group(backend="tpshm")
    told = ""
    began = time.monotonic()
    if group.rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=made, async_op=True)
        dist.destroy_process_group(made)
        try:
            work.wait()
        except dist.DistBackendError as error:
            told = str(error)
    seconds = time.monotonic() - began
    dist.barrier(group)
    return told, seconds


def test_what_is_under_way_when_a_group_goes_ends(pools):
    """TP-50: it neither hangs nor waits for the time limit."""
    (told, seconds), _ = pools(2).run(leave_pending)
    assert "operations under way" in told and "wait()" in told
    assert 1 < seconds < 8


def served(made):
    """(backend, reason, warnings given, a sum over the group)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = made()
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    return *tpshm.served_by(group), [str(each.message) for each in caught], x.tolist()


def new_group():
    tpshm._warn.cache_clear()
    return dist.new_group(backend="tpshm")


def without_native_code(group):
    if group.rank() == 1:
        os.environ["TPKERNELS_NATIVE"] = "0"
    return served(new_group)


def test_one_rank_without_native_code_takes_all_to_gloo(pools):
    first, second = pools(2).run(without_native_code)
    for backend, reason, _, sums in (first, second):
        assert backend == "gloo" and sums == [2.0, 2.0]
        assert reason == "rank 1 has no native code: TPKERNELS_NATIVE=0"
    assert first[2] == [f"tpshm cannot serve, the group runs on Gloo: {first[1]}"]
    assert second[2] == []


def test_switched_off_everywhere_is_no_surprise(pools):
    for seen in pools(2).run(served_new_group, env={"TPKERNELS_NATIVE": "0"}):
        assert seen == ("gloo", "TPKERNELS_NATIVE=0", [], [2.0, 2.0])


def served_new_group(group):
    return served(new_group)


def on_two_hosts(group):
    host, peers._host = peers._host, lambda: f"host {group.rank()}"
    try:
        return served(new_group)
    finally:
        peers._host = host


def test_ranks_of_two_hosts_run_on_gloo_and_are_not_warned(pools):
    for seen in pools(2).run(on_two_hosts):
        assert seen == ("gloo", "its ranks share no host", [], [2.0, 2.0])


def without_memory(group, refused):
    module = native.load()
    real = module.PeerMemory

    class Refusing:
        create, take = real.create, real.take

    def refuse(*_):
        raise CommunicationError("shared memory: no room")

    if refused == "create" or group.rank() == 1:
        setattr(Refusing, refused, refuse)
    module.PeerMemory = Refusing
    peers._HAND_OVER_SECONDS = 0.5
    try:
        return served(new_group)
    finally:
        module.PeerMemory = real
        importlib.reload(peers)


@pytest.mark.parametrize(("refused", "rank"), [("create", 0), ("take", 1)])
def test_memory_that_one_rank_cannot_have(pools, refused, rank):
    first, second = pools(2).run(without_memory, refused)
    for backend, reason, _, sums in (first, second):
        assert backend == "gloo" and sums == [2.0, 2.0]
        assert "shared memory: no room" in reason or "0 of 1 ranks came" in reason
    assert len(first[2]) == 1 and not second[2]


def other_protocol(group):
    module = native.load()
    if group.rank() == 1:
        module.protocol_version += 1
    try:
        return served(new_group)
    finally:
        if group.rank() == 1:
            module.protocol_version -= 1


def test_builds_that_do_not_understand_each_other(pools):
    for backend, reason, _, _ in pools(2).run(other_protocol):
        assert backend == "gloo" and "different protocols" in reason and "rank 1: " in reason


def test_a_rank_that_does_not_come_is_named():
    meeting = Meeting(dist.HashStore(), 0, 3, "g", 0.3)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=r"no sign of rank 1, 2 \(of the group\) within"):
        make_peers(meeting, [0, 1, 2], 0.3)
    assert time.monotonic() - began < 5


def test_a_store_may_serve_again():
    """A group of the same name, in a store that remembers the one before."""
    store = dist.HashStore()
    assert [Meeting(store, 0, 1, "g", 1).prefix for _ in range(2)] == ["tpshm/0", "tpshm/1"]


def served_pairs(group):
    made = dist.new_group(backend="tpshm", timeout=dist.distributed_c10d.default_pg_timeout)
    limit = made._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    os.environ["TPKERNELS_TIMEOUT"] = "7"
    short = dist.new_group(backend="tpshm")
    gloo = dist.new_group(backend="gloo")
    return (
        tpshm.served_by(made),
        limit,
        short._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        tpshm.served_by(gloo),
        made._get_backend(torch.device("cpu")).name(),
    )


def test_who_serves_and_how_long(pools):
    assert (
        pools(2).run(served_pairs)
        == [
            (
                ("tpshm", "its ranks share one host"),
                300.0,
                7.0,
                ("gloo", "it was made with cpu:gloo,cuda:gloo"),
                "tpshm",
            )
        ]
        * 2
    )


def split(group):
    made = dist.new_group(backend="tpshm")
    part = made.split_group([group.rank()], group_name=f"part {group.rank()}", group_desc="part")
    x = torch.ones(3)
    part.allreduce([x]).wait()
    return part.size(), part._get_backend(torch.device("cpu")).name(), x.tolist()


def test_a_group_that_is_split_off(pools):
    """As ``DeviceMesh`` does beside NCCL: it runs on Gloo, which says so."""
    assert pools(2).run(split) == [(1, "gloo", [1.0] * 3)] * 2


def python(code, *words, **env):
    """Its output; warnings are errors."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout.split()


def has_entry_point():
    return bool(metadata.entry_points(group="torch.backends", name="tpkernels"))


KNOWN = "print('tpshm' in torch.distributed.Backend.backend_list)"


def test_the_entry_point_names_what_there_is():
    project = Path(__file__).parents[2] / "pyproject.toml"
    (value,) = tomllib.loads(project.read_text())["project"]["entry-points"][
        "torch.backends"
    ].values()
    assert metadata.EntryPoint("tpkernels", value, "torch.backends").load() is tpshm.register


@pytest.mark.parametrize("imports", ["torch", "tpkernels, torch"])
def test_import_makes_it_known(imports):
    if not has_entry_point():
        pytest.skip("the package is not installed: no entry point")
    assert python(f"import {imports}; {KNOWN}") == ["True"]


@pytest.mark.parametrize(
    ("code", "known"),
    [
        (f"import torch; {KNOWN}; import tpkernels; {KNOWN}", ["False", "True"]),
        (f"import tpkernels, torch; tpkernels.init_mesh; {KNOWN}", ["True"]),
    ],
)
def test_without_the_entry_point(code, known):
    """As where PyTorch is told not to load plugins: our own import does it."""
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == known


def test_a_backend_by_device_is_the_groups_default():
    """PyTorch forgets it once a plugin is registered: it would warn when the group is destroyed."""
    code = """
        import torch, torch.distributed as dist, tpkernels
        for backend in ("tpshm", "cpu:tpshm", "cpu:gloo"):
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            print(dist.group.WORLD.name())
            dist.destroy_process_group()
    """
    assert python(code) == ["custom", "custom", "gloo"]


def test_register_again_changes_nothing():
    tpshm.register()
    before = dist.Backend._plugins["TPSHM"], dist.distributed_c10d._new_process_group_helper
    tpshm.register()
    after = dist.Backend._plugins["TPSHM"], dist.distributed_c10d._new_process_group_helper
    assert before == after
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


def test_doctor_says_what_it_does(monkeypatch):
    (found,) = [each for each in doctor._torch() if each.topic == "tpshm"]
    assert found.state.startswith("available: ") and "send and receive" in found.state
    monkeypatch.setenv("TPKERNELS_NATIVE", "0")
    (found,) = [each for each in doctor._torch() if each.topic == "tpshm"]
    assert found.state.startswith("not available: no native code: CPU groups run on Gloo")
    assert found.fix == "unset TPKERNELS_NATIVE"
