"""What training loops do with ``p.grad`` between backward and step, and what is None there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels import ZeroConfig
from tpkernels.errors import ConfigError


def backward(model, step, scale=1.0):
    (scale * samples.loss_of(model, *samples.batch(step))).backward()


def kept(group, stage):
    """Gradients that were kept are still those of their backward after the next one."""
    model = samples.language()
    manager = tpk.zero(model, group, stage=stage)
    before = []
    for step in range(3):
        backward(model, step)
        if step:
            assert all(torch.equal(a.plain(), b) for a, b in before)
        # One of them, or its memory alone, is enough.
        shown = [p.grad for p in model.parameters()][: 1 if step else None]
        views = [each.detach() for each in shown] if step else shown
        before = [(each, each.plain().clone()) for each in views]
        model.zero_grad()
    with manager.no_sync():
        backward(model, 3)  # shows zeros
    assert all(torch.equal(a.plain(), b) for a, b in before)
    return True


def reused(group):
    """Where nobody keeps them, the memory stays the same."""
    model = samples.language()
    tpk.zero(model, group)
    places = set()
    for step in range(3):
        backward(model, step)
        places.add(next(p.grad.plain().data_ptr() for p in model.parameters() if p.numel()))
        model.zero_grad()
    return places


def test_gradients_that_are_kept_stay_what_they_were(pool):
    for stage in (1, 3):
        assert all(pool.run(kept, stage, world_size=2))
    assert all(len(places) == 1 for places in pool.run(reused, world_size=2))


CHANGES = {
    "clipped": lambda model, _: tpk.clip_grad_norm_(model, 1e9),
    "scaled": lambda model, _: [p.grad.mul_(0.5) for p in model.parameters()],
    "replaced": lambda model, _: setattr(model.norm.bias, "grad", torch.ones_like(model.norm.bias)),
}


def changed(group, change):
    model = samples.language()
    manager = tpk.zero(model, group)
    backward(model, 0)
    with manager.no_sync():
        backward(model, 1)
    CHANGES[change](model, manager)
    with pytest.raises(ConfigError) as caught:
        backward(model, 2)
    model.zero_grad()
    backward(model, 2)  # the next one is right
    return str(caught.value), float(tpk.clip_grad_norm_(model, 1e9))


def test_gradients_changed_while_some_wait_to_be_reduced(pool):
    model = samples.language()
    backward(model, 2)
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for change in CHANGES:
        for message, norm in pool.run(changed, change, world_size=2):
            assert "was changed (scaled, clipped) while what no_sync() collected" in message
            assert "Fix: change gradients after the backward outside no_sync()" in message
            assert norm == pytest.approx(expected, rel=1e-5)


def test_a_step_before_gradients_are_reduced():
    model = samples.language()
    manager = tpk.zero(model)
    optimizer = manager.optimizer(torch.optim.SGD, [model.norm.weight], lr=0.1)
    model.norm.bias.requires_grad_(False)
    without = manager.optimizer(torch.optim.SGD, [model.norm.bias], lr=0.1)
    with manager.no_sync():
        backward(model, 0)
    for use in (optimizer.step, manager.clip_grad_norm_):
        with pytest.raises(ConfigError, match=r"while gradients that no_sync\(\) collected wait"):
            use(*([1.0] if use is not optimizer.step else []))
    without.step()
    optimizer.zero_grad()
    optimizer.step()
    model.zero_grad()
    backward(model, 0)
    manager.clip_grad_norm_(1.0)
    optimizer.step()


class Branches(nn.Module):
    """Rank 0 uses ``some`` in even steps; nobody ever uses ``none``."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(samples.Block() for _ in range(2))
        self.all, self.some, self.none = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, uses):
        x = self.all(self.blocks[1](self.blocks[0](x)))
        return self.some(x) if uses else x


def uses(step, rank):
    return rank == 0 and step % 2 == 0


def unused(group, stage):
    """Parameters that no rank used have no gradient: weight decay and momentum leave them alone."""
    rank, world = group.rank(), group.size()
    torch.manual_seed(0)
    model = Branches().double()
    manager = tpk.zero(
        model,
        group,
        config=ZeroConfig(stage=stage, units=[samples.Block], find_unused_parameters=True),
    )
    hooked = []
    for name, shard in model.named_parameters():
        shard.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    optimizer = manager.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for step in range(4):
        x = samples.floats(step, rank, world)
        model(x, uses(step, rank)).square().mean().backward()
        absent = {name for name, p in model.named_parameters() if p.grad is None}
        wanted = {"none.weight", "none.bias"}
        assert absent == (wanted | {"some.weight", "some.bias"} if step % 2 else wanted)
        assert set(hooked).isdisjoint(absent), "hooks of what has no gradient"
        hooked.clear()
        optimizer.step()
        optimizer.zero_grad()
    return samples.full(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_no_rank_used_has_no_gradient(pool, stage):
    torch.manual_seed(0)
    model = Branches().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(4):
        for rank in range(2):
            x = samples.floats(step, rank, 2)
            (model(x, uses(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for full in pool.run(unused, stage, world_size=2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)
