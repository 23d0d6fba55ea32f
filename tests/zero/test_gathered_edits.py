"""Edits of parameters gathered by hand are taken, refused or undone, never lost in silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels.errors import AgreementError, ConfigError


def edited_between_unshard_and_reshard(group, stage):
    """Lost, as ``unshard`` says: at every stage the next forward is of the shards."""
    model = samples.stack()
    manager = tpk.zero(model, group, stage=stage)
    x = samples.floats(0)
    with torch.no_grad():
        truth = model(x)
        manager.unshard()
        for parameter in model.parameters():
            parameter.add_(1.0)
        manager.reshard()
        assert torch.equal(model(x), truth)
        assert torch.equal(model(x), truth)


def test_edits_between_unshard_and_reshard_are_lost_at_every_stage(pool):
    for stage in (1, 3):
        pool.run(edited_between_unshard_and_reshard, stage, world_size=2)


def edits_by_hand(group):
    model = samples.language(dtype=torch.float64)
    manager = tpk.zero(model, group)
    rank, told = group.rank(), []
    before = samples.full(model)
    with pytest.raises(ConfigError, match="would be lost"), manager.gathered(model.blocks[0]):
        if rank == 0:
            with torch.no_grad():
                model.blocks[0].fc1.weight.add_(1)
    assert all(torch.equal(v, before[n]) for n, v in samples.full(model).items())
    with torch.no_grad():
        with manager.gathered(model, writeback=True):
            assert model.head.weight.shape == (samples.VOCAB, samples.WIDTH)
            model.blocks[1].fc1.bias.fill_(2)
            model.norm.weight[3] = 5
        with manager.gathered(writeback=True, from_rank=1):
            model.head.weight.fill_(10 + rank)
    after = samples.full(model)
    assert torch.equal(after["blocks.1.fc1.bias"], torch.full((16,), 2.0).double())
    assert after["norm.weight"][3] == 5
    assert torch.equal(after["head.weight"], torch.full_like(before["head.weight"], 11))
    unchanged = set(after) - {"blocks.1.fc1.bias", "norm.weight", "head.weight"}
    assert all(torch.equal(after[n], before[n]) for n in unchanged)
    for edit in ("values", "names"):
        with (
            pytest.raises(AgreementError, match=r"Fix: make the same edit.*from_rank=0"),
            manager.gathered(model, writeback=True),
            torch.no_grad(),
        ):
            module = model.blocks[rank if edit == "names" else 0]
            module.fc1.weight.fill_(rank if edit == "values" else 1)
    assert all(torch.equal(v, after[n]) for n, v in samples.full(model).items())
    for settings in ({"from_rank": 0}, {"from_rank": 2, "writeback": True}):
        with pytest.raises(ConfigError, match="from_rank"), manager.gathered(**settings):
            pass
    with pytest.raises(ValueError, match="mine"), manager.gathered(model):
        raise ValueError("mine")
    assert samples.all_sharded(manager)
    return told


def test_edits_of_gathered_parameters(pool):
    """Z-51: refused on all ranks and lost on none; or written back, if they agree."""
    pool.run(edits_by_hand, world_size=2)


def hidden_edits_by_hand(group, stage):
    """``.data`` moves no version counter: edits through it are found by value."""
    model = samples.language(dtype=torch.float64)
    manager = tpk.zero(model, group, stage=stage)
    rank, (tokens, targets) = group.rank(), samples.batch(0)
    before = samples.full(model)
    samples.loss_of(model, tokens, targets).backward()
    with torch.no_grad():
        truth = model(tokens)
    with (
        pytest.raises(ConfigError, match=r"edited \(blocks.0.fc1.weight\).*would be lost"),
        manager.gathered(model),
    ):
        model.blocks[0].fc1.weight.data[-1].zero_()  # in the last rank's part
    with pytest.raises(ValueError, match="mine"), manager.gathered(model):
        model.head.weight.data.zero_()
        raise ValueError("mine")
    with torch.no_grad():
        assert torch.equal(model(tokens), truth)  # no copy with the edit is used
    assert all(torch.equal(v, before[n]) for n, v in samples.full(model).items())
    with manager.gathered(model, writeback=True):
        model.blocks[1].fc1.weight.data[0, 0] = 7  # in the first rank's part
        with manager.gathered(model.blocks[1]):
            pass  # the edit is not this one's to judge
    with manager.gathered(model, writeback=True, from_rank=1):
        model.head.weight.data.fill_(-0.0 if rank else 3.0)
    after = samples.full(model)
    assert after["blocks.1.fc1.weight"][0, 0] == 7
    assert after["head.weight"].eq(0).all() and after["head.weight"].signbit().all()
    unchanged = set(after) - {"blocks.1.fc1.weight", "head.weight"}
    assert all(torch.equal(after[n], before[n]) for n in unchanged)
    with (
        pytest.raises(AgreementError, match=r"Fix: make the same edit.*from_rank=0"),
        manager.gathered(model, writeback=True),
    ):
        model.norm.weight.data.fill_(rank)
    assert all(torch.equal(v, after[n]) for n, v in samples.full(model).items())
    optimizer = torch.optim.SGD(list(manager.parameters()), lr=0.1)
    with (
        pytest.raises(ConfigError, match=r"changed while they were gathered.*Fix: optimizer.step"),
        manager.gathered(model, writeback=True),
    ):
        optimizer.step()  # writing the copy back would undo it
    return samples.all_sharded(manager)


@pytest.mark.parametrize("stage", [2, 3])
def test_edits_of_gathered_parameters_through_data(pool, stage):
    assert pool.run(hidden_edits_by_hand, stage, world_size=2) == [True, True]


def replaced_by_hand(group):
    """Memory of another kind in place of the gathered one: taken, or refused and undone."""
    rank = group.rank()
    for stage in (2, 3):
        model = samples.language(dtype=torch.float64)
        manager = tpk.zero(model, group, stage=stage)
        optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
        tokens, targets = samples.batch(0)
        shape = model.blocks[0].fc1.weight.spec.whole_shape

        def consistent(model, tokens):
            dense = samples.language(dtype=torch.float64)
            dense.load_state_dict(tpk.full_state_dict(model))
            with torch.no_grad():
                return torch.equal(model(tokens), dense(tokens))

        old = samples.loss_of(model, tokens, targets)
        with manager.gathered(writeback=True):
            model.blocks[0].fc1.weight.data = torch.full(shape, 0.5).double().t().contiguous().t()
            model.blocks[1].fc1.weight = nn.Parameter(torch.full(shape, 0.25).double())
        with manager.gathered(writeback=True, from_rank=1):
            model.norm.weight.data = torch.full((8,), 1.0 + rank).double()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        manager.reset()
        after = samples.full(model)
        assert [after[n].unique().tolist() for n in REPLACED] == [[0.5], [0.25], [2.0]]
        assert consistent(model, tokens)
        for settings, error, words, edit in (
            ({}, ConfigError, r"edited \(norm.weight\).*would be lost", as_data),
            ({}, ConfigError, r"edited \(norm.weight\).*would be lost", as_parameter),
            ({"writeback": True}, ConfigError, "norm.weight.*float16.*mp_policy=", as_half),
            ({"writeback": True}, ConfigError, r"norm.weight is now \(9,\)", as_larger),
            ({"writeback": True}, AgreementError, "make the same edit", as_data),
            ({"writeback": True}, ValueError, "mine", as_error),
        ):
            before = samples.loss_of(model, tokens, targets)
            with pytest.raises(error, match=words), manager.gathered(**settings):
                edit(model, rank)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                before.backward()
            manager.reset()
            assert consistent(model, tokens)
        manager.unshard(model.norm)
        model.norm.weight.data = torch.zeros(8).double()
        with pytest.raises(ConfigError, match=r"norm.weight replaced .*unshard\(\) and reshard"):
            manager.reshard(model.norm)
        assert samples.all_sharded(manager)
        manager.unshard()
        model.norm.weight.data = torch.zeros(8).double()
        manager.reset()
        assert all(torch.equal(v, after[n]) for n, v in samples.full(model).items())
        samples.loss_of(model, tokens, targets).backward()
        optimizer.step()
        assert consistent(model, tokens)


REPLACED = ("blocks.0.fc1.weight", "blocks.1.fc1.weight", "norm.weight")


def as_data(model, rank):
    model.norm.weight.data = torch.full((8,), 7.0 + rank).double()


def as_parameter(model, rank):
    model.norm.weight = nn.Parameter(torch.full((8,), 7.0).double())


def as_half(model, rank):
    model.half()


def as_larger(model, rank):
    model.norm.weight = nn.Parameter(torch.ones(9).double())


def as_error(model, rank):
    as_data(model, rank)
    raise ValueError("mine")


def test_gathered_parameters_that_are_replaced(pool):
    pool.run(replaced_by_hand, world_size=2)


@pytest.mark.parametrize("settings", [{}, {"writeback": True}, {"writeback": True, "from_rank": 0}])
def test_parameters_freed_inside_gathered(settings):
    model = samples.language()
    manager = tpk.zero(model)
    before = samples.full(model)
    with (
        pytest.raises(ConfigError, match=r"were freed inside gathered.*Fix: "),
        manager.gathered(**settings),
    ):
        as_data(model, 0)
        manager.reset()
    samples.loss_of(model, *samples.batch(0)).backward()
    assert all(torch.equal(v, before[n]) for n, v in samples.full(model).items())


def nested_by_hand(group):
    for stage in (2, 3):
        model = samples.language(dtype=torch.float64)
        manager = tpk.zero(model, group, stage=stage)
        norm, block = model.norm, model.blocks[1]
        with manager.gathered():
            with manager.gathered(norm, writeback=True), torch.no_grad():
                norm.weight.fill_(3)
            assert norm.weight.eq(3).all()
        with manager.gathered(writeback=True):
            norm.bias.data.fill_(4)
            block.fc1.bias.data = torch.full((16,), 5.0).double()
            with manager.gathered(norm, writeback=True):
                norm.weight.data[1:].fill_(6)
            with manager.gathered(block):
                assert block.fc1.bias.eq(5).all()
        with (
            pytest.raises(ConfigError, match=r"edited \(blocks.1.fc2.bias\).*would be lost"),
            manager.gathered(),
        ):
            block.fc2.bias.data.fill_(7)
            with manager.gathered(norm, writeback=True):
                norm.weight.data[0] = 8
        with manager.gathered(writeback=True):
            with (
                pytest.raises(ConfigError, match="would be lost"),
                manager.gathered(block),
                torch.no_grad(),
            ):
                block.fc2.weight.zero_()
            with manager.gathered(block, writeback=True), torch.no_grad():
                block.fc2.weight.fill_(9)
        after = samples.full(model)
        assert after["norm.weight"].tolist() == [8] + [6] * 7 and after["norm.bias"].eq(4).all()
        assert after["blocks.1.fc1.bias"].eq(5).all() and after["blocks.1.fc2.weight"].eq(9).all()
        assert not after["blocks.1.fc2.bias"].eq(7).any()
        dense = samples.language(dtype=torch.float64)
        dense.load_state_dict(after)
        tokens = samples.batch(0)[0]
        with torch.no_grad():
            assert torch.equal(model(tokens), dense(tokens))
        assert samples.all_sharded(manager)


def test_gathered_inside_gathered(pool):
    pool.run(nested_by_hand, world_size=2)
