"""What is gathered and not in use stays within prefetch_bytes, as measured from outside."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch

import tpkernels as tpk
from tests.zero import samples
from tpkernels.errors import ConfigError, TPKernelsWarning

BLOCK = 4 * (2 * 8 + 8 * 16 + 16 + 16 * 8 + 8)  # bytes of one block of width 8, in fp32
ROOT = 4 * (2 * 12 * 8 + 2 * 8)  # of embedding, head and norm; smaller than a block


class Meter:
    """Measures storages whenever one is allocated, and notes which units the hooks say are used."""

    def __init__(self, manager):
        self.engine = engine = manager._engine
        self.used = Counter()
        self.idle, self.gathered = [0], [0]
        self.over = 0  # of what the units in use leave no choice about
        for name, change in (("use", 1), ("release", -1)):
            self._wrap(name, change, lambda unit: unit.index)
        for name, change in (("open_call", 1), ("close_call", -1)):
            self._wrap(name, change, lambda call: call.unit.index)
        for unit in engine.units:
            for buffer in unit.buffers:
                self._measure_after(buffer)

    def _wrap(self, name, change, index_of):
        original = getattr(self.engine, name)

        def wrapped(what, *rest):
            if name != "open_call" or not what.is_open:
                self.used[index_of(what)] += change
            original(what, *rest)
            self.measure()

        setattr(self.engine, name, wrapped)

    def _measure_after(self, buffer):
        original = buffer.allocate

        def allocate(*arguments):
            original(*arguments)
            self.measure()

        buffer.allocate = allocate

    def measure(self):
        sizes = {
            unit.index: sum(b.whole.untyped_storage().nbytes() for b in unit.buffers)
            for unit in self.engine.units
        }
        in_use = sum(size for index, size in sizes.items() if self.used[index] > 0)
        self.gathered.append(sum(sizes.values()))
        self.idle.append(self.gathered[-1] - in_use)
        most_used = sum(
            unit.bytes(resident=False, held=False).gathered
            for unit in self.engine.units
            if self.used[unit.index] > 0
        )
        self.over = max(self.over, self.gathered[-1] - most_used)


def measured(group, budgets, kind, forwards):
    """(budget, peak idle outside, peak idle reported, peak gathered over use, hits) of each."""
    rank, world = group.rank(), group.size()
    results = []
    for budget in budgets:
        model = samples.language(kind, blocks=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TPKernelsWarning)
            manager = tpk.zero(model, group, prefetch_bytes=budget)
        meter = Meter(manager)
        optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            samples.train(model, optimizer, 1, rank, world, manager)
            if forwards:
                with torch.no_grad():
                    model(samples.batch(step, rank, world)[0])
                (samples.loss_of(model, *samples.batch(1, rank, world)) * 2).backward()
        stats = manager.stats()
        assert not +meter.used
        results.append(
            (budget, max(meter.idle), stats["peak_idle_bytes"], meter.over, stats["hits"])
        )
    return results


BUDGETS = [0, 1, 777, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13, math.inf]


@pytest.mark.parametrize("kind", ["plain", "recomputed", "reentrant"])
def test_idle_bytes_never_exceed_the_budget(pool, kind):
    """Z-50: what prefetch_bytes says is what there is, to the byte, at every allocation."""
    for results in pool.run(measured, BUDGETS, kind, kind == "plain", world_size=2, timeout=60):
        hits = {}
        for budget, outside, reported, over, hit in results:
            assert outside <= budget and reported <= budget and over <= budget
            assert reported == outside or kind != "plain"
            hits[budget] = hit
        peaks = {budget: reported for budget, _, reported, _, _ in results}
        assert [peaks[b] for b in (0, 1, 777)] == [0] * 3 and hits[777] == 0
        assert peaks[BLOCK - 1] == ROOT
        assert peaks[BLOCK] == peaks[BLOCK + 1] == BLOCK and hits[BLOCK] > 0
        assert peaks[2 * BLOCK + 13] == 2 * BLOCK
        assert peaks[math.inf] >= 3 * BLOCK and hits[math.inf] > hits[BLOCK]


def live(group, bounds):
    results = []
    for bound in bounds:
        model = samples.language(blocks=4)
        manager = tpk.zero(model, group, max_live_bytes=bound)
        optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
        samples.train(model, optimizer, 3, group.rank(), group.size(), manager)
        results.append(manager.stats()["peak_live_bytes"])
        root = manager.stats()["units"][0]
    return results, root["gathered_bytes"]


def test_max_live_bytes_bounds_everything(pool):
    """Z-50: gathered copies, gradients and what is being reduced, together."""
    (_, root), *_ = pool.run(live, [None], world_size=2)
    # the root, one block, their gradients, and the largest reduction's input
    least = 2 * root + 2 * BLOCK + max(root, BLOCK)
    for peaks, _ in pool.run(live, [None, least, least + BLOCK], world_size=2):
        assert peaks[0] > least + BLOCK
        assert peaks[1] <= least and peaks[2] <= least + BLOCK


def changed_on_the_way(group):
    model = samples.language(blocks=4)
    manager = tpk.zero(model, group, prefetch_bytes="inf")
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    meter = Meter(manager)
    peaks = []
    for budget in (math.inf, BLOCK, 0, 2 * BLOCK):
        manager.set_budget(budget)
        meter.idle = [0]
        samples.train(model, optimizer, 2, group.rank(), group.size(), manager)
        peaks.append(max(meter.idle))
    model(samples.batch(0)[0])  # blocks are kept for a backward
    before = manager.stats()["idle_bytes"]
    manager.set_budget(prefetch_bytes=0)
    after = manager.stats()["idle_bytes"]
    with pytest.raises(ConfigError, match="prefetch_bytes"):
        manager.set_budget("a lot")
    with pytest.raises(ConfigError, match="max_live_bytes"):
        manager.set_budget(max_live_bytes=-1)
    return peaks, before, after


def test_set_budget_on_the_way(pool):
    for peaks, before, after in pool.run(changed_on_the_way, world_size=2):
        assert peaks[0] >= 3 * BLOCK and peaks[1:] == [BLOCK, 0, 2 * BLOCK]
        assert before == ROOT + BLOCK and after == 0


def test_a_unit_larger_than_the_budget_is_told_once():
    with pytest.warns(
        TPKernelsWarning, match=r"prefetch_bytes=100 B is less than .* needs"
    ) as told:
        manager = tpk.zero(samples.language(), prefetch_bytes=100)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples.train(manager.module, manager.optimizer(torch.optim.SGD), 2, manager=manager)
    for setting in ({"prefetch_bytes": 100}, {"max_live_bytes": 100}):
        model = samples.language()
        with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.*Fix: "):
            tpk.zero(model, strict=True, **setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpk.zero(samples.language(), prefetch_bytes=0, strict=True)  # no prefetch: nothing to fit
