"""Activation checkpoints: a recomputation gathers what it needs and leaves nothing behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.zero import samples
from tpkernels.reference.prefetch_scheduler import ActionKind


def units_gathered_while_recomputing(group, kind, budget):
    model = samples.language(kind)
    manager = tpk.zero(model, group, prefetch_bytes=budget)
    engine, scheduler = manager._engine, manager._engine.scheduler
    asked, left = [], []

    class Watched:
        def __getattr__(self, name):
            return getattr(scheduler, name)

        def use(self, index, record=True):
            actions = scheduler.use(index, record)
            if not record:
                gathers = [unit for kind, unit in actions if kind == ActionKind.GATHER]
                asked.append((index, gathers))
            return actions

    engine.scheduler = Watched()
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    live = []
    for _ in range(10):
        samples.train(model, optimizer, 1, group.rank(), group.size())
        left.append(samples.all_sharded(manager))
        live.append(manager.stats()["live_bytes"])
    return asked, left, live


@pytest.mark.parametrize("budget", [0, math.inf], ids=["no prefetch", "prefetch"])
@pytest.mark.parametrize("kind", ["recomputed", "reentrant"])
def test_nothing_is_left_gathered(pool, kind, budget):
    """Z-14, Z-15: a recomputation gathers at most its own unit; after each step nothing is live."""
    for asked, left, live in pool.run(units_gathered_while_recomputing, kind, budget, world_size=2):
        assert len(asked) == 10 * 3
        assert all(gathers in ([], [index]) for index, gathers in asked)
        assert left == [True] * 10
        assert live == [0] * 10


def two_units_in_one_checkpoint(group, reentrant):
    """Z-12, Z-14: checkpoints over two units, of two forwards with one backward."""
    models = [samples.stack() for _ in range(2)]
    manager = tpk.zero(models[1], group)
    rank, world = group.rank(), group.size()

    def forward(model, x):
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    for model, (r, w) in zip(models, ((0, 1), (rank, world)), strict=True):
        x = samples.floats(0, r, w)
        (forward(model, x) + forward(model, x * 2)).backward()
    found = samples.gradients(models[1])
    for name, parameter in models[0].named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)
    return samples.all_sharded(manager)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpoint_around_the_whole_model(pool, reentrant):
    assert pool.run(two_units_in_one_checkpoint, reentrant, world_size=2) == [True, True]
