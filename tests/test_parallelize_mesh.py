"""Tensor parallel x ``fully_shard`` on a 2 x 2 mesh: a train step, clipping, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import tpkernels as tpk
from tests.models.zoo import gpt2, llama
from tpkernels.errors import ConfigError, UnsupportedModuleError

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def even_llama():
    """Splits evenly over 2 ranks, so that every parameter is a DTensor; over 4, KV heads repeat."""
    torch.manual_seed(0)
    model = llama(num_attention_heads=4, num_key_value_heads=2, vocab_size=52, head_dim=6)
    return model.double()


def batch():
    return torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(1))


def split(model, mesh):
    tpk.parallelize(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def step(model, optimizer, ids, max_norm=0.5):
    """(loss, total norm before clipping) of one training step."""
    optimizer.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    norm = tpk.clip_grad_norm_(model, max_norm)
    optimizer.step()
    return loss.detach(), norm


def dense_steps(model, count):
    optimizer = optimizer_of(model)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        halves = [model(half, labels=half).loss for half in batch().chunk(2)]
        loss = sum(halves) / 2
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append((loss.detach(), norm))
    return found, optimizer


def assert_weights(model, dense, what=""):
    whole = tpk.full_state_dict(model)
    expected = dense.state_dict()
    assert list(whole) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(
            whole[key], value, **CLOSE, msg=lambda m, k=key: f"{what}{k}: {m}"
        )


def train_task(group, directory):
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    dense = even_llama()
    model = split(copy.deepcopy(dense), mesh)
    assert_weights(model, dense)
    optimizer = optimizer_of(model)
    expected, _ = dense_steps(dense, 2)
    mine = batch().chunk(2)[mesh["dp_shard"].get_local_rank()]
    for dense_loss, dense_norm in expected:
        loss, norm = step(model, optimizer, mine)
        torch.distributed.all_reduce(loss, group=mesh["dp_shard"].get_group())
        torch.testing.assert_close(loss / 2, dense_loss, **CLOSE)
        torch.testing.assert_close(norm, dense_norm, **CLOSE)
    assert_weights(model, dense)
    try:
        tpk.unparallelize(model)
    except ConfigError as error:
        assert "under fully_shard" in str(error)
    else:
        raise AssertionError("undone")
    options = {"model": get_model_state_dict(model)}
    options["optim"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(options, checkpoint_id=directory)


def load_task(group, directory, dp, tp):
    """The checkpoint of 2 x 2 at another shape: weights, then a step with the loaded optimizer."""
    torch.manual_seed(5)
    model = even_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    if dp * tp == 4:
        mesh = tpk.init_mesh(dp_shard=dp, tp=tp, device_type="cpu")
        tpk.parallelize(model, mesh["tp"])
        if dp > 1:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
    else:
        tpk.parallelize(model, group)
    optimizer = optimizer_of(model)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=directory, process_group=group)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    dense = even_llama()
    _, dense_optimizer = dense_steps(dense, 2)
    assert_weights(model, dense)
    ids = batch()[:2]
    optimizer.zero_grad(), dense_optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    dense(ids, labels=ids).loss.backward()
    optimizer.step(), dense_optimizer.step()
    assert_weights(model, dense, "after a step: ")


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory):
    """A checkpoint of two steps on 2 x 2, equal to single-process training."""
    directory = str(tmp_path_factory.mktemp("dcp") / "step2")
    pool.run(train_task, directory, timeout=90)
    return directory


def test_a_train_step_on_2_x_2_equals_single_process_Z_44_Z_45(trained):
    assert trained


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (4, 1), (1, 4)])
def test_checkpoints_load_at_other_shapes_Z_25(pool, trained, dp, tp):
    pool.run(load_task, trained, dp, tp, world_size=dp * tp, timeout=90)


def odd(name):
    """Models whose split no DTensor placement says: fused, replicated, two heads and one."""
    torch.manual_seed(0)
    if name == "gpt2":
        return gpt2().double().eval()  # without dropout
    kv_heads = {"gqa_replicated": 1, "gqa_uneven": 3}[name]
    return llama(num_key_value_heads=kv_heads).double()


def save_odd_task(group, name, directory):
    model = odd(name)
    tpk.parallelize(model, group)
    optimizer = optimizer_of(model)
    ids = batch()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=directory, process_group=group)


def load_odd_task(group, name, directory, again):
    """Load at this size, compare with single-process training, save for the next size."""
    model, dense = odd(name), odd(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    tpk.parallelize(model, group)
    optimizer = optimizer_of(model)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=directory, process_group=group)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    dense_optimizer, ids = optimizer_of(dense), batch()
    dense(ids, labels=ids).loss.backward()
    dense_optimizer.step()
    assert_weights(model, dense)
    dcp.save(state, checkpoint_id=again, process_group=group)
    for each, optim in ((model, optimizer), (dense, dense_optimizer)):
        optim.zero_grad()
        each(ids, labels=ids).loss.backward()
        optim.step()
    assert_weights(model, dense, "after a step: ")


@pytest.mark.parametrize("name", ["gpt2", "gqa_replicated", "gqa_uneven"])
def test_head_splits_reshard_from_2_to_3_to_1_Z_25(pool, tmp_path, name):
    pool.run(save_odd_task, name, str(tmp_path / "2"), world_size=2, timeout=60)
    for before, world in ((2, 3), (3, 1)):
        arguments = (name, str(tmp_path / str(before)), str(tmp_path / str(world)))
        pool.run(load_odd_task, *arguments, world_size=world, timeout=60)


def refused_task(group):
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = odd("gpt2")
    tpk.parallelize(model, mesh["tp"])
    try:
        fully_shard(model.transformer.h[0], mesh=mesh["dp_shard"])
    except UnsupportedModuleError as error:
        assert "global shape" in str(error) and "ignored_params" in str(error)
        return
    raise AssertionError("accepted")


def test_fully_shard_over_a_head_split_is_refused(pool):
    pool.run(refused_task)


def first_task(group):
    """fully_shard before parallelize is refused."""
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = even_llama()
    fully_shard(model, mesh=mesh["dp_shard"])
    try:
        tpk.parallelize(model, mesh["tp"])
    except ConfigError as error:
        assert "already sharded (DTensor). Fix: parallelize first, then fully_shard" in str(error)
        return
    raise AssertionError("accepted")


def test_fully_shard_first_is_refused(pool):
    pool.run(first_task)


def torch_save_task(group, directory, name):
    """torch.save raises with the fix, or what it wrote says that it is a part."""
    model = even_llama() if name == "even" else odd(name)
    tpk.parallelize(model, group)
    path = f"{directory}/{name}{group.rank()}.pt"
    try:
        torch.save(model.state_dict(), path)
    except tpk.errors.ShardedSaveError as error:
        assert "tpkernels.full_state_dict(model)" in str(error)
        return "raised"
    loaded = torch.load(path, weights_only=False)
    for key, value in loaded.items():
        own = model.state_dict()[key]
        assert type(value) is type(own) and value.shape == own.shape, key
        if hasattr(own, "placements"):
            assert value.placements == own.placements
            assert torch.equal(value.to_local(), own.to_local())
    return "kept its placements"


def test_torch_save_never_writes_a_part_as_the_whole(pool, tmp_path):
    for name, outcome in (
        ("even", "kept its placements"),
        ("gpt2", "raised"),
        ("gqa_uneven", "raised"),
    ):
        assert pool.run(torch_save_task, str(tmp_path), name, world_size=2) == [outcome] * 2
