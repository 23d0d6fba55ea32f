"""A rank that sleeps, is late, errs, is interrupted or dies in the middle of an overlapped op."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.overlap.carriers import CARRIERS, run_carried, use_carrier
from tests.overlap.samples import integers
from tpkernels import native
from tpkernels.comm import liveness, tpshm
from tpkernels.comm.messages import Messages
from tpkernels.errors import CommunicationError
from tpkernels.overlap import all_gather_gemm, column_gemm_act, gemm_all_reduce, gemm_reduce_scatter
from tpkernels.testing import RankError, rank_pool

LAYER = "encoder.0.mlp"


@contextlib.contextmanager
def before_gemm(number, do):
    """``do`` is called before the GEMM of that number (from 1 on) that this rank runs."""
    real, seen = torch.mm, []

    def mm(*args, **options):
        seen.append(args)
        if len(seen) == number:
            do()
        return real(*args, **options)

    torch.mm = mm
    try:
        yield
    finally:
        torch.mm = real


def step(op, name):
    """Forward and backward of an op in chunks: everything it gives, of integers."""
    x, weight = integers(1, 12, 4).requires_grad_(), integers(2, 6, 4).requires_grad_()
    where = {"chunks": 3, "layer": LAYER}
    if op == "all_gather_gemm":
        gathered, (y,) = all_gather_gemm(x, [weight], None, "none", name, **where)
        outputs = [gathered, y]
    elif op == "gemm_reduce_scatter":
        outputs = [gemm_reduce_scatter(x, weight, None, name, **where)]
    elif op == "gemm_all_reduce":
        outputs = [gemm_all_reduce(x, weight, None, name, **where)]
    else:
        outputs = column_gemm_act(x, [weight], [None], "none", name, layer=LAYER)
    gradients = torch.autograd.grad(outputs[-1].sum(), [x, weight])
    return [*(y.detach() for y in outputs), *gradients]


OPS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "column_gemm_act")
BACKWARD = OPS[:2]  # whose eighth GEMM is one of an overlapped backward, whatever carries it
CHUNKED = {"TPKERNELS_OVERLAP": "chunked"}


def sleeps(group, op, seconds):
    """Rank 0 sleeps before the op; rank 1 in the middle of it, and in the middle of backward."""
    name = group.group_name
    results = [step(op, name)]
    if group.rank() == 0:
        time.sleep(seconds)
    for number in (2, 8) if op in BACKWARD else (2,):
        seen = []
        with before_gemm(number, lambda seen=seen: seen.append(time.sleep(seconds))):
            if group.rank() == 1:
                results.append(step(op, name))
        if group.rank() == 0:
            results.append(step(op, name))
        assert len(seen) == group.rank()
    return results


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_sleeps_changes_nothing_but_time(pool, carrier, op):
    check_all_equal(run_carried(pool, carrier, sleeps, op, 0.2, world_size=2, env=CHUNKED))


@pytest.mark.slow
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rank_that_sleeps_for_five_seconds_does_neither(pool, carrier):
    results = run_carried(
        pool, carrier, sleeps, "gemm_reduce_scatter", 5.0, world_size=2, env=CHUNKED,
        timeout=60,
    )  # fmt: skip
    check_all_equal(results)


def check_all_equal(results):
    for expected, *others in results:
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


# --- one rank fails, and the others are told over what carries their messages ------------------

LIMIT = 2.0


def told(call):
    """The message of the error, and the seconds until it was raised."""
    began = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        call()
    return str(caught.value), time.monotonic() - began


def raise_memory_error():
    raise MemoryError("no room for chunk 1")


def one_errs(group, op, busy):
    """Rank 1 raises in the middle of the op, and is then busy with something else for a while."""
    name = group.group_name
    step(op, name)  # they have met
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "GRACE", 0.5)
        if group.rank() == 0:
            return told(lambda: step(op, name))
        began = time.monotonic()
        with before_gemm(2, raise_memory_error), pytest.raises(MemoryError):
            step(op, name)
        seconds = time.monotonic() - began
        time.sleep(busy)
        return "", seconds


def check_named(message, op, rank):
    """With its layer, its operation, and who is to blame."""
    assert re.match(rf"layer {LAYER}, {op}(\.backward)?: ", message), message
    assert f"rank {rank}" in message.split(": ", 2)[2].replace("on rank 0", ""), message


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_error_of_one_rank_is_told_to_the_other(pool, carrier):
    """At once over lanes, and why; elsewhere within the time limit, as one who is late."""
    op, env = "gemm_reduce_scatter", {"TPKERNELS_TIMEOUT": str(LIMIT)}
    busy = 0.2 if carrier == "lanes" else LIMIT + 1.0
    (message, seconds), (_, spent) = run_carried(
        pool, carrier, one_errs, op, busy, world_size=2, limit=LIMIT, env=env
    )
    check_named(message, op, 1)
    assert spent < 1  # what it had started ended by itself
    if carrier == "lanes":
        assert "rank 1 (global rank) gave up: reduce_scatter: MemoryError: no room" in message
        assert seconds < 1
    else:
        assert 0.5 * LIMIT < seconds < LIMIT + 2.0


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_all_reduce", "column_gemm_act"])
def test_every_op_names_itself_and_its_layer(pool, op):
    env = {**CHUNKED, "TPKERNELS_TIMEOUT": "20"}
    (message, seconds), _ = run_carried(pool, "lanes", one_errs, op, 0.2, world_size=2, env=env)
    check_named(message, "column_backward" if op == "column_gemm_act" else op, 1)
    assert "MemoryError: no room for chunk 1" in message
    assert seconds < 1


def one_is_late(group, op):
    name = group.group_name
    step(op, name)
    if group.rank() == 0:
        return told(lambda: step(op, name))
    with before_gemm(2, lambda: time.sleep(1.6)):
        return told(lambda: step(op, name))


@pytest.mark.parametrize("carrier", CARRIERS[1:])
def test_a_rank_that_is_late_is_named(pool, carrier):
    op, env = "gemm_reduce_scatter", {"TPKERNELS_TIMEOUT": "0.6"}
    (message, seconds), (late, _) = run_carried(
        pool, carrier, one_is_late, op, world_size=2, env=env
    )
    check_named(message, op, 1)
    assert 0.3 < seconds < 1.5
    check_named(late, op, 0)


DYING = 3
TOLD = ("gloo", "lanes", *(["tpshm"] if native.status().available else []))


def fails_in_all(op, names, do):
    """``do`` in the second GEMM of the op in the last group, that in the second of the one before.

    So that one rank is in the middle of the op in all of its groups when it fails.
    """
    if not names:
        return do()
    with before_gemm(2, lambda: fails_in_all(op, names[1:], do)):
        return step(op, names[0])


def one_dies(group, op):
    """Each of the other ranks is in the middle of the op with it, over another carrier."""
    tpshm.register()
    groups = []
    for rank, carrier in enumerate(TOLD):
        backend = "tpshm" if carrier == "tpshm" else "gloo"
        groups.append(dist.new_group([rank, DYING], backend=backend))
        if group.rank() in (rank, DYING):
            use_carrier(groups[rank], carrier)
            step(op, groups[rank].group_name)  # they have met
    if group.rank() == DYING:
        fails_in_all(op, [each.group_name for each in groups], lambda: os._exit(3))
    if group.rank() < len(TOLD):
        message, seconds = told(lambda: step(op, groups[group.rank()].group_name))
        raise CommunicationError(f"{message}; after {seconds:.1f} s")


def test_a_rank_that_dies_is_named(pool, monkeypatch):
    """As soon as its connections close."""
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 15.0)  # let the survivors speak
    op = "gemm_reduce_scatter"
    with pytest.raises(RankError) as caught:
        pool.run(one_dies, op, env={"TPKERNELS_TIMEOUT": "60"})
    said = {each.rank: each.message for each in caught.value.failures}
    for rank in range(len(TOLD)):
        check_named(said[rank], op, DYING)
        assert float(said[rank].split()[-2]) < 15


# --- all ranks fail at the same place --------------------------------------------------------


@contextlib.contextmanager
def started_transfers():
    """All that are started inside."""
    started, start = [], Messages.start

    def recording(*args):
        started.append(start(*args))
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "start", recording)
        yield started


def errs_everywhere(group, op, number):
    """What this rank was told, and when the group was used again."""
    name = group.group_name
    expected = step(op, name)
    # Over lanes the other rank may hear of it before it comes to its own.
    expected_errors = (MemoryError, CommunicationError)
    with (
        before_gemm(number, raise_memory_error),
        started_transfers() as started,
        pytest.raises(expected_errors) as caught,
    ):
        step(op, name)
    assert not any(getattr(transfer._exchange, "_works", None) for transfer in started)
    try:
        again = step(op, name)
    except CommunicationError as error:
        return str(caught.value), str(error)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    return str(caught.value), ""


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("op", "number"),
    [
        ("all_gather_gemm", 2),
        ("all_gather_gemm", 8),  # in backward
        ("gemm_reduce_scatter", 2),
        ("gemm_reduce_scatter", 8),  # in backward
        ("gemm_all_reduce", 2),
        ("column_gemm_act", 2),  # in backward
    ],
)
def test_an_error_between_two_chunks_leaves_nothing_pending(pool, carrier, op, number):
    """The group can be used again, or says why it cannot."""
    results = run_carried(pool, carrier, errs_everywhere, op, number, world_size=2, env=CHUNKED)
    for rank, (first, later) in enumerate(results):
        if carrier != "lanes":
            assert (first, later) == ("no room for chunk 1", "")
        else:
            assert later.startswith(f"layer {LAYER}, "), later
            assert "MemoryError: no room for chunk 1" in later
            assert f"failed on rank {rank}: " in later


# --- Ctrl-C ----------------------------------------------------------------------------------


def interrupt(*_):
    raise KeyboardInterrupt


def is_interrupted(group, op):
    """Rank 1 waits for rank 0 and is interrupted; what it said and what the other heard."""
    name = group.group_name
    expected = step(op, name)
    last = {"all_gather_gemm": 1, "gemm_reduce_scatter": 4, "gemm_all_reduce": 3}[op]
    message = ""
    if group.rank() == 0:
        with before_gemm(1, lambda: time.sleep(0.8)):
            try:
                first = forward(op, name)
            except CommunicationError as error:
                message = str(error)
            else:
                assert torch.equal(first, expected[0])
    else:
        before = signal.signal(signal.SIGALRM, interrupt)
        alarm = before_gemm(last, lambda: signal.setitimer(signal.ITIMER_REAL, 0.3))
        with alarm, pytest.raises(KeyboardInterrupt):
            forward(op, name)
        signal.signal(signal.SIGALRM, before)
    try:
        again = step(op, name)
    except CommunicationError as error:
        return message, str(error)
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    return message, ""


def forward(op, name):
    with torch.no_grad():
        x, weight = integers(1, 12, 4), integers(2, 6, 4)
        where = {"chunks": 3, "layer": LAYER}
        if op == "all_gather_gemm":
            return all_gather_gemm(x, [weight], None, "none", name, **where)[0]
        function = gemm_reduce_scatter if op == "gemm_reduce_scatter" else gemm_all_reduce
        return function(x, weight, None, name, **where)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("op", OPS[1:3])
def test_ctrl_c_in_a_wait(pool, carrier, op):
    """What the other rank was sent it has; after that, the group goes on or says why it cannot."""
    heard, own = run_carried(pool, carrier, is_interrupted, op, world_size=2)
    reason = {"lanes": "KeyboardInterrupt", "tpshm": "was interrupted by a signal"}.get(carrier)
    for message in (heard[0], heard[1], own[1]):
        assert not message or message.startswith(f"layer {LAYER}, {op}: "), message
        assert not message or (reason and reason in message and "rank 1" in message), message
    assert bool(heard[1]) == bool(own[1]) == (carrier != "gloo")


# --- asymmetric arrival ------------------------------------------------------------------------


def drifts(group, calls):
    """Ranks that come at other times to every call, with gradients accumulated over all."""
    name, rank = group.group_name, group.rank()
    weight = integers(3, 6, 4).requires_grad_()
    for call in range(calls):
        time.sleep(0.02 * ((rank + call) % 3))
        x = integers(10 * call + rank, 4, 4)
        _, (h,) = all_gather_gemm(x, [weight], None, "relu", name, chunks=2)
        gemm_reduce_scatter(h, weight.t(), None, name, chunks=3).sum().backward()
    return weight.grad


def accumulated(world, calls):
    """The same on one rank: ranks' weights are copies, and each has the gradient of its copy."""
    grads = []
    for rank in range(world):
        copies = [integers(3, 6, 4).requires_grad_() for _ in range(world)]
        for call in range(calls):
            x = torch.cat([integers(10 * call + r, 4, 4) for r in range(world)])
            torch.stack([torch.relu(x @ w.t()) @ w for w in copies]).sum().backward()
        grads.append(copies[rank].grad)
    return grads


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gradients_accumulate_whoever_comes_first(pool, carrier):
    results = run_carried(pool, carrier, drifts, 4, world_size=3)
    assert all(torch.equal(a, b) for a, b in zip(results, accumulated(3, 4), strict=True))
