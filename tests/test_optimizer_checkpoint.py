"""Whole optimizer states, into and out of sharded models; PyTorch's options for them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import tpkernels as tpk
from tests.zero import samples
from tests.zero.checkpoints import (
    MODELS,
    SETTINGS,
    assert_same,
    held,
    plain_adamw,
    settings_of,
    train,
    whole_of,
)
from tpkernels.errors import ConfigError, ShardedSaveError


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
            assert_same(found, (expected[0], named["state"], named["param_groups"]))
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
