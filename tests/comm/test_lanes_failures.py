"""Lanes: a rank that dies, is late, errs or does something else is named on all the others."""

from __future__ import annotations

import datetime
import gc
import os
import re
import socket
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_lanes import lanes_on
from tpkernels.comm.lanes import Lanes
from tpkernels.comm.lanes_wire import Lane
from tpkernels.errors import CommunicationError
from tpkernels.testing import RankError, rank_pool


def failure(call):
    """The message and the seconds until it was raised."""
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        call()
    return str(caught.value), time.monotonic() - began


def around_the_ring(lanes, operation="ring", size=4):
    """An exchange with both neighbours."""
    after, before = (lanes.rank + 1) % lanes.size, (lanes.rank - 1) % lanes.size
    sent, received = torch.ones(size), torch.empty(size)
    return lanes.exchange({after: [sent]}, {before: [received]}, operation)


def die(group):
    lanes = lanes_on(dist.new_group())
    around_the_ring(lanes).wait()
    if group.rank() == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        around_the_ring(lanes, "step").wait()
    finally:
        assert time.monotonic() - began < 5


def test_a_rank_that_dies_is_named_at_once(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivor speak
    with pytest.raises(RankError) as caught:
        pools(2).run(die)
    (survivor,) = [each for each in caught.value.failures if each.rank == 0]
    assert isinstance(survivor.exception, CommunicationError)
    assert survivor.message.startswith("step on group ")
    assert "(global ranks [0, 1]) failed on rank 0: no sign of life from rank 1" in survivor.message


def be_late(group, late):
    """Nobody waits for ``late`` but the rank after it, for that the next one, and so on."""
    lanes = lanes_on(dist.new_group())
    if group.rank() == late:
        time.sleep(2.5)
    told = failure(lambda: [around_the_ring(lanes, "step").wait() for _ in range(group.size())])
    again = failure(lambda: around_the_ring(lanes, "another"))
    assert again[0] == told[0] and again[1] < 0.1  # once it has failed, it stays so
    return told


def test_a_rank_that_is_late_is_named(pool):
    """Also where it is not the one that is waited for."""
    results = pool.run(be_late, 1, env={"TPKERNELS_TIMEOUT": "0.8"})
    for rank, (message, seconds) in enumerate(results):
        assert message.startswith("step on group "), message
        assert " within 0.8 s" in message
        if rank == 1:
            assert "gave up" in message and seconds < 0.5
        else:  # who gave up first is a matter of chance
            assert re.search(r"(nothing from|waits for) rank 1 \(global rank\)", message), message
            assert 0.7 < seconds < 2.3


def differ(group, kind):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    lanes = lanes_on(pairs[group.rank() // 2])
    around_the_ring(lanes, "same").wait()
    first, second = ("gather", "gemm") if lanes.rank else ("gemm", "gather")
    if kind == "operation":
        return failure(lambda: around_the_ring(lanes, first).wait())
    if kind == "size":
        return failure(lambda: around_the_ring(lanes, "gather", size=4 + lanes.rank).wait())
    return failure(lambda: [around_the_ring(lanes, name).wait() for name in (first, second)])


@pytest.mark.parametrize("kind", ["operation", "size", "order"])
def test_ranks_that_do_something_else_are_told_what(pool, kind):
    said = [message for message, _ in pool.run(differ, kind)]
    for message in said:
        assert "ranks called different operations or shapes" in message, said
        if kind == "size":
            assert "of 16 bytes" in message and "of 20 bytes" in message
        else:
            assert "gather of 16 bytes" in message and "gemm of 16 bytes" in message


def abandon(group):
    lanes = lanes_on(dist.new_group())
    exchange = around_the_ring(lanes, "step", size=1_000_000)
    if group.rank() == 2:
        lanes.abandon(MemoryError("no room for chunk 1\nmore"), "gemm_reduce_scatter")
        lanes.abandon(ValueError("a second one"))
    if group.rank() == 3:
        time.sleep(0.5)  # computes, and is told in its next call
    # A rank that has all it needs goes on until it needs more of one that gave up.
    steps = range(2 * group.size())
    return failure(lambda: [exchange.wait(), *(around_the_ring(lanes).wait() for _ in steps)])


def test_an_error_of_one_rank_is_told_to_all(pool):
    results = pool.run(abandon)
    for rank, (message, seconds) in enumerate(results):
        assert "gemm_reduce_scatter" in message
        assert "MemoryError: no room for chunk 1" in message and "more" not in message
        assert rank == 2 or "rank 2 (global rank) gave up" in message
        assert seconds < 3


@pytest.fixture
def both_ends():
    """The lanes of two ranks, both in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = []
        for _ in ("data", "control"):
            left = socket.create_connection(listener.getsockname())
            pairs.append((left, listener.accept()[0]))
    (a, b), (c, d) = pairs
    limit = datetime.timedelta(seconds=5)
    ends = [
        Lanes([lane], 1 - lane.peer, "g", [0, 1], limit) for lane in (Lane(1, a, c), Lane(0, b, d))
    ]
    yield ends
    for lanes in ends:
        lanes.abandon(RuntimeError("the test is over"))


def test_an_interrupt_between_a_system_call_and_its_account_ends_the_lanes(both_ends, monkeypatch):
    """What was moved is not known any more."""
    here, there = both_ends
    around_the_ring(here)

    def interrupted(_self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            here.progress()
    assert "KeyboardInterrupt" in failure(here.progress)[0]
    told, seconds = failure(lambda: [around_the_ring(there).wait() for _ in range(2)])
    assert "rank 0 (global rank) gave up: an exchange: KeyboardInterrupt" in told
    assert seconds < 2


def test_what_comes_before_the_end_is_received(both_ends):
    """A rank may leave once it has sent its last message."""
    here, there = both_ends
    here.exchange({1: [torch.ones(1000)]}, {}, "last").wait()
    here.abandon(RuntimeError("it leaves"))
    received = torch.empty(1000)
    there.exchange({}, {0: [received]}, "last").wait()
    assert bool((received == 1).all())
    assert "it leaves" in failure(lambda: around_the_ring(there, "next").wait())[0]


def test_a_rank_that_only_sends_sees_the_other_die(both_ends):
    here, there = both_ends
    for lane in there._lanes.values():  # as the kernel does for a process that ends
        lane.close()
    big = torch.ones(4_000_000)
    told, seconds = failure(lambda: here.exchange({1: [big]}, {}, "step").wait())
    assert "no sign of life from rank 1 (global rank): connection closed" in told
    assert seconds < 2


def test_what_is_no_message_is_named_so(both_ends):
    here, there = both_ends
    next(iter(here._lanes.values())).data.sendall(b"GET / HTTP/1.1" * 20)
    told, _ = failure(lambda: there.exchange({}, {0: [torch.empty(8)]}, "step").wait())
    assert "step on group g" in told and "what is no message" in told


def drop(group):
    made = dist.new_group()
    lanes = lanes_on(made)
    exchange = around_the_ring(lanes)
    exchange.wait()
    sockets = [each for lane in lanes._lanes.values() for each in (lane.data, lane.control)]
    gone = weakref.ref(lanes)
    dist.destroy_process_group(made)
    del made, lanes, exchange
    gc.collect()
    assert gone() is None
    assert {each.fileno() for each in sockets} == {-1}


def test_nothing_outlives_the_group(pool):
    pool.run(drop)
