"""``init_mesh``: sizes that fit, names, flattened dimensions, and the world of one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tpkernels import init_mesh
from tpkernels.comm.mesh import AXES, _fill
from tpkernels.errors import ConfigError
from tpkernels.testing import RankError


def sizes(**given):
    return {"pp": 1, "dp_replicate": 1, "dp_shard": None, "cp": 1, "tp": 1, **given}


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ({"tp": 2}, 8, (1, 1, 4, 1, 2)),
        ({"tp": 2}, 2, (1, 1, 1, 1, 2)),
        ({}, 3, (1, 1, 3, 1, 1)),
        ({"pp": 2, "dp_replicate": 2, "cp": 3, "tp": 2}, 48, (2, 2, 2, 3, 2)),
        ({"dp_shard": 2, "tp": None}, 8, (1, 1, 2, 1, 4)),
        ({"dp_shard": 1, "tp": 4}, 4, (1, 1, 1, 1, 4)),
    ],
)
def test_the_axis_that_is_none_is_filled(given, world, expected):
    assert tuple(_fill(sizes(**given), world).values()) == expected


@pytest.mark.parametrize(
    ("given", "world", "message"),
    [
        ({"tp": 3}, 8, r"tp=3 needs a multiple of 3 ranks, but the world has 8.*start 3 ranks"),
        ({"tp": 3}, 8, r"\(torchrun --nproc-per-node 3\) or choose sizes whose product divides 8"),
        ({"tp": 16}, 8, r"tp=16 needs a multiple of 16 ranks"),
        ({"dp_shard": 2, "tp": 2}, 8, r"dp_shard=2 x tp=2 needs 4 ranks.*has 8.*product is 8"),
        ({"dp_shard": 1}, 2, r"all axes 1 needs 1 ranks, but the world has 2"),
        ({"tp": None}, 8, r"dp_shard and tp are None; at most one axis"),
        ({"tp": 0}, 8, r"tp=0 must be a whole number of ranks, at least 1"),
        ({"cp": -1}, 8, r"cp=-1 must be a whole number"),
        ({"pp": 2.0}, 8, r"pp=2\.0 must be a whole number"),
        ({"tp": True}, 8, r"tp=True must be a whole number"),
        ({"tp": "2"}, 8, r"tp='2' must be a whole number"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, world, message):
    with pytest.raises(ConfigError, match=message):
        _fill(sizes(**given), world)


def look_at_mesh(group):
    mesh = init_mesh(tp=2, device_type="cpu")
    twice = init_mesh(dp_shard=2, cp=2, device_type="cpu")
    replicated = init_mesh(dp_replicate=2, tp=2, device_type="cpu")
    return {
        "names": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "tp": dist.get_process_group_ranks(mesh["tp"].get_group()),
        "dp": dist.get_process_group_ranks(mesh["dp"].get_group()),
        "dp_shard": dist.get_process_group_ranks(mesh["dp_shard"].get_group()),
        "replicated dp": dist.get_process_group_ranks(replicated["dp"].get_group()),
        "dp_shard_cp": dist.get_process_group_ranks(twice["dp_shard_cp"].get_group()),
    }


def test_axes_and_flattened_axes_on_four_ranks(pool):
    for rank, seen in enumerate(pool.run(look_at_mesh)):
        pair, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert seen == {
            "names": AXES,
            "shape": (1, 1, 2, 1, 2),
            "tp": pair,
            "dp": column,
            "dp_shard": column,
            "replicated dp": column,
            "dp_shard_cp": [0, 1, 2, 3],
        }


def bad_mesh(group):
    init_mesh(tp=3, device_type="cpu")


def test_a_world_that_does_not_fit_raises_on_every_rank(pool):
    with pytest.raises(RankError, match="tp=3 needs a multiple of 3 ranks") as caught:
        pool.run(bad_mesh)
    assert len(caught.value.failures) == 4


@pytest.mark.parametrize(
    ("device_type", "message"),
    [
        ("cudaa", r"device_type='cudaa' is not known; allowed: 'cuda', 'cpu'\. Fix: "),
        (3, r"device_type=3 is not known"),
        ("cuda", r"device_type='cuda', but torch .* finds no CUDA device\. Fix: device_type='cpu'"),
    ],
)
def test_a_device_type_that_cannot_be_had(monkeypatch, device_type, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        init_mesh(device_type=device_type)
    assert not dist.is_initialized()


def limits_of(**sizes):
    """The time limit in seconds of each dimension's group, in a world that the caller started."""
    mesh = init_mesh(**sizes, device_type="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flattened dimensions by name
        groups = [mesh[name].get_group() for name in (*AXES, "dp", "dp_shard_cp")]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def limited_mesh(group):
    before = limits_of(dp_shard=2, tp=2)
    os.environ["TPKERNELS_TIMEOUT"] = "2"
    try:
        mesh = init_mesh(dp_shard=2, tp=2, device_type="cpu")
        limits = limits_of(dp_shard=2, tp=2)
    finally:
        del os.environ["TPKERNELS_TIMEOUT"]
    dist.barrier(group)
    start = time.monotonic()
    if group.rank() % 2 == 0:  # the other rank of each pair is late
        try:
            dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())
        except RuntimeError:
            waited = time.monotonic() - start
        else:
            raise AssertionError("nobody came, and it did not raise")
    else:
        waited = 2.0
    dist.barrier(group)
    return before, limits, waited


def test_the_time_limit_holds_in_a_world_that_was_started_before(pool):
    for before, limits, waited in pool.run(limited_mesh):
        assert min(before) > 60
        assert limits == [2.0] * 7
        assert 1.5 < waited < 20


def test_a_plain_python_is_a_world_of_one():
    """No torchrun, no variables; and the time limit is the one asked for."""
    code = (
        "import os, tpkernels, torch.distributed as dist\n"
        "for name in ('RANK', 'WORLD_SIZE'): os.environ.pop(name, None)\n"
        "os.environ['TPKERNELS_TIMEOUT'] = '7'\n"
        "mesh = tpkernels.init_mesh(device_type='cpu')\n"
        "assert tuple(mesh.shape) == (1,) * 5, mesh\n"
        "print(dist.get_world_size(), dist.get_backend())\n"
        "print(dist.distributed_c10d._get_default_group()"
        "._get_backend(__import__('torch').device('cpu')).options._timeout.total_seconds())\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "tpshm", "7.0"]
    assert "Warning" not in done.stderr
