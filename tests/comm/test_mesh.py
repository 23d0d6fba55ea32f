"""``init_mesh``: sizes that fit, names, flattened dimensions, and the world of one."""

from __future__ import annotations

import subprocess
import sys

import pytest
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
        ({"tp": 3}, 8, r"tp=3 needs a multiple of 3 ranks, but the world has 8.*--nproc 3"),
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


def test_a_plain_python_is_a_world_of_one():
    """No torchrun, no variables; and the time limit is the one asked for."""
    code = (
        "import os, tpkernels, torch.distributed as dist\n"
        "for name in ('RANK', 'WORLD_SIZE'): os.environ.pop(name, None)\n"
        "os.environ['TPKERNELS_TIMEOUT'] = '7'\n"
        "mesh = tpkernels.init_mesh(device_type='cpu')\n"
        "assert tuple(mesh.shape) == (1,) * 5, mesh\n"
        "print(dist.get_world_size(), dist.group.WORLD._get_backend_name())\n"
        "print(dist.distributed_c10d._get_default_group()"
        "._get_backend(__import__('torch').device('cpu')).options._timeout.total_seconds())\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "gloo", "7.0"]
    assert "Warning" not in done.stderr
