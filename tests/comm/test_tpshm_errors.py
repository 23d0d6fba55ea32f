"""What goes wrong on ``tpshm`` raises in time on every rank, and names who and what."""

from __future__ import annotations

import datetime
import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_tpshm_semantics import all_gather_single
from tpkernels.comm import collectives
from tpkernels.errors import CommunicationError
from tpkernels.testing import RankError, rank_pool


def new_group(seconds=20.0):
    return dist.new_group(backend="tpshm", timeout=datetime.timedelta(seconds=seconds))


def failure(call):
    """The message and the seconds until it was raised."""
    began = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("it did not raise")


def die(group, asynchronous):
    tpshm = new_group()
    dist.all_reduce(torch.ones(4), group=tpshm)
    if group.rank() == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        work = dist.all_reduce(torch.ones(2, 2), group=tpshm, async_op=asynchronous)
        if asynchronous:
            work.wait()
    finally:
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_dies_is_named(pools, monkeypatch, asynchronous):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivor speak
    with pytest.raises(RankError) as caught:
        pools(2).run(die, asynchronous)
    (survivor,) = [each for each in caught.value.failures if each.rank == 0]
    assert survivor.type_name.endswith("DistBackendError")
    said = r"tpshm: all_reduce\(sum\) of float32 \[2, 2\], operation 2 of group \w+ \(global ranks "
    assert re.match(said + r"\[0, 1\]\): rank 1 \(process \d+\) is gone", survivor.message)


def die_while_connecting(group):
    if group.rank() == 1:
        dist.ProcessGroupGloo = lambda *_, **__: os._exit(3)
    new_group(1.0)


def test_a_rank_that_dies_while_gloo_connects_is_named(pools, monkeypatch):
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivor speak
    with pytest.raises(RankError) as caught:
        pools(2).run(die_while_connecting)
    (survivor,) = [each for each in caught.value.failures if each.rank == 0]
    assert survivor.type_name.endswith("CommunicationError")
    assert "no sign of rank 1 (of the group)" in survivor.message
    assert "TPKERNELS_TIMEOUT" in survivor.message


def be_late(group):
    tpshm = new_group(0.5)
    told = []
    if group.rank() == 1:
        time.sleep(1.5)
    for _ in range(2):  # once it has ended, it stays so
        told.append(failure(lambda: dist.barrier(group=tpshm)))
    limited = new_group()
    limited._get_backend(torch.device("cpu"))._set_default_timeout(datetime.timedelta(seconds=0.5))
    if group.rank() == 0:
        told.append(failure(lambda: dist.all_reduce(torch.ones(1), group=limited)))
    dist.barrier(group)
    return told


def test_a_rank_that_is_late_is_named(pools):
    first, second = pools(2).run(be_late)
    for message, seconds in (first[0], first[2]):
        assert message.startswith("tpshm: ") and "no arrival of rank 1 within 0.5 s" in message
        assert "TPKERNELS_TIMEOUT" in message
        assert 0.4 < seconds < 5
    assert "no arrival of rank 1" in first[1][0] and first[1][1] < 0.4
    for message, seconds in second:  # the late one is told as well
        assert "no arrival of rank 1 within 0.5 s" in message and "This was rank 1" in message
        assert seconds < 0.4


def differ(group, call):
    tpshm, other = new_group(), new_group()
    rank = group.rank()
    told = failure(lambda: CALLS[call][rank](tpshm))
    dist.all_reduce(torch.ones(1), group=other)  # no other group is touched
    return told


def all_reduce(*shape, dtype=torch.float32, op=dist.ReduceOp.SUM, asynchronous=False):
    def call(group):
        work = dist.all_reduce(torch.ones(shape, dtype=dtype), op, group, asynchronous)
        if asynchronous:
            work.wait()

    return call


def gather_four(group):
    all_gather_single(torch.empty(8), torch.ones(4), group=group)


def broadcast_from(root):
    return lambda group: dist.broadcast(torch.ones(4), group_src=root, group=group)


def exchange(sent, received):
    def call(group):
        x = torch.ones(sum(sent))
        dist.all_to_all_single(torch.empty(sum(received)), x, received, sent, group=group)

    return call


CALLS = {
    "operation": (all_reduce(4), gather_four),
    "shape": (all_reduce(4, 3), all_reduce(3, 4)),
    "count": (all_reduce(4), all_reduce(5)),
    "large": (all_reduce(4), all_reduce(2_000_000)),
    "dtype": (all_reduce(4), all_reduce(4, dtype=torch.float64)),
    "reduction": (all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX)),
    "root": (broadcast_from(0), broadcast_from(1)),
    "sizes": (exchange([1, 2], [1, 3]), exchange([1, 1], [2, 1])),
    "asynchronous": (all_reduce(4, asynchronous=True), all_reduce(5, asynchronous=True)),
}
NAMED = {
    "operation": (r"all_reduce\(sum\) of float32 \[4\]", r"all_gather\S* of float32 \[4"),
    "shape": (r"all_reduce\(sum\) of float32 \[4, 3\]", r"all_reduce\(sum\) of float32 \[3, 4\]"),
    "dtype": (r"of float32 \[4\]", r"of float64 \[4\]"),
    "reduction": (r"all_reduce\(sum\)", r"all_reduce\(max\)"),
    "root": (r"broadcast", r"broadcast"),
    "sizes": (r"all_to_all", r"rank [01]"),
}


@pytest.mark.parametrize("call", CALLS)
def test_ranks_that_do_different_things_are_told_both(pools, call):
    """TP-46: on all ranks, at once, and not a hang or a wrong result."""
    for message, seconds in pools(2).run(differ, call):
        assert message.startswith("tpshm: ")
        for pattern in NAMED.get(call, (r"\[4\]", r"\[5\]|\[2000000\]")):
            assert re.search(pattern, message), message
        assert seconds < 5


def fail_asynchronously(group):
    tpshm = new_group()
    works = [dist.all_reduce(torch.ones(4 + group.rank()), group=tpshm, async_op=True)]
    works.append(dist.barrier(group=tpshm, async_op=True))
    told = [failure(work.wait)[0] for work in works]
    assert all(work.is_completed() and not work.is_success() for work in works)
    assert all(work.exception() is not None for work in works)
    for work in works:
        with pytest.raises(RuntimeError, match="tpshm"):
            work.get_future().wait()
    return told


def test_an_asynchronous_failure_is_raised_by_wait_and_the_future(pools):
    for told in pools(2).run(fail_asynchronously):
        assert all("all_reduce" in message for message in told)


def fail_in_our_collectives(group):
    tpshm = new_group()
    began = time.monotonic()
    try:
        collectives.all_reduce(torch.ones(3 + group.rank()), tpshm.group_name)
    except CommunicationError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("it did not raise")


def test_the_message_is_the_backends_and_no_roll_is_called(pools):
    for message, seconds in pools(2).run(fail_in_our_collectives):
        assert message.startswith("tpshm: the ranks of group ") and "[3]" in message
        assert seconds < 1.5  # a roll call takes 3 s where a rank is missing


def refuse(group):
    tpshm = dist.new_group(backend="tpshm")
    two, three = torch.ones(2), torch.ones(3)
    calls = {
        "all_gather": lambda: dist.all_gather([two, three], two.double(), group=tpshm),
        "list": lambda: dist.all_gather([two], two, group=tpshm),
        "single": lambda: all_gather_single(three, two, group=tpshm),
        "splits": lambda: dist.all_to_all_single(three, three.clone(), [1, 1], [1, 2], tpshm),
        "rows": lambda: dist.all_to_all_single(three, three.clone(), group=tpshm),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    dist.barrier(group=tpshm)  # the group is as before
    return told


def test_arguments_that_cannot_be(pools):
    for told in pools(2).run(refuse):
        assert set(told) == {"all_gather", "list", "single", "splits", "rows"}
        assert "list of 1 tensors" in told["list"] and "2 ranks" in told["list"]
        assert "allowed is an output of 2" in told["single"]
        assert "[1, 1]" in told["splits"] and "3 rows" in told["splits"]
        assert "2 ranks do not divide" in told["rows"]


def abort(group):
    tpshm = new_group()
    if group.rank() == 0:
        time.sleep(0.2)
        tpshm._get_backend(torch.device("cpu")).abort()
        return failure(lambda: dist.barrier(group=tpshm))[0]
    return failure(lambda: dist.barrier(group=tpshm))[0]


def test_abort_ends_the_group_on_all_ranks(pools):
    for message in pools(2).run(abort):
        assert "abort() was called on rank 0" in message
