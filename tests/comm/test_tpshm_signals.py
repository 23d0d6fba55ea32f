"""Signals while a rank waits on ``tpshm``; processes that end without destroying their groups."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.comm.test_tpshm_errors import failure, new_group
from tpkernels import native
from tpkernels.testing import RankPool

pytestmark = pytest.mark.skipif(
    not native.status().available, reason="tpshm is compiled; this machine has none"
)


class Alarm:
    """``handler`` is called a while after the block is entered."""

    def __init__(self, handler, seconds=0.3):
        self.handler, self.seconds = handler, seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self.handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def waits(tpshm, how):
    x = torch.ones(2, 3)
    if how == "all_reduce":
        dist.all_reduce(x, group=tpshm)
    elif how == "wait":
        dist.all_reduce(x, group=tpshm, async_op=True).wait()
    elif how == "the second wait":
        dist.all_reduce(x, group=tpshm, async_op=True)
        dist.all_gather_single(torch.ones(4, 3), x, group=tpshm, async_op=True).wait()
    elif how == "a wait with a limit":
        dist.all_reduce(x, group=tpshm, async_op=True).wait(datetime.timedelta(seconds=20))
    elif how == "another thread's turn":
        other = threading.Thread(target=failure, args=(lambda: dist.barrier(group=tpshm),))
        other.start()
        time.sleep(0.1)
        try:
            dist.all_reduce(x, group=tpshm)
        finally:
            other.join()
    elif how == "barrier":
        dist.barrier(group=tpshm)
    else:
        tpk.comm.all_reduce_(x, tpshm)


def interrupted(group, how):
    tpshm = new_group()
    dist.barrier(group=tpshm)
    if group.rank() == 1:
        time.sleep(1.0)
        return failure(lambda: dist.all_reduce(torch.ones(2, 3), group=tpshm))
    began = time.monotonic()
    with Alarm(signal.default_int_handler):  # as for Ctrl-C
        try:
            waits(tpshm, how)
        except KeyboardInterrupt:
            seconds = time.monotonic() - began
    return failure(lambda: dist.barrier(group=tpshm))[0], seconds


@pytest.mark.parametrize(
    "how",
    [
        "all_reduce",
        "all_reduce_",
        "barrier",
        "wait",
        "the second wait",
        "a wait with a limit",
        "another thread's turn",
    ],
)
def test_an_interrupt_ends_the_wait_and_tells_the_others(pools, how):
    (then, seconds), (theirs, their_seconds) = pools(2).run(interrupted, how)
    assert seconds < 0.95, "it waited for the other rank"
    for said in (then, theirs):
        assert re.search(r"rank 0 (of group \w+ )?was interrupted by a signal", said)
        assert "Fix: make a new group" in said
    assert their_seconds < 1


def handled(group, asynchronous):
    tpshm = new_group()
    called = []
    x = torch.ones(3)
    if group.rank() == 1:
        time.sleep(0.6)
        dist.all_reduce(x, group=tpshm)
    else:
        with Alarm(lambda *_: called.append(time.monotonic())):
            work = dist.all_reduce(x, group=tpshm, async_op=asynchronous)
            if asynchronous:
                work.wait()
            ended = time.monotonic()
        assert ended - called[0] > 0.1, "the handler ran only after the wait"
    dist.all_reduce(x, group=tpshm)
    return len(called), x.tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_handler_that_returns_does_not_end_the_wait(pools, asynchronous):
    assert pools(2).run(handled, asynchronous) == [(1, [4.0] * 3), (0, [4.0] * 3)]


def nested(group, asynchronous):
    tpshm = new_group()
    dist.barrier(group=tpshm)
    if group.rank() == 1:
        time.sleep(0.6)
        return failure(lambda: dist.all_reduce(torch.ones(1), group=tpshm))[0]

    def handler(*_):
        work = dist.all_reduce(torch.ones(1), group=tpshm, async_op=asynchronous)
        if asynchronous:
            work.wait()

    with Alarm(handler):
        return failure(lambda: dist.barrier(group=tpshm))[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_collective_in_a_handler_is_refused_not_waited_for(pools, asynchronous):
    ours, theirs = pools(2).run(nested, asynchronous)
    assert "a signal handler calls a collective" in ours and "set a flag" in ours
    assert "rank 0 was interrupted by a signal" in theirs


def make_alone(group):
    if group.rank() == 1:
        time.sleep(0.8)
        return None
    began = time.monotonic()
    with Alarm(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        dist.new_group([0, 1], backend="tpshm")
    return time.monotonic() - began


def test_an_interrupt_ends_the_wait_for_a_group_that_is_made():
    with RankPool(2) as pool:  # which loses count of its groups
        assert pool.run(make_alone)[0] < 0.7


def forked(group):
    tpshm = new_group()
    if group.rank() == 1:
        time.sleep(0.5)
        dist.all_reduce(torch.ones(3), group=tpshm)
        return None
    work = dist.all_reduce(torch.ones(3), group=tpshm, async_op=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = failure(work.wait)[0] if not work.is_completed() else "completed"
        os.write(writing, said.encode())
        os._exit(0)
    work.wait()
    assert os.waitpid(child, 0)[1] == 0
    return os.read(reading, 1000).decode()


def test_a_forked_child_does_not_wait(pools):
    assert "this process is a fork of rank 0" in pools(2).run(forked)[0]


EXITS = """
import atexit, os, sys, threading, time, torch, torch.distributed as dist

def late():  # called after what comes to an end at the exit
    works = [dist.all_reduce(x, async_op=True) for _ in range(20)]
    time.sleep(0.05)
    works[0].get_future().wait()
    for work in works:
        work.wait()

if sys.argv[1] == "late":
    atexit.register(late)
torch.set_num_threads(1)
how, store, rank = sys.argv[1:]
dist.init_process_group("tpshm", init_method="file://" + store, rank=int(rank), world_size=2)
x = torch.ones(1000)
for _ in range(3):
    tpshm = dist.new_group(backend="tpshm")
    works = [dist.all_reduce(x, group=tpshm, async_op=True) for _ in range(20)]
    if how == "wait":
        for work in works:
            work.wait()
    elif how == "sleep":  # the group's thread does them
        time.sleep(0.05)
    elif how == "then":
        for work in works:
            work.get_future().then(lambda future: future.value()[0].sum())
    else:
        del works
if how == "alone" and dist.get_rank() == 0:
    dist.all_reduce(x, async_op=True)
if how == "fork":
    work = dist.all_reduce(x, async_op=True)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # which destroys copies of all that the parent has
    work.wait()
    assert os.waitpid(child, 0)[1] == 0
if how == "daemon" and dist.get_rank() == 0:  # threads wait for what does not come
    work = dist.all_reduce(x, async_op=True)
    for wait in (work.wait, lambda: dist.barrier(group=tpshm)):
        threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)
elif how == "daemon":
    time.sleep(3)
"""


@pytest.mark.parametrize(
    "how", ["wait", "sleep", "then", "leave", "alone", "daemon", "fork", "late"]
)
def test_a_process_may_end_without_destroying_its_groups(how, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITS, how, str(tmp_path / "store"), str(rank)],
            env={k: v for k, v in os.environ.items() if not k.startswith("TPKERNELS_")},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
