"""``signaled`` on CPU: one thread computes and counts, another sends what is whole.

The counted GEMM of a GPU is in ``tests/kernels/test_tile_counters.py``, its streams in
``test_signaled_cuda.py`` and, on a GPU, in ``tests/gpu/test_signaled.py``.
"""

from __future__ import annotations

import datetime
import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.overlap.carriers import CARRIERS, run_carried
from tests.overlap.samples import integers, part
from tpkernels.comm import messages
from tpkernels.comm.group import resolve_group
from tpkernels.errors import CommunicationError, ConfigError
from tpkernels.overlap import OverlapPlan, gemm_all_reduce, sequence_sizes, signaled, signaled_cpu
from tpkernels.overlap.signaled import gemm_reduce_scatter_signaled
from tpkernels.testing import assert_two_times, count_collectives

SIGNALED = {"TPKERNELS_OVERLAP": "signaled"}
UNEVEN = {2: [20, 12], 3: [16, 0, 9], 4: [8, 3, 0, 21]}  # K_r of each rank


def exact(group, rows, columns, sizes, chunks, tile_rows):
    """Values and gradients against the dense layer, without tolerance; four calls, new data."""
    name, rank = resolve_group(group).name, group.rank()
    signaled_cpu.TILE_ROWS = tile_rows
    for call in range(4):  # TP-10: the counts of one call are not those of the next
        x, weight = integers(call, rows + call, sum(sizes)), integers(9, columns, sum(sizes))
        bias = integers(8, columns)
        own = [
            part(x, sizes, 1, rank).clone().requires_grad_(),
            part(weight, sizes, 1, rank).clone().requires_grad_(),
            bias.clone().requires_grad_(),
        ]
        with count_collectives() as sent:
            y = gemm_all_reduce(*own, name, chunks=chunks)
        torch.testing.assert_close(y, F.linear(x, weight, bias), atol=0, rtol=0)
        assert sent["all_reduce"].bytes == y.numel() * 4
        plan = OverlapPlan("signaled", min(chunks or 4, rows + call, 64), "test")
        assert sent["all_reduce"].calls == len(plan.rows(rows + call)) > 1
        dx, dweight, dbias = torch.autograd.grad(y, own, torch.ones_like(y))
        assert torch.equal(dx, torch.ones_like(y) @ own[1])
        assert torch.equal(dweight, torch.ones_like(y).t() @ own[0])
        assert torch.equal(dbias, torch.full((columns,), float(rows + call)))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_in_any_chunks_call_after_call_TP_10(pool, world):
    for rows, columns, chunks, tile_rows in (
        (40, 24, 5, 8),
        (9, 7, 3, 2),  # tiles that two chunks share
        (33, 40, None, 64),
        (70, 8, 200, 1),
        (300, 8, 2, 50),
    ):
        pool.run(
            exact, rows, columns, UNEVEN[world], chunks, tile_rows, world_size=world, env=SIGNALED
        )


def scattered(group, sizes, columns, features, tile_rows):
    """This rank's rows of four products, new data each, exactly."""
    name, rank = group.group_name, group.rank()
    signaled_cpu.TILE_ROWS = tile_rows
    for call in range(4):
        x, weight = integers(call, sum(sizes), sum(features)), integers(9, columns, sum(features))
        bias = integers(8, columns) if columns % 2 else None
        own_x, own_weight = (part(t, features, 1, rank) for t in (x, weight))
        out = torch.full((sizes[rank], columns), torch.nan)
        with count_collectives() as sent:
            gemm_reduce_scatter_signaled(own_x, own_weight, bias, out, sizes, name)
        expected = part(F.linear(x, weight, bias), sizes, 0, rank)
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
        assert (sent["reduce_scatter"].calls, sent["reduce_scatter"].bytes) == (
            1,
            sum(sizes) * columns * 4,
        )


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_reduce_scatter_is_exact_for_every_split_that_is_served(pool, world, carrier):
    for sizes, columns, tile_rows in (
        (sequence_sizes(40, world), 24, 8),
        (sequence_sizes(41, world), 7, 3),
        ([9] + [2] * (world - 1), 5, 4),
        ([0] * (world - 1) + [6], 8, 64),
        (sequence_sizes(world - 1, world), 3, 1),
    ):
        run_carried(
            pool,
            carrier,
            scattered,
            sizes,
            columns,
            UNEVEN[world],
            tile_rows,
            world_size=world,
            env=SIGNALED,
        )


def refused_split(group):
    with pytest.raises(ConfigError, match=r"cannot serve: .*\[1, 2, 1\] are not of one size"):
        gemm_reduce_scatter_signaled(
            torch.ones(4, 2),
            torch.ones(3, 2),
            None,
            torch.empty(1 + (group.rank() == 1), 3),
            [1, 2, 1],
            resolve_group(group).name,
        )


def test_a_split_that_cannot_be_counted_is_refused_before_anything_is_sent(pool):
    pool.run(refused_split, world_size=3, env=SIGNALED)


def in_low_precision(group):
    name, rank = resolve_group(group).name, group.rank()
    torch.manual_seed(0)
    x, weight = torch.randn(24, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    own = [part(t, [32, 32], 1, rank) for t in (x, weight)]
    y = gemm_all_reduce(*own, None, name)
    eager = sum(part(x, [32, 32], 1, r) @ part(weight, [32, 32], 1, r).t() for r in range(2))
    truth = F.linear(x.double(), weight.double())
    assert_two_times(y, eager, truth)
    wide = gemm_all_reduce(*own, None, name, reduce_dtype=torch.float32)
    assert_two_times(wide, eager, truth)
    kept = torch.empty(12, 16, dtype=torch.bfloat16)
    gemm_reduce_scatter_signaled(*own, None, kept, [12, 12], name)
    assert_two_times(kept, part(eager, [12, 12], 0, rank), part(truth, [12, 12], 0, rank))
    return y


def test_low_precision_and_the_same_bits_on_every_rank(pool):
    first, second = pool.run(in_low_precision, world_size=2, env=SIGNALED)
    assert torch.equal(first, second)


def no_rows_or_columns(group):
    name = resolve_group(group).name
    empty = gemm_all_reduce(torch.ones(0, 3), torch.ones(4, 3), torch.ones(4), name)
    none = gemm_all_reduce(torch.ones(3, 3), torch.ones(0, 3), None, name)
    nothing_summed = gemm_all_reduce(torch.ones(3, 0), torch.ones(4, 0), torch.ones(4), name)
    return empty.shape, none.shape, nothing_summed


def test_empty_sizes_TP_23(pool):
    for empty, none, nothing_summed in pool.run(no_rows_or_columns, world_size=2, env=SIGNALED):
        assert (empty, none) == ((0, 4), (3, 0))
        assert torch.equal(nothing_summed, torch.ones(3, 4))


def in_two_groups(group):
    """Ranks 0, 1 and 1, 2 have a group each beside that of all; calls in turns (TP-44)."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    mine = [group] + [
        pair for pair, ranks in zip(pairs, ([0, 1], [1, 2]), strict=True) if group.rank() in ranks
    ]
    for call in range(3):
        for each in mine:
            rows = 30 + 7 * call + each.size()
            x, weight = integers(call, rows, 4), integers(5, 6, 4)
            y = gemm_all_reduce(x, weight, None, resolve_group(each).name, chunks=3)
            assert torch.equal(y, each.size() * (x @ weight.t()))
    assert len({id(signaled._lanes_of(resolve_group(g).name)) for g in mine}) == len(mine)


def test_groups_that_share_ranks_keep_counts_of_their_own_TP_44(pool):
    pool.run(in_two_groups, env=SIGNALED)


def sends_while_it_computes(group):
    """The first chunk is on its way before the last tile is computed, in inference mode too."""
    name, events = resolve_group(group).name, []
    signaled_cpu.TILE_ROWS = 8
    real_mm, real_send = torch.mm, signaled.all_reduce_async

    def mm(*args, **kw):
        time.sleep(0.02)
        events.append(("tile", threading.get_ident()))
        return real_mm(*args, **kw)

    def send(*args):
        events.append(("send", threading.get_ident()))
        return real_send(*args)

    torch.mm, signaled.all_reduce_async = mm, send
    try:
        with torch.inference_mode():
            y = gemm_all_reduce(torch.ones(64, 2), torch.ones(3, 2), None, name, chunks=4)
    finally:
        torch.mm, signaled.all_reduce_async = real_mm, real_send
    assert torch.equal(y, torch.full((64, 3), 4.0))
    kinds = [kind for kind, _ in events]
    assert kinds.count("tile") == 8 and kinds.count("send") == 4
    assert kinds.index("send") < len(kinds) - 1 - kinds[::-1].index("tile")
    assert len({thread for kind, thread in events if kind == "send"}) == 1
    assert {thread for kind, thread in events if kind == "tile"} == {threading.get_ident()}
    assert threading.get_ident() not in {thread for kind, thread in events if kind == "send"}


def test_chunks_are_sent_while_the_caller_computes(pool):
    pool.run(sends_while_it_computes, world_size=2, env=SIGNALED)


# --- errors -----------------------------------------------------------------------------------


def call(name):
    return gemm_all_reduce(
        torch.ones(40, 2), torch.ones(3, 2), None, name, chunks=4, layer="block.0.down"
    )


def fails_at(group, what, number):
    """``what`` raises in its call ``number``, on all ranks; then all is well again."""
    name, calls, sent = resolve_group(group).name, [], []
    signaled_cpu.TILE_ROWS = 4
    owner, attribute = (torch, "mm") if what == "gemm" else (signaled, "all_reduce_async")
    real = getattr(owner, attribute)

    def once(*args, **kw):
        calls.append(args)
        if len(calls) == number:
            raise MemoryError("no room")
        result = real(*args, **kw)
        sent.append(result)
        return result

    setattr(owner, attribute, once)
    try:
        with pytest.raises(MemoryError, match="no room"):
            call(name)
    finally:
        setattr(owner, attribute, real)
    if what == "send":
        assert all(each._work is None for each in sent)  # waited for
    return call(name)


@pytest.mark.parametrize(
    ("what", "number"), [("send", 1), ("send", 2), ("send", 4), ("gemm", 1), ("gemm", 6)]
)
def test_an_error_in_either_thread_reaches_the_caller_and_leaves_nothing(pool, what, number):
    for y in pool.run(fails_at, what, number, world_size=2, env=SIGNALED):
        assert torch.equal(y, torch.full((40, 3), 4.0))


def scatter_fails(group, what):
    """In the exchange or in the GEMM, on all ranks at one place; then all is well again."""
    name, rank, calls = group.group_name, group.rank(), []
    signaled_cpu.TILE_ROWS = 4
    owner, attribute = (torch, "mm") if what == "gemm" else (messages.Messages, "start")
    real = getattr(owner, attribute)

    def scatter():
        out = torch.full((8, 3), torch.nan)
        gemm_reduce_scatter_signaled(
            torch.ones(8 * group.size(), 2), torch.ones(3, 2), None, out, [8] * group.size(), name
        )
        return out

    def third(*args, **kw):
        calls.append(rank)
        if len(calls) == (3 if what == "gemm" else 2):
            raise MemoryError("no room")
        return real(*args, **kw)

    setattr(owner, attribute, third)
    try:
        with pytest.raises(MemoryError, match="no room"):
            scatter()
    finally:
        setattr(owner, attribute, real)
    return scatter()


@pytest.mark.parametrize("what", ["gemm", "send"])
def test_after_an_error_of_a_reduce_scatter_all_is_well_again(pool, what):
    for y in run_carried(pool, "gloo", scatter_fails, what, world_size=3, env=SIGNALED):
        assert torch.equal(y, torch.full((8, 3), 6.0))


def fails_alone(group):
    """Rank 1's GEMM fails: rank 0 gets an error with names, within its time limit."""
    limited = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if group.rank() > 1:
        return
    name, real = limited.group_name, torch.mm
    if group.rank() == 0:
        with pytest.raises(CommunicationError, match=r"layer block\.0\.down, gemm_all_reduce: "):
            call(name)
        dist.destroy_process_group(limited)  # else the pool takes the ranks for out of step
        return

    def no_room(*args, **kw):
        raise MemoryError("no room")

    torch.mm = no_room
    try:
        with pytest.raises(MemoryError):
            call(name)
    finally:
        torch.mm = real
    dist.destroy_process_group(limited)


def test_a_rank_that_fails_alone_ends_the_others_call_by_name(pool):
    pool.run(fails_alone, env=SIGNALED)


def ends_with_its_group(group):
    """A group that is gone takes its thread with it."""

    def couriers():
        return [t for t in threading.enumerate() if t.name == "tpkernels-signaled"]

    before = len(couriers())
    own = dist.new_group([0, 1])
    if group.rank() > 1:
        return
    call(own.group_name)
    assert len(couriers()) == before + 1
    dist.destroy_process_group(own)
    del own
    gc.collect()
    end = time.monotonic() + 5
    while len(couriers()) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(couriers()) == before


def test_a_group_s_thread_ends_with_it(pool):
    pool.run(ends_with_its_group, env=SIGNALED)
