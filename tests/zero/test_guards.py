"""Uses that a sharded model cannot serve are refused, not answered with wrong numbers."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import tpkernels as tpk
from tests.zero import samples
from tests.zero.checkpoints import held, train
from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError


def refused(group):
    world = group.size()
    model, optimizer = held(group, "plain", 3)
    for copier in (copy.deepcopy, pickle.dumps):
        for module in (model, model.blocks[0], model.blocks[0].fc1):
            with pytest.raises(ShardedSaveError, match=r"Fix: torch.save\(tpkernels.full_state"):
                copier(module)
    with pytest.raises(ConfigError, match=r"would overwrite every rank's shards.*Fix: leave it"):
        nn.parallel.DistributedDataParallel(model, process_group=group)
    with pytest.raises(ConfigError, match=r"is already sharded.*fully_shard or tpkernels.zero"):
        tpk.parallelize(model, group)
    with pytest.raises(ConfigError, match=r"under zero\(\), which cannot be undone"):
        tpk.unparallelize(model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    with pytest.raises(
        RuntimeError, match=r"already sharded over .*tpkernels.zero and fully_shard"
    ):
        fully_shard(model, mesh=mesh)
    other, _ = held(group, "plain", "fully_shard")
    with pytest.raises(UnsupportedModuleError, match=r"model is under fully_shard.*Fix: "):
        tpk.zero(other, group)
    before = samples.full(held(group, "plain", 3)[0])
    model, optimizer = held(group, "plain", 3)
    model.double().to("cpu")  # changes nothing
    train(model, optimizer, range(1), group.rank(), world)
    assert not torch.equal(samples.full(model)["norm.weight"], before["norm.weight"])


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_sharded_model_is_not_for(pool, world):
    pool.run(refused, world_size=world)


MOVES = {
    "half": lambda model, _: model.half(),
    "to": lambda model, _: model.to(torch.bfloat16),
    "part": lambda model, _: model.blocks[1].fc1.float(),
    "meta": lambda model, _: model.to("meta"),
    "assignment": lambda model, _: setattr(
        model.norm, "weight", nn.Parameter(torch.ones(8).double())
    ),
    "data": lambda model, _: setattr(model.norm.bias, "data", torch.ones(4).double()),
}


def moved(group, move, stage):
    model, _ = held(group, "plain", stage)
    MOVES[move](model, group)
    whole = samples.language("plain", torch.float64).state_dict()
    for use in (
        model.state_dict,
        lambda: tpk.full_state_dict(model),
        lambda: model.load_state_dict(whole),
        lambda: tpk.load_full_state_dict(model, whole),
    ):
        with pytest.raises(ConfigError, match=r"memory that zero|a tensor of \(4,\)"):
            use()
    with pytest.raises(ConfigError) as caught:
        samples.loss_of(model, *samples.batch(0)).backward()
    return str(caught.value)


def test_a_moved_parameter_is_refused_by_optimizers_and_told_from_its_like():
    model = samples.language()
    manager = tpk.zero(model)
    model.norm.weight.data = torch.ones_like(model.norm.weight.plain())
    told = r"norm\.weight .* \(now another tensor of torch.float32 on cpu\)\. Fix: do that before"
    with pytest.raises(ConfigError, match=told):
        manager.optimizer(torch.optim.AdamW)
    with pytest.raises(ConfigError, match=told), torch.no_grad():
        samples.loss_of(model, *samples.batch(0))


def wrapped(group):
    model, _ = held(group, "plain", 3)
    with pytest.raises(UnsupportedModuleError) as caught:
        FullyShardedDataParallel(model, group, device_id=torch.device("cpu"))
    return str(caught.value)


def test_fsdp_over_a_sharded_model_is_refused(pool):
    for told in pool.run(wrapped, world_size=2):
        assert "part" in told and "Fix: " in told


@pytest.mark.parametrize("move", list(MOVES))
def test_parameters_that_are_moved_are_noticed(pool, move):
    """Training on would step memory that is not what the ranks gather."""
    for stage in (1, 3):
        for message in pool.run(moved, move, stage, world_size=2):
            assert "no longer in the memory that zero() gathers: model.to(), .half()" in message
            assert "Fix: do that before zero()" in message


def added(group, where):
    model = samples.language()
    manager = tpk.zero(model, group)
    module, path = (model, "") if where == "root" else (model.blocks[1].fc1, "blocks.1.fc1.")
    module.adapter = nn.Linear(4, 4, bias=False)
    told = rf"^{re.escape(path)}adapter\.weight was added or replaced after zero\(\).*Fix: add it"
    with pytest.raises(ConfigError, match=told):
        samples.loss_of(model, *samples.batch(0))
    with pytest.raises(ConfigError, match=told):
        manager.optimizer(torch.optim.AdamW, lr=1e-3)
    with torch.no_grad():
        samples.loss_of(model, *samples.batch(0))  # an evaluation trains nothing
    module.adapter.requires_grad_(False)
    samples.loss_of(model, *samples.batch(0)).backward()
    assert samples.all_sharded(manager)


@pytest.mark.parametrize("where", ["root", "block"])
def test_parameters_added_later_are_refused(pool, where):
    """Each rank would train its own."""
    pool.run(added, where, world_size=2)
