"""Lanes: what is sent arrives, exactly, in order, whatever is in flight and whoever moves it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from tests.overlap.carriers import run_carried
from tpkernels.comm import tpshm
from tpkernels.comm.lanes import lanes_of, wanted, why_not
from tpkernels.errors import CommunicationError, ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64)


def lanes_on(group):
    lanes = lanes_of(group.group_name, even_on_one_host=True)
    assert lanes is not None, why_not(group.group_name)
    assert (lanes.size, lanes.rank) == (group.size(), group.rank())
    return lanes


def content(exchange, source, target, sizes):
    """What ``source`` sends to ``target``: one tensor a size, of any bits."""
    generator = torch.Generator().manual_seed(exchange * 64 + source * 8 + target)
    dtype = DTYPES[exchange % len(DTYPES)]
    return [
        torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8).bool()
        if dtype == torch.bool
        else torch.randint(-100, 100, (size,), generator=generator, dtype=torch.int8).to(dtype)
        for size in sizes
    ]


def run_schedule(group, schedule):
    lanes, rank = lanes_on(group), group.rank()
    started = []
    for number, (messages, then) in enumerate(schedule):
        sends = {
            target: content(number, source, target, sizes)
            for (source, target), sizes in messages.items()
            if source == rank
        }
        expected = {
            source: content(number, source, target, sizes)
            for (source, target), sizes in messages.items()
            if target == rank
        }
        receives = {
            source: [torch.empty_like(each) for each in tensors]
            for source, tensors in expected.items()
        }
        exchange = lanes.exchange(sends, receives, f"exchange {number}")
        started.append((exchange, receives, expected))
        what, which = then[rank]
        if what == "progress":
            lanes.progress()
        elif what == "wait":
            started[which % len(started)][0].wait()
        elif what == "receive":
            chosen = started[which % len(started)][0]
            chosen.wait(received_only=True)
            assert chosen.received
    for exchange, receives, expected in reversed(started):
        exchange.wait()
        assert exchange.done and exchange.received
        for source, tensors in expected.items():
            for got, sent in zip(receives[source], tensors, strict=True):
                assert torch.equal(got, sent)


@st.composite
def schedules(draw, world):
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    sizes = st.lists(st.sampled_from((0, 1, 3, 1000, 70_001)), max_size=3)
    then = st.tuples(st.sampled_from(("go on", "progress", "wait", "receive")), st.integers(0, 20))
    return [
        (
            draw(st.dictionaries(st.sampled_from(pairs), sizes, max_size=len(pairs))),
            [draw(then) for _ in range(world)],
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_schedule_arrives_exactly(pool, world):
    """Uneven, empty and one-sided messages; waits in any order."""

    @settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
    @given(schedules(world))
    def check(schedule):
        run_carried(pool, "lanes", run_schedule, schedule, world_size=world)

    check()


def both_send_much(group):
    """More both ways than any buffer holds, and nobody receives before all is started."""
    lanes, other = lanes_on(group), 1 - group.rank()
    mine = torch.full((8_000_000,), float(group.rank()))
    theirs = torch.empty(8_000_000)
    halves = [
        lanes.exchange({other: [a]}, {other: [b]}, "much")
        for a, b in zip(mine.chunk(2), theirs.chunk(2), strict=True)
    ]
    halves[1].wait()
    assert halves[0].done and bool((theirs == other).all())


def progress_is_enough(group):
    lanes, other = lanes_on(group), 1 - group.rank()
    theirs = torch.empty(1_000_000)
    exchange = lanes.exchange({other: [torch.ones(1_000_000)]}, {other: [theirs]}, "progress")
    end = time.monotonic() + 20
    while not exchange.done:
        assert time.monotonic() < end
        lanes.progress()
    lanes.progress()
    assert bool((theirs == 1).all())


def another_thread_moves(group):
    """Backward runs in a thread of its own; both move what either started."""
    lanes, other = lanes_on(group), 1 - group.rank()
    for _ in range(3):
        theirs = torch.zeros(500_000)
        first = lanes.exchange({other: [torch.ones(500_000)]}, {other: [theirs]}, "first")
        second = lanes.exchange({other: [torch.ones(7)]}, {other: [torch.empty(7)]}, "second")
        waiting = threading.Thread(target=second.wait)
        waiting.start()
        first.wait()
        waiting.join(20)
        assert second.done and not waiting.is_alive() and bool((theirs == 1).all())


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


def a_wait_is_interrupted(group):
    lanes, other = lanes_on(group), 1 - group.rank()
    theirs = torch.empty(4)
    if group.rank() == 0:
        exchange = lanes.exchange({}, {other: [theirs]}, "late")
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            exchange.wait()
        signal.signal(signal.SIGALRM, before)
        dist.barrier(group)
        exchange.wait()  # nothing is lost
        assert bool((theirs == 1).all())
    else:
        dist.barrier(group)
        lanes.exchange({other: [torch.ones(4)]}, {}, "late").wait()


def a_child_is_forked(group):
    """It neither uses the connections nor ends them."""
    lanes, other = lanes_on(group), 1 - group.rank()
    child = os.fork()
    if child == 0:
        try:
            lanes.exchange({other: [torch.ones(4)]}, {}, "in the child")
        except CommunicationError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    theirs = torch.empty(4)
    lanes.exchange({other: [torch.ones(4)]}, {other: [theirs]}, "in the parent").wait()
    assert bool((theirs == 1).all())


@pytest.mark.parametrize(
    "case",
    [
        both_send_much,
        progress_is_enough,
        another_thread_moves,
        a_wait_is_interrupted,
        pytest.param(
            a_child_is_forked,
            marks=pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks"),
        ),
    ],
)
def test_between_two_ranks(pool, case):
    run_carried(pool, "lanes", case, world_size=2)


def groups_apart(group):
    """A group's lanes are its own: what goes on in one is nothing to another."""
    everyone, pairs = dist.new_group(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[group.rank() // 2]
    whole, pair = lanes_on(everyone), lanes_on(mine)
    assert lanes_of(everyone.group_name) is whole is not pair
    got = [torch.empty(1), torch.empty(1)]
    after, before = (group.rank() + 1) % 4, (group.rank() - 1) % 4
    ring = whole.exchange({after: [torch.full((1,), 1.0 * group.rank())]}, {before: [got[0]]}, "r")
    other = 1 - mine.rank()
    pair.exchange({other: [torch.full((1,), 10.0 * group.rank())]}, {other: [got[1]]}, "p").wait()
    ring.wait()
    assert got[0].item() == before and got[1].item() == 10 * (group.rank() ^ 1)


def test_groups_are_apart(pool):
    pool.run(groups_apart)


def refuse(group):
    lanes, other = lanes_on(group), 1 - group.rank()
    for sends, said in (
        ({group.rank(): []}, "is not another rank"),
        ({2: []}, "is not another rank"),
        ({other: [torch.ones(3, 4).t()]}, "contiguous"),
        ({other: [torch.ones(3, device="meta")]}, "on meta"),
    ):
        with pytest.raises(ConfigError, match=said):
            lanes.exchange(sends, {}, "refused")
    lanes.exchange({}, {}, "nothing").wait()  # and nothing was sent


def test_what_cannot_be_sent_is_refused(pool):
    run_carried(pool, "lanes", refuse, world_size=2)


def without_lanes(group):
    name = dist.new_group().group_name
    told = [lanes_of(name), wanted(name), why_not(name)]
    shared = dist.new_group(backend="tpshm")
    if tpshm.served_by(shared).backend == "tpshm":
        assert lanes_of(shared.group_name, even_on_one_host=True) is None
        assert "share memory" in why_not(shared.group_name)
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    assert lanes_of(alone.group_name) is None and "one rank" in why_not(alone.group_name)
    assert lanes_of("") is None and "one rank" in why_not("")
    return told


def test_a_group_that_gains_nothing_has_none(pool):
    for told in pool.run(without_lanes):
        assert told == [None, False, "its ranks share one host"]
