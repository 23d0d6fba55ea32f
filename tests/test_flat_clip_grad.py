"""``clip_grad_norm_`` of flat shards: the norm and the gradients of the dense model."""

from __future__ import annotations

import math
import types
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels as tpk
from tests.flat_sharding import OddShapes, shard_flat_
from tests.test_clip_grad import ORDERS
from tests.test_flat_checkpoint import two_levels
from tpkernels import clip_grad
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError
from tpkernels.shard_spec import attach_spec
from tpkernels.testing import count_collectives


def own_part(spec, whole):
    """This rank's elements of ``whole``, through all levels."""
    local = torch.empty(spec.local_shape, dtype=whole.dtype)
    for box in spec.boxes():
        box.view(local).copy_(box.of(whole))
    return local


def give_gradients(model, reference, seed, wrapped):
    """The same random gradients to both; parts of them to ``model``."""
    generator = torch.Generator().manual_seed(seed)
    for parameter, dense in zip(model.parameters(), reference.parameters(), strict=True):
        if dense.requires_grad:
            dense.grad = torch.randn(dense.shape, generator=generator, dtype=dense.dtype)
            own = own_part(parameter.spec, dense.grad)
            parameter.grad = ChunkedTensor.wrap(own, parameter.spec) if wrapped else own


def check_clipped(model, reference, max_norm, order):
    total = tpk.clip_grad_norm_(model, max_norm, order)
    filled = [p for p in reference.parameters() if p.numel()]  # torch has no maximum of nothing
    expected = nn.utils.clip_grad_norm_(filled, max_norm, order)
    torch.testing.assert_close(total.double(), expected.double(), rtol=1e-12, atol=0)
    for parameter, dense in zip(model.parameters(), reference.parameters(), strict=True):
        if dense.grad is not None:
            own = own_part(parameter.spec, dense.grad)
            torch.testing.assert_close(parameter.grad.plain(), own, rtol=1e-12, atol=0)
    return total


def sharded(group, order, wrapped):
    model = shard_flat_(OddShapes(torch.float64), group)
    reference = OddShapes(torch.float64)
    give_gradients(model, reference, 1, wrapped)
    with count_collectives() as counts:
        total = check_clipped(model, reference, 0.5, order)
    assert counts["all_reduce"].calls == (group.size() > 1)
    return total


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_sharded_over_dp(pool, order, wrapped):
    for world in (1, 3):
        totals = pool.run(sharded, order, wrapped, world_size=world)
        assert all(torch.equal(total, totals[0]) for total in totals)


def forget_the_group_of_copies_(model):
    """The model's group is then asked, as for a head split that does not know its own."""
    spec = model.norm.spec
    attach_spec(model.norm, replace(spec, within=replace(spec.within, group_name="")))


def two_by_two(group, order, seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model, reference = two_levels(seed, mesh).double(), two_levels(seed).double()
    if seed == 1:
        forget_the_group_of_copies_(model)
    give_gradients(model, reference, seed, wrapped=False)
    with count_collectives() as counts:
        total = check_clipped(model, reference, 0.5, order)
    assert counts["all_reduce"].calls == 3  # over dp_shard and tp, and for the scalar over dp_shard
    give_gradients(model, reference, seed, wrapped=True)
    if seed == 1:
        with pytest.raises(ConfigError, match=r"group has 4 ranks, but .* is split over 2"):
            tpk.clip_grad_norm_(list(model.parameters()), 1e9, order)
        return total
    bare = tpk.clip_grad_norm_(list(model.parameters()), 1e9, order)  # they know their groups
    assert torch.equal(bare, total)
    return total


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_split_over_tp_then_sharded_over_dp(pool, order):
    """Z-44, Z-45: a key head on both tp ranks and a norm that tp copies count once, however cut."""
    for seed in (0, 1):
        totals = pool.run(two_by_two, order, seed)
        assert all(torch.equal(total, totals[0]) for total in totals)


def two_replicas(group):
    """HSDP: both replicas hold the same gradients, which count once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = shard_flat_(OddShapes(torch.float64), mesh["dp_shard"].get_group())
    reference = OddShapes(torch.float64)
    give_gradients(model, reference, 3, wrapped=False)
    return check_clipped(model, reference, 0.5, 2.0)


def test_replicas_count_once(pool):
    totals = pool.run(two_replicas)
    assert all(torch.equal(total, totals[0]) for total in totals)


def gradients_here_and_there(group, used):
    """Only ranks that hold some of a parameter have its gradient; ``used``: whether any has."""
    model = shard_flat_(OddShapes(torch.float64), group)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.numel() and used:
            parameter.grad = torch.ones(parameter.shape, dtype=torch.float64)
    total = tpk.clip_grad_norm_(model, 1e9)
    assert all(
        (p.grad is not None) == bool(p.numel() and p.requires_grad and used)
        for p in model.parameters()
    )
    return total.item()


def test_a_rank_without_a_gradient_takes_part(pool):
    """Else the others would wait for it."""
    count = sum(p.numel() for p in OddShapes().parameters() if p.requires_grad)
    assert pool.run(gradients_here_and_there, True, world_size=4) == pytest.approx(
        [math.sqrt(count)] * 4
    )
    assert pool.run(gradients_here_and_there, False, world_size=2) == [0.0] * 2


def test_offloaded_gradients_are_reduced_where_the_group_can_Z_53(monkeypatch):
    cpu = torch.device("cpu")

    def group_on(*kinds):
        group = types.SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
        monkeypatch.setattr(clip_grad, "group_by_name", lambda name: group if name else None)

    group_on("cpu", "cuda")
    assert clip_grad._reducible_device(cpu, ("7",)) == cpu
    group_on("cuda")
    assert clip_grad._reducible_device(cpu, ("",)) == cpu  # a group of one sends nothing
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert clip_grad._reducible_device(cpu, ("7",)) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"gradients are on 'cpu', but .* only on \['cuda'\]. Fix"
    ):
        clip_grad._reducible_device(cpu, ("7",))


def test_bounds_and_orders_that_are_none_are_refused():
    """A negative bound would turn the gradients round."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for bound in (-1.0, 0, math.nan, True, "1", None, torch.ones(1)):
        with pytest.raises(ConfigError, match=r"max_norm=.* must be a number > 0\. Fix: "):
            tpk.clip_grad_norm_([parameter], bound)
    for order in (0, -2.0, math.nan, True, "inf", None):
        with pytest.raises(ConfigError, match=r"norm_type=.* must be at least 1, or math\.inf"):
            tpk.clip_grad_norm_([parameter], 1.0, order)
    assert torch.equal(parameter.grad, torch.ones(2))
    assert tpk.clip_grad_norm_([parameter], math.inf, 1) == 2
    assert torch.equal(parameter.grad, torch.ones(2))
