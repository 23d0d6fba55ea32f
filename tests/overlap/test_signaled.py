"""``signaled``: one GEMM, its chunks sent as their tiles are counted; here interpreted on CPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.interpreted import needs_interpreter
from tests.overlap.samples import integers, part
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.kernels.config import GemmConfig
from tpkernels.overlap import OverlapPlan, gemm_all_reduce
from tpkernels.testing import RankError, assert_two_times, count_collectives

SIGNALED = {"TPKERNELS_OVERLAP": "signaled", "TRITON_INTERPRET": "1"}
UNEVEN = {2: [20, 12], 3: [16, 0, 9]}  # K_r of each rank


def exact(group, rows, columns, sizes, chunks):
    """Values and gradients against the dense layer, without tolerance; four calls, new data."""
    name, rank = resolve_group(group).name, group.rank()
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


@needs_interpreter
@pytest.mark.parametrize("world", [2, 3])
def test_exact_in_any_chunks_call_after_call(pool, world):
    for rows, columns, chunks in ((40, 24, 5), (9, 7, 3), (33, 40, None), (70, 8, 200)):
        pool.run(exact, rows, columns, UNEVEN[world], chunks, world_size=world, env=SIGNALED)


def with_tiles_of_its_own(group):
    """Each rank cuts its GEMM into other tiles and runs another number of programs."""
    from tests.kernels.interpreted import SMALL
    from tpkernels.kernels import launch

    config = (SMALL[0], GemmConfig(32, 16, 16), GemmConfig(64, 64, 16))[group.rank()]
    with (
        patch.object(launch, "default_config", lambda *_: config),
        patch.object(launch, "_INTERPRETED_PROGRAMS", 1 + group.rank()),
    ):
        exact(group, 50, 40, UNEVEN[3], 3)


@needs_interpreter
def test_ranks_that_were_tuned_separately_neither_hang_nor_differ(pool):
    """TP-46: what the ranks must agree on is the chunks, and those come from sizes alone."""
    pool.run(with_tiles_of_its_own, world_size=3, env=SIGNALED)


def in_low_precision(group):
    name, rank = resolve_group(group).name, group.rank()
    torch.manual_seed(0)
    x, weight = torch.randn(24, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    own = [part(t, [32, 32], 1, rank) for t in (x, weight)]
    y = gemm_all_reduce(*own, None, name)
    eager = sum(part(x, [32, 32], 1, r) @ part(weight, [32, 32], 1, r).t() for r in range(2))
    assert_two_times(y, eager, F.linear(x.double(), weight.double()))
    return y


@needs_interpreter
def test_the_same_bits_on_every_rank(pool):
    first, second = pool.run(in_low_precision, world_size=2, env=SIGNALED)
    assert torch.equal(first, second)


def no_rows_or_columns(group):
    name = resolve_group(group).name
    empty = gemm_all_reduce(torch.ones(0, 3), torch.ones(4, 3), torch.ones(4), name)
    none = gemm_all_reduce(torch.ones(3, 3), torch.ones(0, 3), None, name)
    nothing_summed = gemm_all_reduce(torch.ones(3, 0), torch.ones(4, 0), torch.ones(4), name)
    return empty.shape, none.shape, nothing_summed


@needs_interpreter
def test_empty_sizes(pool):
    """TP-23."""
    for empty, none, nothing_summed in pool.run(no_rows_or_columns, world_size=2, env=SIGNALED):
        assert (empty, none) == ((0, 4), (3, 0))
        assert torch.equal(nothing_summed, torch.ones(3, 4))


def fails_between_chunks(group):
    """A collective cannot be started after one chunk was sent; then all is well again."""
    from tpkernels.overlap import signaled

    name, x, weight = resolve_group(group).name, torch.ones(40, 2), torch.ones(3, 2)
    real, sent = signaled.all_reduce_async, []

    def once(*args):
        if sent:
            raise MemoryError("no room")
        sent.append(real(*args))
        return sent[0]

    signaled.all_reduce_async = once
    try:
        with pytest.raises(MemoryError):
            gemm_all_reduce(x, weight, None, name, chunks=4)
    finally:
        signaled.all_reduce_async = real
    assert sent[0]._work is None  # waited for
    return gemm_all_reduce(x, weight, None, name, chunks=4)


@needs_interpreter
def test_an_error_between_chunks_leaves_neither_work_nor_counts(pool):
    for y in pool.run(fails_between_chunks, world_size=2, env=SIGNALED):
        assert torch.equal(y, torch.full((40, 3), 4.0))


def row(group, dtype, reduce_dtype):
    name = resolve_group(group).name
    x, weight = torch.ones(8, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    gemm_all_reduce(x, weight, None, name, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize(
    ("interpret", "dtype", "reduce_dtype", "message"),
    [
        ("0", torch.float32, None, "signaled was asked for, but cannot serve: .*Fix: "),
        ("1", torch.float64, None, "cannot serve: .*float64"),
        ("1", torch.bfloat16, torch.float32, "cannot serve: .*reduce_dtype is torch.float32"),
    ],
    ids=["no_gpu", "float64", "reduce_dtype"],
)
def test_what_it_cannot_serve_is_refused_on_every_rank(
    pool, interpret, dtype, reduce_dtype, message
):
    env = {"TPKERNELS_OVERLAP": "signaled", "TRITON_INTERPRET": interpret}
    with pytest.raises(RankError, match=message) as caught:
        pool.run(row, dtype, reduce_dtype, world_size=2, env=env)
    assert len(caught.value.failures) == 2
    assert isinstance(caught.value.__cause__, ConfigError)
