"""Whole state dicts through meshes and sub-groups: who gathers, who keeps, who writes."""

from __future__ import annotations

import os

import pytest
import torch

import tpkernels as tpk
from tests.models.test_round_trip import assert_same, clones
from tests.models.zoo import build
from tests.test_parallelize_mesh import even_llama, split
from tpkernels.checkpoint import group_of
from tpkernels.comm.group import Group


def mesh_task(group, directory):
    """2 x 2: one rank keeps and one rank writes, all take part."""
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    dense = even_llama().eval()
    model = split(even_llama().eval(), mesh)
    whole = tpk.full_state_dict(model, rank0_only=True)
    if group.rank() == 0:
        assert_same(whole, dense.state_dict())
    else:
        assert whole == {}
    model.save_pretrained(directory)
    loaded = type(dense).from_pretrained(directory, dtype=torch.float64)
    assert_same(loaded.state_dict(), dense.state_dict())
    torch.manual_seed(8)
    other = {k: torch.randn_like(v) for k, v in dense.state_dict().items()}
    tpk.load_full_state_dict(model, other)
    assert_same(tpk.full_state_dict(model, cpu=True), other)
    return sorted(os.listdir(directory))


def test_whole_weights_on_2_x_2(pool, tmp_path):
    listings = pool.run(mesh_task, str(tmp_path / "saved"), timeout=60)
    assert "model.safetensors" in listings[0]
    assert all(listing == listings[0] for listing in listings)


def sub_group_task(group, directory):
    """A group that global rank 0 is not in has a first rank of its own (TP-42)."""
    model = build("gpt2", torch.float32)
    before = clones(model.state_dict())
    tpk.parallelize(model, group)
    assert isinstance(group_of(model), Group)
    assert group_of(model.transformer.h[1]).process_group is group
    assert_same(tpk.full_state_dict(model), before)
    kept = tpk.full_state_dict(model, rank0_only=True)
    path = f"{directory}/{group.group_name}"
    model.save_pretrained(path)
    assert os.path.exists(f"{path}/config.json")
    tpk.unparallelize(model)
    assert_same(model.state_dict(), before)
    return len(kept)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3)])
def test_sub_groups_TP_42(pool, tmp_path, ranks):
    first, second = pool.run(sub_group_task, str(tmp_path), ranks=ranks, timeout=60)
    assert first > 0 and second == 0


def dense_task(group):
    """A model that was never split: its own state dict."""
    model = build("bert")
    assert group_of(model) is None
    assert_same(tpk.full_state_dict(model), model.state_dict())
    assert tpk.load_full_state_dict(model, model.state_dict()) == ([], [])
    tpk.unparallelize(model)
    return len(tpk.full_state_dict(model, rank0_only=True))


def test_a_dense_model(pool):
    sizes = pool.run(dense_task, world_size=2)
    assert sizes[0] > 0 and sizes[1] == 0
