"""One stream that ranks share, and one of each rank's own that needs no saving of its own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tpkernels.comm.group import resolve_group
from tpkernels.comm.rng import rank_stream, rejoin_shared_stream

CPU = torch.device("cpu")


def own_and_shared(group):
    group = resolve_group(group)
    before = torch.rand(4)
    with rank_stream(group, CPU):
        own = torch.rand(64)
    after = torch.rand(4)
    with rank_stream(group, CPU):
        second = torch.rand(64)
    return before, own, after, second


def test_own_streams_differ_and_the_shared_one_agrees(pool):
    results = pool.run(own_and_shared)
    for before, _, after, _ in results:
        assert torch.equal(before, results[0][0]) and torch.equal(after, results[0][2])
    own = torch.stack([each for _, first, _, second in results for each in (first, second)])
    assert len(own.unique()) == own.numel()  # 8 streams, no number twice
    correlation = torch.corrcoef(own - 0.5) - torch.eye(8)
    assert correlation.abs().max() < 0.6


def region(group, how):
    """What each rank draws inside and after, when the region is left early or by an error."""
    group = resolve_group(group)
    try:
        with rank_stream(group, CPU):
            own = torch.rand(3)
            if how == "rejoin":
                rejoin_shared_stream()
                rejoin_shared_stream()
            if how == "nested":
                with rank_stream(group, CPU):
                    own = torch.cat([own, torch.rand(3)])
            if how == "error":
                raise ValueError
            inside = torch.rand(3)
            if how == "again":
                rejoin_shared_stream()
                with rank_stream(group, CPU):
                    own = torch.cat([own, torch.rand(3)])
                inside = torch.rand(3)
    except ValueError:
        inside = torch.zeros(3)
    return own, inside, torch.rand(3)


@pytest.mark.parametrize(
    ("how", "agree_inside"),
    [("plain", False), ("nested", False), ("rejoin", True), ("again", True), ("error", True)],
)
def test_ways_to_leave_a_region(pool, how, agree_inside):
    (own_a, inside_a, after_a), (own_b, inside_b, after_b) = pool.run(region, how, world_size=2)
    assert not torch.isin(own_a, own_b).any()
    assert torch.equal(inside_a, inside_b) == agree_inside
    assert torch.equal(after_a, after_b)
    assert not torch.equal(after_a, inside_a)


def test_rejoin_outside_a_region_does_nothing():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    rejoin_shared_stream()
    with rank_stream(resolve_group(None), CPU):  # TP-54: a group of one has the shared stream
        assert torch.equal(torch.rand(3), expected)


def drop(x, weight, group):
    with rank_stream(group, CPU):
        own = torch.nn.functional.dropout(x * weight, 0.5)
    return torch.nn.functional.dropout(own, 0.5) ** 2


def recomputed(group, use_reentrant):
    group = resolve_group(group)
    results = []
    for recompute in (False, True):
        torch.manual_seed(11)
        x = torch.ones(256, requires_grad=True)
        weight = torch.full((256,), 3.0, requires_grad=True)
        if recompute:
            y = checkpoint(drop, x, weight, group, use_reentrant=use_reentrant)
        else:
            y = drop(x, weight, group)
        torch.rand(5)  # other draws before backward
        y.sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    return results


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_recomputation_draws_the_same_masks(pool, use_reentrant):
    masks = []
    for plain, again in pool.run(recomputed, use_reentrant, world_size=2):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
        masks.append(plain[0])
    assert not torch.equal(*masks)


def resumed(group, states):
    group = resolve_group(group)
    if states is None:
        torch.manual_seed(5)
        for _ in range(3):
            drop(torch.ones(8), torch.ones(8), group)
    else:
        torch.rand(100)  # a new process stands elsewhere
        torch.set_rng_state(states)
    state = torch.get_rng_state()
    return state, [drop(torch.ones(64), torch.ones(64), group) for _ in range(3)]


def test_rank_0_s_generator_state_restores_every_rank(pool):
    """TP-35: by construction: a rank's own stream follows from the shared one and its rank."""
    saved = pool.run(resumed, None)
    assert all(torch.equal(state, saved[0][0]) for state, _ in saved)
    restored = pool.run(resumed, saved[0][0])
    for (_, went_on), (_, again) in zip(saved, restored, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(went_on, again, strict=True))
    assert not torch.equal(saved[0][1][0], saved[1][1][0])
