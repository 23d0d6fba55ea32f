"""Ranks that part, are late or die: an error that names them, never a hang, a crash or a mix-up."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels.comm.group import resolve_group
from tpkernels.errors import AgreementError, CommunicationError
from tpkernels.testing import RankError, count_collectives, rank_pool
from tpkernels.zero import ZeroConfig
from tpkernels.zero.roll_call import REDUCE, RollCall


class Image(nn.Module):
    """An encoder (of a size of its own) that runs where there is an image."""

    def __init__(self):
        super().__init__()
        self.encoder = samples.Block(width=32)
        self.blocks = nn.ModuleList(samples.Block() for _ in range(2))
        self.others = nn.ModuleList(samples.Block() for _ in range(2))

    def forward(self, x, image=True):
        for block in self.blocks:
            x = block(x)
        if image:
            x = x + self.encoder(torch.ones(32)).mean()
        for block in self.others:
            x = block(x)
        return x


HISTORIES = {
    "at first": [],
    "one skips": [True] * 2,
    "one calls more": [False] * 2,
    "both known": [True, False] * 2,
}


def anew(group):
    """Another group of its ranks, which may be out of step afterwards."""
    return dist.new_group(list(range(group.size())))


def parts_at_last(group):
    """What a rank is told when it and the next run different modules, after a shared past."""
    told = {}
    for stage, budget in ((2, 0), (3, 0), (3, 10**9)):
        for name, history in HISTORIES.items():
            torch.manual_seed(0)
            model = Image()
            manager = tpk.zero(
                model, anew(group), units=[samples.Block], stage=stage, prefetch_bytes=budget
            )
            x = samples.floats(0, dtype=torch.float32)
            for image in history:
                model(x, image).sum().backward()
            begin = time.monotonic()
            try:
                model(x, group.rank() % 2 == 0).sum().backward()
                told[stage, budget, name] = "nothing"
            except AgreementError as error:
                told[stage, budget, name] = str(error)
            assert time.monotonic() - begin < 5
            assert stage < 3 or manager.stats()["gathered_bytes"] == 0
    return told


def test_ranks_that_part_are_told(pool):
    """Z-9: whether or not either branch was seen before, every rank gets an error with names."""
    for told in pool.run(parts_at_last, timeout=90):
        assert len(told) == len(HISTORIES) * 3
        for case, message in told.items():
            assert "encoder" in message and "Fix: " in message, (case, message)


def parts_with_find(group, find):
    torch.manual_seed(0)
    model = Image()
    config = ZeroConfig(units=[samples.Block], find_unused_parameters=find)
    tpk.zero(model, anew(group), config=config)
    with pytest.raises(AgreementError) as caught:
        model(samples.floats(0, dtype=torch.float32), group.rank() == 0).sum().backward()
    return str(caught.value)


def other_gradients(group, find):
    roll = RollCall(resolve_group(anew(group)), ["blocks.0"], lambda unit: "here all came", find)
    with pytest.raises(AgreementError) as caught:
        roll.start(REDUCE, 0, (0, group.rank()))
    return str(caught.value)


def another_forward(group):
    """Rank 0 runs forward again where the others run backward."""
    model = samples.stack()
    tpk.zero(model, anew(group))
    x = samples.floats(0)
    loss = model(x).sum()
    with pytest.raises(AgreementError) as caught:
        model(x) if group.rank() == 0 else loss.backward()
    return str(caught.value)


def words_of_errors(group):
    """Of each kind in which ranks part, the words."""
    told = {
        find: (parts_with_find(group, find), other_gradients(group, find)) for find in (False, True)
    }
    return told, another_forward(group)


def test_what_ranks_that_part_are_advised(pool):
    for told, forward in pool.run(words_of_errors, world_size=2):
        for find, (modules, gradients) in told.items():
            assert "run different modules" in modules and "into one unit" in modules
            assert "compute its loss from the same ones" in modules
            assert ("find_unused_parameters=True is set" in modules) is find
            assert "gradients for different parameters of 'blocks.0'" in gradients
            assert ("into one unit" in gradients) is find
            for message in (modules, gradients):
                assert ("ZeroConfig(find_unused_parameters=True)" in message) is not find
        assert "rank 0 begins a forward while it still holds 'blocks.0'" in forward
        assert "rank 1 reduces the gradients of 'blocks." in forward


def counted(group):
    """How many more collectives, and bytes, the comparison costs a step."""
    model = samples.language()
    tpk.zero(model, group)
    for step in range(4):
        with count_collectives() as counts:
            samples.loss_of(model, *samples.batch(step)).backward()
    return {kind: (count.calls, count.bytes) for kind, count in counts.items()}


def test_the_comparison_is_32_bytes_a_rank(pool):
    on = pool.run(counted, world_size=2)[0]
    off = pool.run(counted, world_size=2, env={"TPKERNELS_CHECK": "off"})[0]
    for kind in ("send", "receive"):  # one of each a collective, between two ranks
        assert on[kind][0] == 2 * off[kind][0]
        assert on[kind][1] - off[kind][1] == 32 * off[kind][0]


def without_comparison_equals(group):
    model = samples.language(dtype=torch.float64)
    manager = tpk.zero(model, group)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    samples.train(model, optimizer, 3, group.rank(), group.size(), manager)
    return samples.full(model)


def test_results_do_not_depend_on_the_comparison(pool):
    results = [
        pool.run(without_comparison_equals, world_size=2, env={"TPKERNELS_CHECK": mode})
        for mode in ("off", "first", "always")
    ]
    for name, value in results[0][0].items():
        assert all(torch.equal(each[0][name], value) for each in results)


def dies(group):
    model = samples.language()
    tpk.zero(model, group)
    both = samples.batch(0)
    samples.loss_of(model, *both).backward()
    if group.rank() == 1:
        os._exit(3)
    samples.loss_of(model, *both).backward()


def test_a_dead_rank_is_named(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivor speak
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pools(2).run(dies)
    assert time.monotonic() - start < 30
    (survivor,) = [failure for failure in caught.value.failures if failure.rank == 0]
    assert isinstance(survivor.exception, CommunicationError)
    assert "no sign of life from rank 1" in survivor.message


def late(group):
    limited = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    model = samples.language()
    manager = tpk.zero(model, limited)
    both = samples.batch(0)
    samples.loss_of(model, *both).backward()
    if group.rank() == 1:
        time.sleep(3)
        return "late"
    with pytest.raises(CommunicationError) as caught:
        samples.loss_of(model, *both).backward()
    assert manager.stats()["gathered_bytes"] == 0
    return str(caught.value)


def test_a_late_rank_is_an_error_within_the_limit(pools):
    message, _ = pools(2).run(late)
    assert "failed on rank 0: no sign of life from rank 1" in message


def goes_on(group):
    """Rank 0 alone fails in a forward, once, after orders were learned."""
    rank, world = group.rank(), group.size()
    model = samples.stack()
    manager = tpk.zero(model, group, prefetch_bytes="1MiB")
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    failed, fails = [], iter([False, False, True])

    def fail(*_):
        if rank == 0 and next(fails, False):
            raise ArithmeticError

    model.blocks[2].register_forward_pre_hook(fail)
    step = 0
    while step < 5:
        try:
            model(samples.floats(step, rank, world)).square().mean().backward()
        except (ArithmeticError, AgreementError) as error:
            failed.append(type(error))
            if error.args and len(failed) == (2 if rank == 0 else 1):
                optimizer.zero_grad()
                manager.reset()
            continue  # the same batch once more
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return failed, samples.full(model)


def test_ranks_that_parted_go_on_after_a_reset(pool):
    world = 3
    model = samples.stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        for rank in range(world):
            (model(samples.floats(step, rank, world)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (failed, full) in enumerate(pool.run(goes_on, world_size=world, timeout=60)):
        assert failed == ([ArithmeticError] if rank == 0 else []) + [AgreementError]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)
