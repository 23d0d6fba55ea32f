"""The scheduler: any history keeps the rules, and what repeats is predicted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zero.scheduler_machine import UNLIMITED, Driver, SchedulerMachine, unit_bytes
from tpkernels import native
from tpkernels.reference import prefetch_scheduler as reference
from tpkernels.reference.prefetch_scheduler import ActionKind, UnitBytes
from tpkernels.zero.scheduler import make_scheduler

GATHER, WAIT, FREE, REDUCE, WAIT_REDUCE = ActionKind

TestAnyHistory = SchedulerMachine.TestCase
TestAnyHistory.settings = settings(max_examples=200, stateful_step_count=20)

few = settings(max_examples=25)
training_units = st.lists(unit_bytes, min_size=1, max_size=6)


def largest(units: list[UnitBytes]) -> int:
    return max(unit.gathered + unit.staging for unit in units)


def equal_units(count: int, **options) -> list[UnitBytes]:
    return [UnitBytes(10, **options) for _ in range(count)]


def spent(driver: Driver, act) -> tuple[int, int, int, int]:
    """(uses, gathers, misses, wasted) of ``act()``."""

    def now() -> tuple[int, int, int, int]:
        counters = driver.counters
        return driver.uses, counters.gathers, counters.misses, counters.wasted

    before = now()
    act()
    return tuple(b - a for a, b in zip(before, now(), strict=True))


@few
@given(units=training_units, more=st.integers(0, 30), data=st.data())
def test_what_repeats_is_gathered_ahead_from_the_second_time_on(units, more, data):
    """A budget of one unit is enough for hits alone, and nothing is gathered in vain.

    But where backward uses a held unit again: its hold ends with the first use, and for the next
    one, which is nearer, what was gathered ahead makes room.
    """
    driver = Driver(units, largest(units) + more)
    forward = data.draw(st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=8))
    backward = data.draw(st.permutations(forward))
    again = sum(forward.count(i) - 1 for i in set(forward) if units[i].held)
    for repetition in range(3):
        uses, gathers, misses, wasted = spent(driver, lambda: driver.step(forward, backward))
        driver.invalidate()  # the optimizer's step
        if repetition:
            assert misses == 0 and wasted <= again
            assert gathers <= uses


@few
@given(units=training_units, more=st.integers(0, 30), data=st.data())
def test_hits_recover_at_once_after_evaluation(units, more, data):
    """Z-4, Z-5: evaluation over other units between training steps costs training nothing."""
    driver = Driver(units, largest(units) + more)
    train = data.draw(st.permutations(range(len(units))))
    evaluate = data.draw(st.lists(st.integers(0, len(units) - 1), min_size=1, max_size=6))
    for repetition in range(3):
        _, _, misses, wasted = spent(driver, lambda: driver.step(train))
        driver.invalidate()
        _, _, eval_misses, eval_wasted = spent(
            driver, lambda: driver.forward(evaluate, "eval", trains=False)
        )
        if repetition:
            assert misses == wasted == eval_misses == eval_wasted == 0


BRANCHES = ([0, 1, 2, 5], [0, 3, 4, 5])


def test_a_known_branch_misses_only_where_it_parts():
    """Z-3: which of them comes is not known before its first unit; all after it is."""
    driver = Driver(equal_units(6), prefetch_bytes=20)
    for order in BRANCHES:
        driver.step(order)
    for which in (1, 0, 0, 1, 1, 0, 1):
        _, _, misses, wasted = spent(driver, lambda which=which: driver.step(BRANCHES[which]))
        assert misses <= 1
        assert wasted <= 2  # the budget's worth of the other branch


def test_the_longest_context_tells_where_an_unexpected_use_stands():
    """After 0 and 1: what followed them where they came in this order, not what followed a 1."""
    driver = Driver(equal_units(6), prefetch_bytes=10)
    for order in ([4, 0, 1, 5], [0, 3, 1, 2]):
        driver.forward(order, "eval", trains=False)
    driver.begin_forward("eval", False)
    driver.use(0)
    assert driver.actions == [(GATHER, 3), (WAIT, 0)]
    driver.use(1)
    assert driver.actions == [(GATHER, 1), (WAIT, 3), (FREE, 3), (GATHER, 5), (WAIT, 1)]


def test_branches_that_alternate_do_not_miss():
    """Z-3."""
    driver = Driver(equal_units(6), prefetch_bytes=20)
    for order in BRANCHES * 2:
        driver.step(order)
    for order in BRANCHES * 3:
        assert spent(driver, lambda order=order: driver.step(order))[2:] == (0, 0)


@few
@given(units=training_units, more=st.integers(0, 30), data=st.data())
def test_hits_recover_within_one_step_after_the_order_changed(units, more, data):
    """Z-3: also after a return to an order that another followed before."""
    driver = Driver(units, largest(units) + more)
    orders = [data.draw(st.permutations(range(len(units)))) for _ in range(3)]
    runs = st.tuples(st.sampled_from(orders), st.integers(2, 4))
    for order, length in data.draw(st.lists(runs, min_size=3, max_size=8)):
        for repetition in range(length):
            _, _, misses, wasted = spent(driver, lambda order=order: driver.step(order))
            driver.invalidate()
            if repetition:
                assert misses == wasted == 0


@pytest.mark.parametrize(("forget", "misses"), [(False, 0), (True, 2)])
def test_a_reset_may_forget_the_orders(forget, misses):
    driver = Driver(equal_units(4), prefetch_bytes=10)
    for _ in range(2):
        driver.forward([3, 1, 2, 0], "eval", trains=False)
    driver.reset(forget)
    driver.invalidate()
    assert spent(driver, lambda: driver.forward([3, 1, 2, 0], "eval", trains=False))[2] == misses


def test_an_order_that_returns_is_expected_to_stay():
    """Z-3: A A A B B B A A A, of which B followed A before."""
    driver = Driver(equal_units(4), prefetch_bytes=10)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3]):
        driver.step(order)
        for _ in range(2):
            assert spent(driver, lambda order=order: driver.step(order))[2:] == (0, 0)


@few
@given(count=st.integers(1, 8), data=st.data())
def test_a_new_order_every_step_wastes_nothing_within_a_large_budget(count, data):
    driver = Driver(equal_units(count))
    for _ in range(4):
        order = data.draw(st.permutations(range(count)))
        _, gathers, misses, wasted = spent(driver, lambda order=order: driver.forward(order))
        assert gathers == count
        assert misses == wasted == 0
        backward = data.draw(st.permutations(range(count)))
        assert spent(driver, lambda order=backward: driver.backward(order))[1:] == (0, 0, 0)


@few
@given(data=st.data())
def test_two_forwards_before_a_backward_are_learned_as_one_order(data):
    """Z-12."""
    driver = Driver(equal_units(4), prefetch_bytes=20)
    orders = [data.draw(st.permutations(range(4))) for _ in range(2)]
    backward = data.draw(st.permutations([*orders[0], *orders[1]]))

    def step() -> None:
        for order in orders:
            driver.forward(order)
        driver.backward(backward)

    step(), step(), step()
    assert spent(driver, step)[2:] == (0, 0)


@pytest.mark.parametrize("prefetch_bytes", [0, 9])
def test_without_a_budget_nothing_is_gathered_ahead(prefetch_bytes):
    driver = Driver(equal_units(3), prefetch_bytes)
    driver.step([0, 1, 2])
    assert driver.counters.hits == 0
    assert driver.counters.misses == driver.counters.gathers == 6
    assert driver.counters.peak_gathered_bytes == 10  # the unit in use


def test_a_unit_larger_than_the_budget_does_not_block_those_behind_it():
    driver = Driver([UnitBytes(10), UnitBytes(100), UnitBytes(10)], prefetch_bytes=20)
    driver.step([0, 1, 2])
    assert [scheduler[1] for scheduler in map(driver.schedulers[0].unit_counters, range(3))] == [
        0,
        2,
        0,
    ]


def test_the_budget_is_visible():
    """Z-50: peaks are exactly what the bounds say."""
    for budget in (0, 10, 30, 50):
        driver = Driver(equal_units(8), budget)
        driver.step(list(range(8)))
        assert driver.counters.peak_idle_bytes == budget
        assert driver.counters.peak_gathered_bytes == budget + 10


def test_a_live_bound_keeps_the_nearest_ahead():
    """What is kept for backward makes way for what forward needs next."""
    driver = Driver(equal_units(8), UNLIMITED, max_live_bytes=30)
    driver.step(list(range(8)))
    assert driver.counters.peak_live_bytes == 30
    assert spent(driver, lambda: driver.step(list(range(8))))[2:] == (0, 0)


@pytest.mark.parametrize(
    ("gradients", "max_live_bytes", "misses"), [(10, 50, 0), (10, 60, 3), (20, 40, 7)]
)
def test_gradients_delay_what_is_gathered_ahead_but_never_drop_it(
    gradients, max_live_bytes, misses
):
    """60 has room for a second reduce-scatter in flight, where 50 has it for the next gather."""
    units = equal_units(8, gradients=gradients, reduce_input=gradients)
    driver = Driver(units, UNLIMITED, max_live_bytes)
    driver.step(list(range(8)))
    assert spent(driver, lambda: driver.step(list(range(8))))[2:] == (misses, 0)


def test_a_reduce_scatter_that_does_not_fit_is_waited_for_at_once():
    driver = Driver([UnitBytes(10, gradients=10, reduce_input=10)], 0, max_live_bytes=25)
    driver.begin_backward()
    driver.use(0)
    driver.collect(0)
    driver.reduce(0)
    assert driver.actions == [(REDUCE, 0), (WAIT_REDUCE, 0)]
    assert driver.counters.peak_live_bytes == 30


def test_held_units_stay_over_several_forwards_and_a_recomputation():
    """Z-14."""
    driver = Driver(equal_units(2, held=True), 0)
    driver.forward([0, 1])
    driver.forward([0, 1])
    driver.forward([0], "eval", trains=False)
    driver.begin_backward()
    for unit in (1, 0):
        driver.use(unit, False)
        driver.release(unit)
        assert driver.actions == []
        driver.use(unit)
        driver.release(unit)
        assert driver.actions == [(FREE, unit)]
    driver.end_backward()
    assert driver.counters.gathers == 2


def test_what_backward_keeps_serves_the_next_forward():
    driver = Driver(equal_units(3), 0, reshard_after_backward=False)
    driver.step([0, 1, 2])
    assert driver.counters.gathers == 6
    _, gathers, _, _ = spent(driver, lambda: driver.forward([1, 2]))
    assert gathers == 0
    assert driver.actions == [(FREE, 0)]  # it was kept for this forward and not used


@pytest.mark.parametrize("resident", [False, True])
def test_changed_weights_are_gathered_anew(resident):
    driver = Driver(equal_units(2, resident=resident))
    driver.begin_forward("eval", False)
    assert driver.actions == [(GATHER, 0), (GATHER, 1)]
    driver.use(0)
    driver.invalidate([0, 1])
    assert driver.actions == ([] if resident else [(WAIT, 1), (FREE, 1)])
    driver.use(1)
    ahead = [(WAIT, 1)] if resident else []
    assert driver.actions == [*ahead, (GATHER, 1), (WAIT, 1)]
    driver.use(0)  # inside the first use of it: the copy is written again where it is
    assert driver.actions == [(GATHER, 0), (WAIT, 0)]


def test_a_copy_that_went_stale_in_use_is_freed_when_released():
    driver = Driver(equal_units(1))
    driver.begin_forward()
    driver.use(0)
    driver.invalidate([0])
    driver.release(0)
    assert driver.actions == [(FREE, 0), (GATHER, 0)]


def test_nothing_is_expected_after_all_weights_changed():
    driver = Driver(equal_units(3))
    driver.forward([0, 1, 2])
    driver.invalidate()
    driver.use(1, False)
    driver.release(1)
    assert driver.actions == [(FREE, 1)]


def test_nothing_is_on_its_way_at_the_end_of_a_pass():
    """A gather of a resident unit reads weights: it ends before they may change."""
    driver = Driver(equal_units(2, resident=True))
    driver.forward([0], "eval", trains=False)
    assert driver.actions == [(WAIT, 1)]


def test_reduce_scatters_wait_for_the_oldest():
    driver = Driver(equal_units(3, gradients=4))
    driver.begin_backward()
    seen = []
    for unit in (2, 1, 0):
        driver.collect(unit)
        driver.reduce(unit)
        seen += driver.actions
    driver.end_backward()
    assert seen == [(REDUCE, 2), (REDUCE, 1), (WAIT_REDUCE, 2), (REDUCE, 0)]
    assert driver.actions == [(WAIT_REDUCE, 1), (WAIT_REDUCE, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_bytes": -1}, "prefetch_bytes is -1, allowed are 0 to"),
        ({"max_live_bytes": UNLIMITED + 1}, f"max_live_bytes is {UNLIMITED + 1}, allowed"),
        ({"max_pending_reduces": 0}, "max_pending_reduces is 0, allowed is 1 or more"),
        ({"units": [UnitBytes(1), UnitBytes(1, staging=-2)]}, r"units\[1\].staging is -2, allowed"),
        ({"units": [UnitBytes(UNLIMITED), UnitBytes(1)]}, "more than 2\\*\\*62 bytes together"),
    ],
)
@pytest.mark.parametrize("make", [make_scheduler, reference.PrefetchScheduler])
def test_what_cannot_be_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**{"units": [UnitBytes(1)], "prefetch_bytes": 0, **options})


def test_the_reference_serves_without_the_extension(monkeypatch):
    monkeypatch.setenv("TPKERNELS_NATIVE", "0")
    scheduler = make_scheduler([UnitBytes(10, held=True)], 20)
    assert scheduler.implementation == "reference"
    assert list(scheduler.begin_forward("train", True)) == [(GATHER, 0)]


@pytest.mark.skipif(native.load() is None, reason="the extension is not built")
def test_the_compiled_one_serves_and_is_quick():
    """A step of 96 blocks takes far less than one of their GEMMs; measured: 0.3 ms."""
    scheduler = make_scheduler([UnitBytes(10, 5, 10, 10)] * 96, prefetch_bytes=30)
    assert scheduler.implementation == "native"
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        scheduler.begin_forward("train", True)
        for unit in range(96):
            scheduler.use(unit), scheduler.release(unit)
        scheduler.end_forward(), scheduler.begin_backward()
        for unit in reversed(range(96)):
            scheduler.use(unit), scheduler.collect(unit)
            scheduler.release(unit), scheduler.reduce(unit)
        scheduler.end_backward()
        times.append(time.perf_counter() - begin)
    assert min(times) < 5e-3  # on a busy machine too
