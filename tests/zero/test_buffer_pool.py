"""The buffer pool: whose memory it gives, how much it keeps, and the exchange below it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpkernels as tpk
from tests.zero import samples
from tpkernels import native
from tpkernels.zero import ZeroConfig, buffer_pool, engine
from tpkernels.zero.buffer_pool import LARGEST_KEPT_BY_MALLOC, BufferPool

CPU = torch.device("cpu")
built = pytest.mark.skipif(
    not native.status().available, reason=f"no extension: {native.status().reason}"
)


# --- the exchange -------------------------------------------------------------------------------


def exchange(a, b):
    torch.ops.tpkernels.exchange_storage_(a, b)


@built
def test_storages_exchange_their_memory_and_views_see_it():
    a, b = torch.arange(6.0), torch.empty(0)
    view, version, pointer = a[2:5], a._version, a.data_ptr()
    exchange(a, b)
    assert a.untyped_storage().nbytes() == 0 and b.untyped_storage().nbytes() == 24
    assert b.untyped_storage().data_ptr() == pointer and a._version == version
    b.set_(b.untyped_storage(), 0, (6,))
    b.copy_(torch.arange(6.0) * 10)
    exchange(b, a)
    assert view.tolist() == [20.0, 30.0, 40.0] and view.data_ptr() == pointer + 8
    exchange(a, view)  # one storage: nothing happens
    assert a.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    a.untyped_storage().resize_(48)  # the memory it has now is its own to resize and free
    assert a.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


@built
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: torch.empty(3, device="meta"), "b is on meta; allowed: one device. Fix: "),
        (lambda: torch.from_numpy(torch.ones(3).numpy()), "of b cannot be resized; allowed: "),
    ],
    ids=["device", "resizable"],
)
def test_what_cannot_be_exchanged_is_refused(other, words):
    a, b = torch.ones(3), other()
    with pytest.raises(ValueError, match=words):
        exchange(a, b)
    assert a.tolist() == [1.0] * 3


# --- the pool -----------------------------------------------------------------------------------


def with_memory(pool, nbytes, owner=None):
    tensor = torch.empty(0, dtype=torch.uint8)
    pool.fill(tensor, nbytes, owner)
    return tensor.set_(tensor.untyped_storage(), 0, (nbytes,))


@built
def test_memory_comes_back_to_the_same_size_and_owner_alone():
    pool = BufferPool()
    pool.keep(10**6)
    storage = with_memory(pool, 64, "one")
    pointer = storage.data_ptr()
    pool.empty(storage, "one")
    assert storage.untyped_storage().nbytes() == 0 and pool.idle_bytes == 64
    held = [with_memory(pool, 64, "two"), with_memory(pool, 128, "one")]
    assert pointer not in [each.data_ptr() for each in held] and pool.idle_bytes == 64
    assert with_memory(pool, 64, "one").data_ptr() == pointer and pool.idle_bytes == 0


def test_tensors_come_back_whatever_their_dtype():
    pool = BufferPool()
    first = pool.new(16, torch.float32, CPU)
    pointer = first.data_ptr()
    pool.give(first)
    second = pool.new(32, torch.bfloat16, CPU)
    assert second.data_ptr() == pointer and second.dtype is torch.bfloat16
    assert second.shape == (32,) and pool.idle_bytes == 0


def test_without_the_extension_storages_are_allocated_and_freed(monkeypatch):
    monkeypatch.setenv("TPKERNELS_NATIVE", "0")
    pool = BufferPool()
    storage = with_memory(pool, 64)
    storage.fill_(1)
    pool.empty(storage)
    assert storage.untyped_storage().nbytes() == 0 and pool.idle_bytes == 0
    pool.fill(storage, 64)
    assert storage.fill_(2).sum() == 128


def test_on_cpu_malloc_keeps_what_is_small():
    pool = BufferPool.of(CPU)
    pool.give(pool.new(LARGEST_KEPT_BY_MALLOC - 1, torch.uint8, CPU))
    assert pool.idle_bytes == 0
    pool.give(pool.new(LARGEST_KEPT_BY_MALLOC, torch.uint8, CPU))
    assert pool.idle_bytes == LARGEST_KEPT_BY_MALLOC


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["new", "give", "fill", "empty", "keep"]), st.integers(0, 5)),
    max_size=40,
)


@built
@settings(max_examples=100)
@given(ACTIONS)
def test_no_memory_is_given_twice_and_the_count_is_right(actions):
    pool = BufferPool()
    tensors, storages = [], []
    for action, number in actions:
        nbytes, owner = 8 * (1 + number % 3), number % 2
        if action == "new":
            tensors.append((pool.new(nbytes, torch.uint8, CPU, owner), owner))
        elif action == "give" and tensors:
            pool.give(*tensors.pop(number % len(tensors)))
        elif action == "fill":
            storages.append((with_memory(pool, nbytes, owner), owner))
        elif action == "empty" and storages:
            pool.empty(*storages.pop(number % len(storages)))
        elif action == "keep":
            pool.keep(8 * number)
            assert pool.idle_bytes <= 8 * number
        live = [each for each, _ in tensors + storages] + [each.raw for each in pool._idle]
        assert len({each.data_ptr() for each in live}) == len(live)
        assert pool.idle_bytes == sum(raw.untyped_storage().nbytes() for raw, _ in pool._idle)
        assert all(e.untyped_storage().nbytes() == e.numel() for e in live)


# --- within a manager ---------------------------------------------------------------------------


@built
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("units_of_budget", [0, 1.5, 4, 100])
def test_idle_memory_and_units_gathered_ahead_are_within_one_bound(
    stage, units_of_budget, monkeypatch
):
    pool = BufferPool()  # whatever the size
    monkeypatch.setattr(buffer_pool.BufferPool, "of", classmethod(lambda cls, device: pool))
    after = []
    perform = engine.Engine.perform

    def watched(self, actions):
        perform(self, actions)
        after.append((pool.idle_bytes, self.scheduler.idle_bytes))

    monkeypatch.setattr(engine.Engine, "perform", watched)
    model, plain = samples.stack(blocks=4), samples.stack(blocks=4)
    unit = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
    bound = int(units_of_budget * unit)
    config = ZeroConfig(
        stage=stage, prefetch_bytes=bound, max_live_bytes=3 * unit, units=[samples.Block]
    )
    with pytest.warns() if 0 < bound < unit else nullcontext():
        manager = tpk.zero(model, config=config)
    for step in range(4):
        for each, of in ((model, manager), (plain, None)):
            optimizer = samples.make(each.parameters(), "sgd", of)
            each(samples.floats(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(idle + ahead <= bound for idle, ahead in after)
    most = max(idle for idle, _ in after)
    assert units_of_budget > 0 or most == 0
    if units_of_budget >= 4 and stage > 1:  # at stage 1 everything is kept where it is
        assert most > 0
    with manager.gathered():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
