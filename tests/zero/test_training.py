"""A sharded model trains as one process does on the batches of all ranks together."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

import tpkernels as tpk
from tests.zero import samples
from tpkernels.testing import max_relative_error

STEPS = 20
KINDS = ["plain", "tied", "frozen", "recomputed", "reentrant"]
BUDGETS = [0, 3000, math.inf]  # none, about one fp32 unit, all


def cases_of(stage, world):
    """(kind, optimizer, accumulate, prefetch_bytes, dtype); what differs rotates with the world."""
    cases = []
    few = world == 3 or (world > 3 and stage < 3)  # they share cores: two kinds, in turn
    for number, kind in enumerate(KINDS):
        if few and (number + stage + world) % 5 > 1:
            continue
        accumulate = ["no", "no_sync", "every"][(number + stage + world) % 3]
        optimizer = ["adamw", "sgd"][(number + world) % 2]
        cases.append((kind, optimizer, accumulate, BUDGETS[(number + world) % 3], torch.float64))
    for optimizer, kind in zip(
        ("adamw", "sgd")[: 2 if world <= 2 else 1], (KINDS * 2)[stage + world - 2 :], strict=False
    ):
        cases.append((kind, optimizer, "no", 3000, torch.float32))
    return cases


def steps_of(world, dtype):
    """Where ranks share cores, half of them in fp64, whose bound leaves no room for chance."""
    return STEPS // 2 if world > 2 and dtype is torch.float64 else STEPS


@functools.cache
def one_process(kind, optimizer, dtype, steps):
    model = samples.language(kind, dtype)
    losses = samples.train(model, samples.make(model.parameters(), optimizer), steps)
    return losses, model.state_dict()


def trained(group, stage, cases):
    results = []
    rank, world = group.rank(), group.size()
    for kind, optimizer, accumulate, budget, dtype in cases:
        model = samples.language(kind, dtype)
        manager = samples.sharded(group, model, stage=stage, prefetch_bytes=budget)
        steps = samples.make(None, optimizer, manager)
        count = steps_of(world, dtype)
        losses = samples.train(model, steps, count, rank, world, manager, accumulate)
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
        losses, state = one_process(kind, optimizer, dtype, steps_of(world, dtype))
        bound = 1e-10 if dtype is torch.float64 else 1e-5
        ours = torch.tensor([result[number][0] for result in by_rank], dtype=torch.float64).mean(0)
        assert max_relative_error(ours, torch.tensor(losses, dtype=torch.float64)) < bound, case
        for rank_result in by_rank:
            found = rank_result[number][1]
            assert found.keys() == state.keys()
            for name, value in state.items():
                assert max_relative_error(found[name], value) < bound, (case, name)


# --- a second dimension that replicates ---


def replicated(group, replicas, shards):
    mesh = tpk.init_mesh(dp_replicate=replicas, dp_shard=shards, device_type="cpu")
    model = samples.language("tied", torch.float64)
    manager = tpk.zero(model, mesh["dp_replicate", "dp_shard"])
    steps = samples.make(None, "adamw", manager)
    losses = samples.train(model, steps, 5, group.rank(), group.size(), manager)
    assert manager.stats()["replicas"] == replicas and manager.stats()["ranks"] == shards
    return losses, samples.full(model)


@pytest.mark.parametrize(("replicas", "shards"), [(2, 1), (2, 2), (4, 1), (1, 4)])
def test_replicas_stay_identical(pool, pools, replicas, shards):
    """Z-21: also where each group of shards is one rank."""
    ranks = pool if replicas * shards == 4 else pools(2)
    results = ranks.run(replicated, replicas, shards)
    model = samples.language("tied", torch.float64)
    samples.train(model, samples.make(model.parameters(), "adamw"), 5)
    for _, state in results:
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], results[0][1][name])
            assert max_relative_error(state[name], value) < 1e-11


# --- mixed precision ---


def by_hand(optimizer, steps, world, reduce_dtype, output_dtype):
    """A bf16 model beside fp32 masters, the gradients of ``world`` ranks' rows averaged."""
    masters, model = samples.language(), samples.language(dtype=torch.bfloat16)
    stepper = samples.make(masters.parameters(), optimizer)
    losses = []
    for step in range(steps):
        total = 0.0
        with torch.no_grad():
            for ours, master in zip(model.parameters(), masters.parameters(), strict=True):
                ours.copy_(master)
                master.grad = torch.zeros_like(master)
        for rank in range(world):
            model.zero_grad()
            tokens, targets = samples.batch(step, rank, world)
            logits = model(tokens).to(output_dtype)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            total += loss.item() / world
            for ours, master in zip(model.parameters(), masters.parameters(), strict=True):
                master.grad += ours.grad.to(reduce_dtype)
        for master in masters.parameters():
            master.grad /= world
        stepper.step()
        losses.append(total)
    return losses, masters.state_dict()


def trained_in_bf16(group, stage, optimizer, steps, policy):
    model = samples.language()
    manager = tpk.zero(model, group, stage=stage, mp_policy=policy)
    stepper = samples.make(None, optimizer, manager)
    losses = samples.train(model, stepper, steps, group.rank(), group.size(), manager)
    with torch.no_grad():
        dtype = model(samples.batch(0)[0]).dtype
    assert {p.dtype for p in manager.parameters()} == {torch.float32}
    return losses, samples.full(model), dtype


BF16 = torch.bfloat16
POLICIES = {
    "bf16": ("bf16", torch.float32, BF16),
    "reduced in bf16": (MixedPrecisionPolicy(BF16), BF16, BF16),
    "fp32 outputs": (
        MixedPrecisionPolicy(BF16, torch.float32, torch.float32), torch.float32, torch.float32
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("stage", "optimizer", "world"), [(3, "adamw", 3), (1, "sgd", 2)])
def test_bf16_with_fp32_masters(pool, stage, optimizer, world, policy):
    """The same bits as a loop that keeps fp32 masters by hand: sums are in the order of ranks."""
    given, reduce_dtype, output_dtype = POLICIES[policy]
    results = pool.run(trained_in_bf16, stage, optimizer, 5, given, world_size=world)
    losses, state = by_hand(optimizer, 5, world, reduce_dtype, output_dtype)
    ours = torch.tensor([each[0] for each in results]).mean(0)
    torch.testing.assert_close(ours, torch.tensor(losses), rtol=1e-6, atol=0)
    for _, found, dtype in results:
        assert dtype is output_dtype
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-7, msg=name)


class Watches(samples.Block):
    def forward(self, x, *, mask, count):
        self.seen = (x.dtype, mask["float"].dtype, mask["int"].dtype, count)
        return super().forward(x) * mask["float"].to(x.dtype)


class Casts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Watches() for _ in range(2))

    def forward(self, x):
        mask = {"float": torch.ones(1, dtype=torch.float32), "int": torch.ones(1, dtype=torch.int)}
        for block in self.blocks:
            x = block(x, mask=mask, count=3)
        return x


def test_inputs_are_cast():
    for policy, inner in (
        ("bf16", BF16),
        (MixedPrecisionPolicy(BF16, cast_forward_inputs=False), torch.float32),
    ):
        model = Casts()
        tpk.zero(model, mp_policy=policy)
        x = torch.ones(2, samples.WIDTH, dtype=BF16 if inner is not BF16 else torch.float32)
        with torch.no_grad():
            model(x)
        assert model.blocks[1].seen == (BF16, inner, torch.int32, 3)


# --- memory ---


def resident(group, policy):
    """Bytes of every storage after steps with Adam, gradients still there, beside the formula."""
    gc.collect()
    before = sum(samples.storages().values())
    model = samples.language(width=360, blocks=4)
    numel = sum(p.numel() for p in model.parameters())
    manager = tpk.zero(model, group, mp_policy=policy, prefetch_bytes=0)
    optimizer = manager.optimizer(torch.optim.AdamW, lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        samples.loss_of(model, *samples.batch(step, group.rank(), group.size())).backward()
        optimizer.step()
    gc.collect()
    held = sum(samples.storages().values()) - before
    return held, numel, manager.stats()["resident_bytes"]


@pytest.mark.parametrize("policy", [None, "bf16"])
def test_a_rank_holds_16_bytes_a_parameter_of_its_part(pool, policy):
    """Master, gradient and Adam's two moments, 4 bytes each; 2% for padding and the rest."""
    for world in (2, 4):
        for held, numel, reported in pool.run(resident, policy, world_size=world, timeout=60):
            assert 15.9 * numel / world <= held <= 1.02 * 16 * numel / world
            assert 8 * numel / world <= reported <= 1.02 * 8 * numel / world
