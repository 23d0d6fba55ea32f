"""Models and optimizers held in several ways, saved, loaded and compared whole."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpkernels as tpk
from tests.zero import samples

# kind, dtype, compute dtype
MODELS = {
    "plain": ("plain", torch.float64, None),
    "tied": ("tied", torch.float32, "bf16"),
    "frozen": ("frozen", torch.float32, "bf16"),
}


def groups_of(model):
    """Two groups that differ in everything, and an empty one (Z-27)."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if n.endswith("weight") and "norm" not in n]
    others = [p for _, p in named if not any(p is each for each in matrices)]
    return [
        {"params": matrices, "lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {"params": others, "lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
        {"params": [], "lr": 0.5, "betas": (0.1, 0.2), "weight_decay": 0.3},
    ]


SETTINGS = [{k: v for k, v in group.items() if k != "params"} for group in groups_of(nn.Module())]


def settings_of(optimizer):
    return [settings_in(group) for group in optimizer.param_groups]


def settings_in(group):
    values = {key: group[key] for key in SETTINGS[0]}
    return {**values, "betas": tuple(values["betas"])}  # PyTorch makes a list of it


def plain_adamw(model):
    return torch.optim.AdamW(groups_of(model))


def held(group, name, how, seed=9):
    """(model, optimizer) of the kind ``name``, held in a way: a stage, fully_shard, plain."""
    kind, dtype, compute = MODELS[name]
    model = samples.language(kind, dtype, seed)
    if isinstance(how, int):
        manager = tpk.zero(model, group, stage=how, mp_policy=compute)
        return model, manager.optimizer(torch.optim.AdamW, groups_of(model))
    if how == "fully_shard":
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, plain_adamw(model)


def train(model, optimizer, steps, rank, world):
    for step in steps:
        samples.loss_of(model, *samples.batch(step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_of(model, optimizer):
    """Everything, as tensors and numbers that can be compared."""
    state = tpk.full_optimizer_state_dict(model, optimizer, cpu=True)
    return samples.full(model), state["state"], state["param_groups"]


def assert_same(found, expected):
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=0)
    assert len(found[2]) == len(expected[2])
    for ours, theirs in zip(found[2], expected[2], strict=True):
        assert set(ours["params"]) == set(theirs["params"])
        assert settings_in(ours) == settings_in(theirs)


def states_of(model, optimizer):
    """Both as PyTorch's helper gives them to a checkpoint."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def save(group, path, pairs):
    """One checkpoint of several (model, optimizer) by name, through PyTorch's helpers."""
    states = {name: states_of(*pair) for name, pair in pairs.items()}
    dcp.save(states, checkpoint_id=path, process_group=group)


def load(group, path, pairs):
    """Into (model, optimizer)s that may be fresh."""
    states = {name: states_of(*pair) for name, pair in pairs.items()}
    dcp.load(states, checkpoint_id=path, process_group=group)
    for name, state in states.items():
        set_state_dict(
            *pairs[name], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
