"""Weights that change, orders that change: no stale copy is used, and prefetch recovers."""

from __future__ import annotations

import math

import pytest
import torch

import tpkernels as tpk
from tests.zero import samples
from tpkernels.errors import AgreementError, ConfigError
from tpkernels.testing import max_relative_error


def skipped_prefetch(group, change, stage):
    """Block 1 is prefetched without gradients, skipped; then its weights change."""
    model, reference = samples.stack(), samples.stack()
    manager = tpk.zero(model, group, stage=stage)
    x = samples.floats(0)
    with torch.no_grad():
        model(x)
        model.order = [0, 2]
        model(x)
        if change == "step":
            optimizer = manager.optimizer(torch.optim.SGD, lr=0.5)
            for each in (model, reference):
                each.order = [0, 2]
            for parameter in manager.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            for parameter in reference.parameters():
                parameter -= 0.5
        elif change == "in place":
            for each in (model, reference):
                for parameter in each.blocks[1].parameters():
                    parameter.mul_(3)
        elif change == "load":
            other = samples.stack(seed=7)
            reference.load_state_dict(other.state_dict())
            model.load_state_dict(other.state_dict())
        else:
            with manager.gathered(model.blocks[1], writeback=True):
                for parameter in model.blocks[1].parameters():
                    parameter.fill_(0.25)
            for parameter in reference.blocks[1].parameters():
                parameter.fill_(0.25)
        model.order = reference.order = [0, 1, 2]
        return max_relative_error(model(x), reference(x))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", ["step", "in place", "load", "gathered"])
def test_a_copy_prefetched_and_skipped_is_not_used_stale(pool, change, stage):
    for error in pool.run(skipped_prefetch, change, stage, world_size=2):
        assert error < 1e-12


def stepped_through_data(group, stage):
    """An optimizer that steps ``p.data``, which no version counter sees."""

    class Old(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad.data, alpha=-0.1)

    models = [samples.stack(), samples.stack()]
    manager = tpk.zero(models[1], group, stage=stage)
    optimizers = [Old(models[0].parameters()), manager.optimizer(Old, element_wise=True)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(samples.floats(step)).square().mean().backward()
            optimizer.step()
    found = samples.full(models[1])
    return max(max_relative_error(found[n], p) for n, p in models[0].named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_steps_data(pool, stage):
    for error in pool.run(stepped_through_data, stage, world_size=2):
        assert error < 1e-12


def changing_orders(group, orders, budget):
    """Train over ``orders``, one a step; what one process gets, and hits and misses of each."""
    rank, world = group.rank(), group.size()
    model, reference = samples.stack(blocks=4), samples.stack(blocks=4)
    manager = tpk.zero(model, group, prefetch_bytes=budget)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.05)
    truth = torch.optim.SGD(reference.parameters(), lr=0.05)
    hits, left = [], []
    for step, order in enumerate(orders):
        before = manager.stats()
        model.order = reference.order = order
        for each, rows in ((model, (rank, world)), (reference, (0, 1))):
            each(samples.floats(step, *rows)).square().mean().backward()
        optimizer.step()
        truth.step()
        optimizer.zero_grad()
        truth.zero_grad()
        now = manager.stats()
        hits.append((now["hits"] - before["hits"], now["misses"] - before["misses"]))
        left.append(now["idle_bytes"])
    found = samples.full(model)
    error = max(max_relative_error(found[n], p) for n, p in reference.named_parameters())
    return error, hits, left


@pytest.mark.parametrize("budget", [0, 6000, math.inf], ids=["none", "one unit", "all"])
def test_orders_that_change_every_step(pool, budget):
    """TP-55, Z-3: right whatever comes; nothing is left in flight."""
    orders = [[0, 1, 2, 3], [0, 2, 3], [3, 2, 1, 0], [1], [0, 2, 3], [2, 2, 0, 1], [0, 1, 2, 3]]
    for error, _, left in pool.run(changing_orders, orders, budget, world_size=2):
        assert error < 1e-11
        assert left == [0] * len(orders)


def test_a_branch_that_toggles_costs_one_step(pool):
    """TP-55, Z-3: after each of the two orders was seen once, the branch itself is all it costs."""
    orders = [[0, 1, 2, 3], [0, 2, 3]] * 4
    for error, hits, left in pool.run(changing_orders, orders, math.inf, world_size=2):
        assert error < 1e-11 and left == [0] * len(orders)
        for hit, miss in hits[2:]:
            assert miss <= 2 and hit >= 3


def evaluation_between(group, skips):
    """Train, evaluate (over fewer blocks with ``skips``), train: hits of each kind of pass."""
    model = samples.stack(blocks=4)
    manager = tpk.zero(model, group)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.05)
    rank, world = group.rank(), group.size()
    misses, left = {"train": [], "eval": []}, []
    for step in range(6):
        for kind in ("eval", "train") if skips else ("train",) * 2 + ("eval",) * 2:
            before = manager.stats()["misses"]
            model.order = [0, 2] if kind == "eval" and skips else [0, 1, 2, 3]
            x = samples.floats(step, rank, world)
            if kind == "train":
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    model(x)
            now = manager.stats()
            misses[kind].append(now["misses"] - before)
            left.append(now["idle_bytes"])
    return misses, left


@pytest.mark.parametrize("skips", [False, True], ids=["resumes", "alternates"])
def test_training_and_evaluation_keep_orders_of_their_own(pool, skips):
    """Z-4, Z-5: from the second pass of each on all but its first unit are there in time."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for misses, left in pool.run(evaluation_between, skips, world_size=2):
            assert max(misses["eval"][1:]) <= 1 and max(misses["train"][1:]) <= 1
            assert set(left) == {0}


# --- by hand ---


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
