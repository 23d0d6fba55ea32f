"""A sharded model trains as one process does on the batches of all ranks together."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.zero import samples
from tpkernels.testing import max_relative_error

STEPS = 20
KINDS = ["plain", "tied", "frozen", "recomputed", "reentrant"]
BUDGETS = [0, 3000, math.inf]  # none, about one fp32 unit, all


def cases_of(stage, world):
    """(kind, optimizer, accumulate, prefetch_bytes, dtype); what differs rotates with the world."""
    cases = []
    for number, kind in enumerate(KINDS):
        accumulate = ["no", "no_sync", "every"][(number + stage + world) % 3]
        optimizer = ["adamw", "sgd"][(number + world) % 2]
        cases.append((kind, optimizer, accumulate, BUDGETS[(number + world) % 3], torch.float64))
    for optimizer, kind in zip(("adamw", "sgd"), (KINDS * 2)[stage + world - 2 :], strict=False):
        cases.append((kind, optimizer, "no", 3000, torch.float32))
    return cases


@functools.cache
def one_process(kind, optimizer, dtype):
    model = samples.language(kind, dtype)
    losses = samples.train(model, samples.make(model.parameters(), optimizer), STEPS)
    return losses, model.state_dict()


def trained(group, stage, cases):
    results = []
    rank, world = group.rank(), group.size()
    for kind, optimizer, accumulate, budget, dtype in cases:
        model = samples.language(kind, dtype)
        manager = samples.sharded(group, model, stage=stage, prefetch_bytes=budget)
        steps = samples.make(None, optimizer, manager)
        losses = samples.train(model, steps, STEPS, rank, world, manager, accumulate)
        assert not manager._engine.hooks.is_running
        assert stage < 3 or samples.all_sharded(manager)
        assert manager.stats()["idle_bytes"] == 0
        results.append((losses, samples.full(model)))
    return results


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_training_is_that_of_one_process(pool, stage, world):
    cases = cases_of(stage, world)
    by_rank = pool.run(trained, stage, cases, world_size=world, timeout=120)
    for number, case in enumerate(cases):
        kind, optimizer, _, _, dtype = case
        losses, state = one_process(kind, optimizer, dtype)
        bound = 1e-10 if dtype is torch.float64 else 1e-5
        ours = torch.tensor([result[number][0] for result in by_rank], dtype=torch.float64).mean(0)
        assert max_relative_error(ours, torch.tensor(losses, dtype=torch.float64)) < bound, case
        for rank_result in by_rank:
            found = rank_result[number][1]
            assert found.keys() == state.keys()
            for name, value in state.items():
                assert max_relative_error(found[name], value) < bound, (case, name)
