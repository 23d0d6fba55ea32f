"""Things that models and training loops do around a sharded model, beside forward and backward."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.zero import samples
from tpkernels.testing import max_relative_error


class RecomputesInside(nn.Module):
    """Recomputes a part of its forward, which its hooks do not see."""

    def __init__(self, reentrant):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.reentrant = reentrant

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Keeps(nn.Module):
    """Adds what it computed to a list of the caller's, to a dict, and to itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, kept, named):
        h = torch.tanh(self.up(x))
        kept.append(h)
        named[f"h{len(kept)}"] = h
        self.auxiliary = h.square().mean()
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(blocks)

    def forward(self, x, *rest):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *rest)
        return x


def inside(reentrant):
    return Stack([RecomputesInside(reentrant) for _ in range(3)])


def keeps():
    return Stack([Keeps() for _ in range(3)])


def loss_inside(model, x):
    return model(x).square().mean()


def loss_of_kept(model, x):
    """Of what the blocks left behind alone: the last one's output is not used."""
    kept, named = [], {}
    model(x, kept, named)
    assert len(kept) == len(named) == 3
    assert all(named[f"h{n}"] is h for n, h in enumerate(kept, 1))
    extra = sum(block.auxiliary for block in model.blocks)
    return sum(h.square().mean() for h in kept) + extra


class Aside(nn.Module):
    """Its loss is found in a dict of its own alone."""

    def __init__(self):
        super().__init__()
        self.up, self._aside = nn.Linear(8, 8), {}

    def forward(self, x):
        self._aside["loss"] = torch.tanh(self.up(x)).square().mean()
        return x


def loss_aside(model, x):
    model(x)
    return sum(block._aside["loss"] for block in model.blocks)


class WithHead(nn.Module):
    """A head over a part that users call by itself; its first layer is in the root's unit."""

    def __init__(self):
        super().__init__()
        self.body, self.head = keeps_nothing(), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


def loss_of_a_part(model, x):
    return model.body(x).square().mean()


def loss_of_whole_and_part(model, x):
    """The part's input has a gradient, too."""
    return model(x).square().mean() + model.body(torch.tanh(model.body(x))).mean()


IDIOMS = {
    "keeps its loss aside": (lambda: Stack([Aside() for _ in range(3)]), loss_aside),
    "a part alone": (WithHead, loss_of_a_part),
    "the whole and a part": (WithHead, loss_of_whole_and_part),
    "recomputes inside": (lambda: inside(False), loss_inside),
    "recomputes inside, reentrant": (lambda: inside(True), loss_inside),
    "keeps results elsewhere": (keeps, loss_of_kept),
}


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(group, idiom, budget):
    make, loss_of = IDIOMS[idiom]
    torch.manual_seed(0)
    model = make().double()
    manager = tpk.zero(model, group, prefetch_bytes=budget)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(3):
        loss_of(model, batch(step, group.rank()).double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert samples.all_sharded(manager)
    return samples.full(model)


@pytest.mark.parametrize("budget", [0, "1MiB"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_trains_as_one_process(pool, idiom, budget):
    make, loss_of = IDIOMS[idiom]
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        sum(loss_of(model, batch(step, rank).double()) / 2 for rank in range(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours in pool.run(trained, idiom, budget, world_size=2):
        for name, value in model.state_dict().items():
            assert max_relative_error(ours[name], value) < 1e-10, name


def norm(group, between, stage):
    model = samples.language()
    manager = tpk.zero(model, group, stage=stage)
    with manager.no_sync():
        samples.loss_of(model, *samples.batch(0)).backward()
    if between == "none":
        model.zero_grad()
    elif between == "zeros":
        model.zero_grad(set_to_none=False)
    elif between == "optimizer":
        manager.optimizer(torch.optim.SGD, lr=0.1).zero_grad()
    samples.loss_of(model, *samples.batch(1)).backward()
    return float(tpk.clip_grad_norm_(model, 1e9))


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_grad_forgets_what_no_sync_collected(pool, stage):
    def expected(*steps):
        model = samples.language()
        for step in steps:
            samples.loss_of(model, *samples.batch(step)).backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))

    for between in ("none", "zeros", "optimizer"):
        for ours in pool.run(norm, between, stage, world_size=2):
            assert ours == pytest.approx(expected(1), rel=1e-5), between
    for ours in pool.run(norm, "nothing", stage, world_size=2):
        assert ours == pytest.approx(expected(0, 1), rel=1e-5)


def hooked(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    tpk.zero(model, group)
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.shape) or gradient * 2)
    model(torch.ones(2, 4)).sum().backward()
    first = model[0].weight.grad.plain().clone()
    model(torch.ones(2, 4)).sum().backward()
    second = model[0].weight.grad.plain().clone()
    return first, second, seen, model[0].bias.grad.plain().clone()


def test_hooks_on_gradients_of_shards_change_them(pool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    results = pool.run(hooked, world_size=2)
    for times, which in ((2, 0), (4, 1)):
        whole = torch.cat([result[which] for result in results])
        torch.testing.assert_close(whole, model[0].weight.grad.flatten() * times)
    assert all(len(result[2]) == 2 for result in results)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), model[0].bias.grad * 2)


@pytest.mark.parametrize("trains", [False, True])
def test_model_and_manager_are_collected(trains):
    model = samples.language()
    manager = tpk.zero(model)
    if trains:
        samples.loss_of(model, *samples.batch(0)).backward()
    whole = manager._engine.units[0].buffers[0].slots[0].whole
    alive = [weakref.ref(each) for each in (model, manager, manager._engine, whole)]
    del model, manager, whole
    gc.collect()
    assert [each() for each in alive] == [None] * 4


def test_a_compiled_model_trains(pool):
    """The hooks run between the compiled parts."""
    for difference in pool.run(compiled, world_size=2, timeout=90):
        assert difference < 1e-5


def compiled(group):
    torch.manual_seed(0)
    model, plain = keeps_nothing(), keeps_nothing()
    plain.load_state_dict(model.state_dict())
    tpk.zero(model, group)
    for block in model.blocks:
        block.compile(backend="eager")
    x = batch(0, 0)
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    full = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    return abs(float(tpk.clip_grad_norm_(model, 1e9)) - float(full)) / float(full)


def keeps_nothing():
    return Stack([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])


class MostlyEmpty(nn.Module):
    """The root has no element, nor has the first unit; the second has 4."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.layers = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.layers(x) + self.nothing.sum()


def with_empty(group):
    model = MostlyEmpty()
    config = tpk.ZeroConfig(units=[nn.Linear], persistence_threshold=5)
    manager = tpk.zero(model, group, config=config)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = manager._engine
    return samples.full(model), {u.name for u in engine.units if u.index in engine._residents}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_parameters_without_elements(pool):
    model = MostlyEmpty()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for full, residents in pool.run(with_empty, world_size=4):
        assert residents == {"(root)", "layers.0", "layers.1"}  # padding does not count
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full[name], value)
