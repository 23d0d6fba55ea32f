"""Checkpoints of model and optimizer: from any ranks, stage and sharding to any other, bitwise."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tpkernels as tpk
from tests.zero import samples
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError, ShardedSaveError
from tpkernels.testing import RankError, max_relative_error

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
        assert set(ours.pop("params")) == set(theirs.pop("params"))
        assert settings_in(ours) == settings_in(theirs)


def save(group, path, model, optimizer):
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=path, process_group=group)


def load(group, path, model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=path, process_group=group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def pass_on(group, how, names, source, target, steps):
    """Load what ``source`` holds, train on, save; the wholes after loading and after training."""
    rank = group.rank()
    alone = how == "plain"
    results = []
    for name in names:
        model, optimizer = held(group, name, how, seed=9 if source else 0)
        if source:
            load(group, f"{source}/{name}", model, optimizer)
            assert settings_of(optimizer) == SETTINGS
        loaded = whole_of(model, optimizer)
        train(model, optimizer, steps, 0 if alone else rank, 1 if alone else group.size())
        if target:
            save(group, f"{target}/{name}", model, optimizer)
        results.append((loaded, whole_of(model, optimizer)))
    return results if rank == 0 else None


def chain(pool, tmp_path, links, names):
    """Two steps at each of ``links``, (world, how); what one process gets, in fp64 alone."""
    source, before = "", None
    for number, (world, how) in enumerate(links):
        target = str(tmp_path / str(number))
        steps = (2 * number, 2 * number + 1)
        now = pool.run(pass_on, how, names, source, target, steps, world_size=world)[0]
        for index in range(len(names)):
            if before is not None:
                assert_same(now[index][0], before[index][1])
        source, before = target, copy.deepcopy(now)
    model = samples.language("plain", torch.float64)
    train(model, plain_adamw(model), range(2 * len(links)), 0, 1)
    found = now[names.index("plain")][1][0]
    for name, value in model.state_dict().items():
        assert max_relative_error(found[name], value) < 1e-10, name


def test_4_to_2_to_3_to_1_Z_25(pool, tmp_path):
    """Z-25, Z-27, Z-29, Z-30: stages interchange too; then it trains as if nothing had been."""
    chain(pool, tmp_path, [(4, 3), (2, 1), (3, 2), (1, 3), (4, 1)], list(MODELS))


def test_to_and_from_fully_shard_and_plain(pool, tmp_path):
    links = [(2, 3), (2, "fully_shard"), (3, 2), (1, "plain"), (2, 3), (4, "fully_shard"), (2, 1)]
    chain(pool, tmp_path, links, ["plain"])


def interrupted(group, path, how):
    """Trained in one go, and saved and loaded in between by ``how``: the same bits."""
    rank, world = group.rank(), group.size()
    for name in ("plain", "tied"):
        model, optimizer = held(group, name, 3, seed=0)
        train(model, optimizer, range(2), rank, world)
        other, fresh = held(group, name, 3, seed=9)
        if how == "dcp":
            save(group, f"{path}/{name}", model, optimizer)
            load(group, f"{path}/{name}", other, fresh)
        elif how == "whole":
            other.load_state_dict(tpk.full_state_dict(model))
            state = tpk.full_optimizer_state_dict(model, optimizer)
            tpk.load_full_optimizer_state_dict(other, fresh, state)
        else:
            other.load_state_dict(model.state_dict())
            fresh.load_state_dict(optimizer.state_dict())
            fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))  # else the two share it
        for each in ((model, optimizer), (other, fresh)):
            train(*each, range(2, 4), rank, world)
        assert_same(whole_of(other, fresh), whole_of(model, optimizer))


@pytest.mark.parametrize("how", ["dcp", "whole", "parts"])
def test_the_same_bits_as_without_the_interruption(pool, tmp_path, how):
    pool.run(interrupted, str(tmp_path), how, world_size=2)


# --- Z-28: states that do not exist yet ---


def before_the_first_step(group, path):
    rank, world = group.rank(), group.size()
    model, optimizer = held(group, "plain", 3, seed=0)
    assert tpk.full_optimizer_state_dict(model, optimizer)["state"] == {}
    whole = copy.deepcopy(tpk.full_optimizer_state_dict(model, optimizer))
    before = samples.full(model)
    save(group, path, model, optimizer)  # get_state_dict initialises the state
    after = samples.full(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    other, fresh = held(group, "plain", 3, seed=9)
    load(group, path, other, fresh)
    assert_same(whole_of(other, fresh), whole_of(model, optimizer))
    third, empty = held(group, "plain", 3, seed=0)
    tpk.load_full_optimizer_state_dict(third, empty, whole)
    alone = samples.language("plain", torch.float64)
    steps = plain_adamw(alone)
    train(alone, steps, range(2), 0, 1)
    train(third, empty, range(2), rank, world)
    found = samples.full(third)
    return max(max_relative_error(found[n], p) for n, p in alone.state_dict().items())


def test_before_the_first_step_Z_28(pool, tmp_path):
    assert max(pool.run(before_the_first_step, str(tmp_path), world_size=2)) < 1e-10


# --- Z-31, Z-23 ---


def right_after(group, stage):
    """What is saved is the shards, whatever ran or is gathered."""
    model, optimizer = held(group, "tied", stage)
    manager = model._tpkernels_zero_manager
    train(model, optimizer, range(1), group.rank(), group.size())
    expected = {key: value.plain().clone() for key, value in model.state_dict().items()}

    def check(module=model, prefix=""):
        for keep in (False, True):
            state = module.state_dict(keep_vars=keep)
            assert list(state) == [k.removeprefix(prefix) for k in expected if k.startswith(prefix)]
            for key, value in state.items():
                assert isinstance(value, ChunkedTensor) and value.spec.dim is None
                assert isinstance(value, nn.Parameter) is keep
                assert torch.equal(value.plain(), expected[prefix + key])

    with torch.no_grad():
        model(samples.batch(0)[0])
    check()
    inside = []
    handle = model.blocks[1].register_forward_hook(lambda *_: inside.append(check()))
    model(samples.batch(0)[0])
    handle.remove()
    with manager.gathered(model):
        assert model.blocks[0].fc1.weight.dim() == 2
        check()
        check(model.blocks[0], "blocks.0.")
        check(model.blocks[0].fc1, "blocks.0.fc1.")
        assert model.blocks[0].fc1.weight.dim() == 2
        with pytest.raises(ConfigError, match=r"'\(root\)' is gathered.*Fix: .*outside"):
            get_optimizer_state_dict(model, optimizer)
        with pytest.raises(ConfigError, match=r"'\(root\)' is gathered.*Fix: load outside"):
            model.load_state_dict(model.state_dict())
        with pytest.raises(ConfigError, match="'blocks.0' is gathered"):
            model.blocks[0].fc1.load_state_dict(model.blocks[0].fc1.state_dict())
    manager.unshard(model.blocks[0])
    check()
    whole = tpk.full_state_dict(model)
    manager.reshard(model.blocks[0])
    model.load_state_dict(whole)
    check()
    return len(inside)


@pytest.mark.parametrize("stage", [2, 3])
def test_right_after_a_forward_and_while_gathered_Z_31(pool, stage):
    assert pool.run(right_after, stage, world_size=2) == [1, 1]


def save_while_it_trains(group, path):
    model, optimizer = held(group, "plain", 3, seed=0)
    train(model, optimizer, range(1), group.rank(), group.size())
    expected = whole_of(model, optimizer)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    future = dcp.async_save(states, checkpoint_id=path, process_group=group)
    train(model, optimizer, range(1, 3), group.rank(), group.size())
    future.result()
    load(group, path, model, optimizer)
    assert_same(whole_of(model, optimizer), expected)


def test_async_save_is_a_snapshot_Z_23(pool, tmp_path):
    pool.run(save_while_it_trains, str(tmp_path), world_size=2)


# --- whole states, and PyTorch's options for them ---


def whole_states(group):
    """Of a plain model and optimizer into a sharded one, and back."""
    for name in MODELS:
        kind, dtype, _ = MODELS[name]
        plain = samples.language(kind, dtype)
        steps = plain_adamw(plain)
        train(plain, steps, range(2), 0, 1)
        expected = (plain.state_dict(), steps.state_dict())
        named = get_optimizer_state_dict(plain, steps)
        for way in ("by place", "PyTorch's", "PyTorch's whole", "ours"):
            model, optimizer = held(group, name, 3)
            model.load_state_dict(plain.state_dict())
            if way == "by place":
                optimizer.load_state_dict(steps.state_dict())
            elif way == "ours":
                tpk.load_full_optimizer_state_dict(model, optimizer, named)
            else:
                options = StateDictOptions(full_state_dict=way == "PyTorch's whole")
                set_model_state_dict(model, dict(plain.state_dict()), options=options)
                set_optimizer_state_dict(model, optimizer, copy.deepcopy(named), options=options)
            assert settings_of(optimizer) == SETTINGS
            whole = tpk.full_optimizer_state_dict(model, optimizer)
            found = (tpk.full_state_dict(model), whole["state"], whole["param_groups"])
            assert_same(found, (expected[0], named["state"], copy.deepcopy(named["param_groups"])))
        back = samples.language(kind, dtype, seed=7)
        back.load_state_dict(tpk.full_state_dict(model))
        again = plain_adamw(back)
        set_optimizer_state_dict(back, again, tpk.full_optimizer_state_dict(model, optimizer))
        for each in ((plain, steps), (back, again)):
            train(*each, range(2, 4), 0, 1)
        for key, value in plain.state_dict().items():
            assert torch.equal(back.state_dict()[key], value), key
    first = tpk.full_optimizer_state_dict(model, optimizer, rank0_only=True)
    return len(first)


def test_whole_states_to_and_from_a_plain_model(pool):
    """Z-29, Z-30, Z-27: by place and by name, of tied and frozen parameters, in bf16 too."""
    assert pool.run(whole_states, world_size=3) == [2, 0, 0]


def broadcast_from_one(group):
    """PyTorch's ``broadcast_from_rank0``: only rank 0 has the whole."""
    plain = samples.language("plain", torch.float64, seed=3)
    steps = plain_adamw(plain)
    train(plain, steps, range(1), 0, 1)
    named, state = get_optimizer_state_dict(plain, steps), plain.state_dict()
    model, optimizer = held(group, "plain", 3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first = group.rank() == 0
    set_model_state_dict(model, dict(state) if first else {}, options=options)
    set_optimizer_state_dict(model, optimizer, named if first else {}, options=options)
    found = whole_of(model, optimizer)
    assert all(torch.equal(found[0][key], value) for key, value in state.items())
    for key, entries in get_optimizer_state_dict(plain, steps)["state"].items():
        assert all(torch.equal(found[1][key][k], v) for k, v in entries.items())


def test_broadcast_from_rank_0(pool):
    pool.run(broadcast_from_one)


def parts_that_are_saved_as_wholes(group, path):
    """What holds parts is never written by torch.save, whoever handed it out."""
    model, optimizer = held(group, "plain", 3)
    train(model, optimizer, range(1), group.rank(), group.size())
    options = StateDictOptions(full_state_dict=True)
    for what, fix in (
        (model.state_dict(), "full_state_dict"),
        (optimizer.state_dict(), "full_optimizer_state_dict"),
        (get_model_state_dict(model, options=options), "full_state_dict"),
        (get_optimizer_state_dict(model, optimizer, options=options), "full_optimizer_state_dict"),
    ):
        with pytest.raises(ShardedSaveError, match=rf"Fix: .*tpkernels\.{fix}\("):
            torch.save(what, path)
    torch.save(tpk.full_state_dict(model), path)
    torch.save(tpk.full_optimizer_state_dict(model, optimizer), path)


def test_torch_save_refuses_parts(pool, tmp_path):
    pool.run(parts_that_are_saved_as_wholes, str(tmp_path / "file"), world_size=1)


# --- what does not fit ---


def misfits(group):
    model, optimizer = held(group, "tied", 3)
    plain = samples.language("tied", torch.float32, seed=1)
    before = samples.full(model)
    state = plain.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight"):
        model.load_state_dict({k: v for k, v in before.items() if k != "head.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        model.load_state_dict({**before, "other": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"norm.bias must be whole, of shape \(8,\), got \(4,\)"):
        model.load_state_dict({**state, "norm.bias": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"assign=True\).*Fix: "):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ConfigError, match=r"assign=True\).*Fix: "):
        model.blocks[0].load_state_dict(plain.blocks[0].state_dict(), assign=True)
    found = samples.full(model)
    assert all(torch.equal(found[key], value) for key, value in before.items())
    model.blocks[0].load_state_dict(plain.blocks[0].state_dict())
    model.blocks[1].fc1.load_state_dict(plain.blocks[1].fc1.state_dict())
    model.head.load_state_dict(plain.head.state_dict())
    found = samples.full(model)
    for key, value in state.items():
        new = key.startswith(("blocks.0.", "blocks.1.fc1.", "head.", "embedding."))
        assert torch.equal(found[key], value if new else before[key]), key
    with pytest.raises(ConfigError, match=r"fc1.bias must be whole, of shape \(16,\), got \(3,\)"):
        model.blocks[0].load_state_dict({"fc1.bias": torch.ones(3)}, strict=False)
    return {key: (value.plain(), value.spec) for key, value in model.state_dict().items()}


def load_parts_of(group, parts):
    model, _ = held(group, "tied", 3)
    theirs = parts[(group.rank() + 1) % len(parts)]
    model.load_state_dict({key: ChunkedTensor.wrap(*part) for key, part in theirs.items()})


def test_model_states_that_do_not_fit(pool):
    parts = pool.run(misfits, world_size=2)
    for world in (2, 3):  # the other rank's, another world's
        with pytest.raises(RankError, match=r"holds another part.*Fix: .*checkpoint, which resh"):
            pool.run(load_parts_of, parts, world_size=world)


def optimizer_misfits(group):
    model, optimizer = held(group, "plain", 3)
    train(model, optimizer, range(1), group.rank(), group.size())
    state = tpk.full_optimizer_state_dict(model, optimizer)
    load = tpk.load_full_optimizer_state_dict

    def changed(change):
        other = copy.deepcopy(state)
        change(other)
        return other

    wrong = changed(lambda s: s["state"]["norm.bias"].update(exp_avg=torch.ones(3)))
    with pytest.raises(ConfigError, match=r"exp_avg of .* must be whole, of shape \(8,\), got"):
        load(model, optimizer, wrong)
    unknown = changed(lambda s: s["state"].update(other={}))
    with pytest.raises(ConfigError, match=r"'other' has state.*Fix: "):
        load(model, optimizer, unknown)
    moved = changed(lambda s: s["param_groups"][0]["params"].append("norm.bias"))
    with pytest.raises(ConfigError, match=r"param_groups\[1\].* are in param_groups \[0, 1\]"):
        load(model, optimizer, moved)
    fewer = changed(lambda s: s["param_groups"].pop(2))
    with pytest.raises(ConfigError, match=r"param_groups\[2\] of the optimizer holds 0 trained"):
        load(model, optimizer, fewer)
    more = changed(lambda s: s["param_groups"].append({"params": []}))
    with pytest.raises(ConfigError, match=r"4 param_groups, the optimizer has 3"):
        load(model, optimizer, more)
    other = changed(lambda s: s["param_groups"][1]["params"].remove("norm.bias"))
    with pytest.raises(ConfigError, match=r"param_groups\[1\] of the optimizer"):
        load(model, optimizer, other)
    again = tpk.full_optimizer_state_dict(model, optimizer)
    assert_same(({}, again["state"], []), ({}, state["state"], []))
    with pytest.raises(ConfigError, match=r"of shape \(4,\) that is not in the model's"):
        tpk.full_optimizer_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(4))]))


def test_optimizer_states_that_do_not_fit(pool):
    pool.run(optimizer_misfits, world_size=2)


# --- tensor parallelism and replicas ---


def on_two_dimensions(group, names, path):
    """Split over tp or replicated, then sharded over dp_shard."""
    mesh = tpk.init_mesh(**dict.fromkeys(names, 2), device_type="cpu")
    model = samples.language("plain", torch.float64)
    if "tp" in names:
        style = {f"blocks.*.fc{n}": s for n, s in ((1, COLUMN), (2, ROW))}
        tpk.parallelize(model, mesh["tp"], plan=style)
        manager = tpk.zero(model, mesh["dp_shard"])
    else:
        manager = tpk.zero(model, mesh[names])
    optimizer = manager.optimizer(torch.optim.AdamW, groups_of(model))
    train(model, optimizer, range(2), mesh["dp_shard"].get_local_rank(), 2)
    save(group, path, model, optimizer)
    whole = whole_of(model, optimizer)
    other = samples.language("plain", torch.float64, seed=5)
    tpk.load_full_state_dict(model, other.state_dict())
    load(group, path, model, optimizer)
    assert_same(whole_of(model, optimizer), copy.deepcopy(whole))
    with pytest.raises(ConfigError, match=r"under zero\(\), which cannot be undone.*Fix: "):
        tpk.unparallelize(model)
    return whole if group.rank() == 0 else None


COLUMN, ROW = tpk.ColumnParallelLinear, tpk.RowParallelLinear


@pytest.mark.parametrize("names", [("dp_shard", "tp"), ("dp_replicate", "dp_shard")], ids=str)
def test_two_dimensions_to_one_rank(pool, tmp_path, names):
    whole = pool.run(on_two_dimensions, names, str(tmp_path / "plain"))[0]
    (loaded, _) = pool.run(
        pass_on, "plain", ["plain"], str(tmp_path), "", range(0), world_size=1
    )[0][0]
    assert_same(loaded, whole)


# --- uses that a sharded model cannot serve ---


def refused(group):
    world = group.size()
    model, optimizer = held(group, "plain", 3)
    for copier in (copy.deepcopy, pickle.dumps):
        for module in (model, model.blocks[0], model.blocks[0].fc1):
            with pytest.raises(ShardedSaveError, match=r"Fix: torch.save\(tpkernels.full_state"):
                copier(module)
    with pytest.raises(ConfigError, match=r"would overwrite every rank's shards.*Fix: leave it"):
        nn.parallel.DistributedDataParallel(model, process_group=group)
    with pytest.raises(ConfigError, match=r"is already sharded.*then tpkernels.zero"):
        tpk.parallelize(model, group)
    with pytest.raises(ConfigError, match=r"under zero\(\), which cannot be undone"):
        tpk.unparallelize(model)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    with pytest.raises(RuntimeError, match=r"already sharded over .*tpkernels.zero and fully_shard"):
        fully_shard(model, mesh=mesh)
    before = samples.full(held(group, "plain", 3)[0])
    model, optimizer = held(group, "plain", 3)
    model.double().to("cpu")  # changes nothing
    train(model, optimizer, range(1), group.rank(), world)
    assert not torch.equal(samples.full(model)["norm.weight"], before["norm.weight"])


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_sharded_model_is_not_for(pool, world):
    pool.run(refused, world_size=world)


MOVES = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16),
    "part": lambda model: model.blocks[1].fc1.float(),
    "meta": lambda model: model.to("meta"),
    "assignment": lambda model: setattr(model.norm, "weight", nn.Parameter(torch.ones(8).double())),
    "data": lambda model: setattr(model.norm.bias, "data", torch.ones(4).double()),
}


def moved(group, move, stage):
    model, _ = held(group, "plain", stage)
    MOVES[move](model)
    with pytest.raises(ConfigError) as caught:
        samples.loss_of(model, *samples.batch(0)).backward()
    return str(caught.value)


@pytest.mark.parametrize("move", list(MOVES))
def test_parameters_that_are_moved_are_noticed(pool, move):
    """Training on would step memory that is not what the ranks gather."""
    for stage in (1, 3):
        for message in pool.run(moved, move, stage, world_size=2):
            assert "no longer in the memory that zero() gathers: model.to(), .half()" in message
            assert "Fix: do that before zero()" in message
