"""Who is missing after a failure: asked once, and right where the store is lost on the way."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tpkernels.comm import liveness
from tpkernels.comm.liveness import missing_ranks


class Store:
    """A store in which these ranks' marks appear; after ``checks`` looks it is lost."""

    def __init__(self, marks, checks=10**6, lost=lambda: None):
        self.marks = {f"tpkernels/alive/g/{rank}" for rank in marks}
        self.left, self.lost, self.sets = checks, lost, 0

    def set(self, key, value):
        self.sets += 1
        self.marks.add(key)

    def check(self, keys):
        self.left -= 1
        if self.left < 0:
            self.lost()
            raise dist.DistNetworkError("Connection reset by peer")
        return keys[0] in self.marks


@pytest.fixture
def ask(monkeypatch):
    """``missing_ranks`` on a rank of a group of three that has this store."""
    monkeypatch.setattr(liveness, "_answers", {})
    monkeypatch.setattr(liveness, "GRACE", 0.1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])

    def ask(store, rank=1):
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return missing_ranks(SimpleNamespace(group_name="g"))

    return ask


def test_a_failure_and_those_in_its_wake_ask_once(ask, monkeypatch):
    store = Store({0})
    assert ask(store) == [2] and store.sets == 1
    asked, begin = store.left, time.monotonic()
    assert [ask(store) for _ in range(50)] == [[2]] * 50
    assert store.left == asked and time.monotonic() - begin < liveness.GRACE
    passed = time.monotonic() + liveness.REMEMBERED
    monkeypatch.setattr(time, "monotonic", lambda: passed)
    store.set("tpkernels/alive/g/2", "failed")
    assert ask(store) == []


def test_threads_that_fail_together_ask_once(ask):
    store, told = Store({0}), []
    threads = [threading.Thread(target=lambda: told.append(ask(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [[2]] * 4 and store.sets == 1


@pytest.mark.parametrize("checks", [0, 1, 2, 3], ids="lost after {} looks".format)
@pytest.mark.parametrize("rank", [1, 2])
def test_without_a_store_rank_0_alone_is_named(ask, rank, checks):
    assert ask(Store(set(), checks), rank) == [0]


def test_a_store_that_is_frozen_is_given_up(ask):
    thaw = threading.Event()
    assert ask(Store(set(), 0, lost=thaw.wait)) == [0]
    thaw.set()


def test_rank_0_may_leave_after_its_own_mark(ask):
    assert ask(Store({0}, checks=4)) == [2]


def test_no_rank_names_itself(ask):
    assert ask(Store({1, 2}, checks=0), rank=0) == []
