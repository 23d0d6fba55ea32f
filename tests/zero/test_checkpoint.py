"""Checkpoints of model and optimizer: from any ranks, stage and sharding to any other, bitwise."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tpkernels as tpk
from tests.zero import samples
from tests.zero.checkpoints import (
    MODELS,
    SETTINGS,
    assert_same,
    groups_of,
    held,
    load,
    plain_adamw,
    save,
    settings_of,
    states_of,
    train,
    whole_of,
)
from tpkernels.errors import ConfigError
from tpkernels.testing import max_relative_error


def pass_on(group, how, names, source, target, steps):
    """Load what ``source`` holds, train on, save; the wholes after loading and after training."""
    rank, world = (0, 1) if how == "plain" else (group.rank(), group.size())
    models = {name: held(group, name, how, seed=9 if source else 0) for name in names}
    if source:
        load(group, source, models)
        assert all(settings_of(optimizer) == SETTINGS for _, optimizer in models.values())
    loaded = {name: whole_of(*pair) for name, pair in models.items()}
    for pair in models.values():
        train(*pair, steps, rank, world)
    if target:
        save(group, target, models)
    return loaded, {name: whole_of(*pair) for name, pair in models.items()}


def chain(pool, tmp_path, links, names):
    """Two steps at each of ``links``, (world, how); what one process gets, in fp64 alone."""
    source, before = "", None
    for number, (world, how) in enumerate(links):
        target = str(tmp_path / str(number))
        steps = (2 * number, 2 * number + 1)
        (loaded, now), *_ = pool.run(pass_on, how, names, source, target, steps, world_size=world)
        if before is not None:
            for name in names:
                assert_same(loaded[name], before[name])
        source, before = target, now
    model = samples.language("plain", torch.float64)
    train(model, torch.optim.AdamW(groups_of(model)), range(2 * len(links)), 0, 1)
    found = now["plain"][0]
    for name, value in model.state_dict().items():
        assert max_relative_error(found[name], value) < 1e-10, name


def test_4_to_2_to_3_to_1_Z_25(pool, tmp_path):
    """Z-25, Z-27, Z-29, Z-30: stages interchange too; then it trains as if nothing had been."""
    chain(pool, tmp_path, [(4, 3), (2, 1), (3, 2), (1, 3)], list(MODELS))


def test_to_and_from_fully_shard_and_plain(pool, tmp_path):
    links = [(2, 3), (2, "fully_shard"), (3, 2), (1, "plain"), (4, 1)]
    chain(pool, tmp_path, links, ["plain"])


def interrupted(group, path, how):
    """Trained in one go, and saved and loaded in between by ``how``: the same bits."""
    rank, world = group.rank(), group.size()
    for name in ("plain", "tied"):
        model, optimizer = held(group, name, 3, seed=0)
        train(model, optimizer, range(2), rank, world)
        other, fresh = held(group, name, 3, seed=9)
        if how == "dcp":
            save(group, f"{path}/{name}", {"one": (model, optimizer)})
            load(group, f"{path}/{name}", {"one": (other, fresh)})
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
    save(group, path, {"plain": (model, optimizer)})  # get_state_dict initialises the state
    after = samples.full(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    other, fresh = held(group, "plain", 3, seed=9)
    load(group, path, {"plain": (other, fresh)})
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


# --- Z-23 ---


def save_while_it_trains(group, path):
    model, optimizer = held(group, "plain", 3, seed=0)
    train(model, optimizer, range(1), group.rank(), group.size())
    expected = whole_of(model, optimizer)
    states = {"plain": states_of(model, optimizer)}
    future = dcp.async_save(states, checkpoint_id=path, process_group=group)
    train(model, optimizer, range(1, 3), group.rank(), group.size())
    future.result()
    load(group, path, {"plain": (model, optimizer)})
    assert_same(whole_of(model, optimizer), expected)


def test_async_save_is_a_snapshot_Z_23(pool, tmp_path):
    pool.run(save_while_it_trains, str(tmp_path), world_size=2)


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
    save(group, path, {"plain": (model, optimizer)})
    whole = whole_of(model, optimizer)
    other = samples.language("plain", torch.float64, seed=5)
    tpk.load_full_state_dict(model, other.state_dict())
    load(group, path, {"plain": (model, optimizer)})
    assert_same(whole_of(model, optimizer), whole)
    with pytest.raises(ConfigError, match=r"under zero\(\), which cannot be undone.*Fix: "):
        tpk.unparallelize(model)
    return whole if group.rank() == 0 else None


COLUMN, ROW = tpk.ColumnParallelLinear, tpk.RowParallelLinear


@pytest.mark.parametrize("names", [("dp_shard", "tp"), ("dp_replicate", "dp_shard")], ids=str)
def test_two_dimensions_to_one_rank(pool, tmp_path, names):
    whole = pool.run(on_two_dimensions, names, str(tmp_path))[0]
    ((loaded, _),) = pool.run(pass_on, "plain", ["plain"], str(tmp_path), "", (), world_size=1)
    assert_same(loaded["plain"], whole)
