"""Activation recomputation: no collective twice for nothing, and the same plan either way."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.overlap.samples import normals, part
from tpkernels.comm.group import resolve_group
from tpkernels.overlap import column_gemm_act, gemm_all_reduce, mlp
from tpkernels.testing import count_collectives

SIZES = [3, 2]


def block(kind, name):
    """A block that ends in the row GEMM, as two ops or as one."""

    def two_ops(x, w_up, w_down):
        (h,) = column_gemm_act(x, [w_up], [None], "gelu", name)
        return gemm_all_reduce(h, w_down, None, name)

    def one_op(x, w_up, w_down):
        return mlp(x, w_up, None, w_down, None, act="gelu", group_name=name)

    return two_ops if kind == "two ops" else one_op


def recomputed(group, kind, use_checkpoint):
    """Value, gradients, and the collectives of forward and of backward, of two blocks."""
    name, rank = resolve_group(group).name, group.rank()
    run = block(kind, name)
    leaves = [
        normals(1, 4, 6),
        part(normals(2, 5, 6), SIZES, 0, rank).clone(),
        part(normals(3, 6, 5), SIZES, 1, rank).clone(),
    ]
    leaves = [t.requires_grad_() for t in leaves]
    y = leaves[0]
    with count_collectives() as forward:
        for _ in range(2):
            if use_checkpoint:
                y = checkpoint(run, y, *leaves[1:], use_reentrant=False)
            else:
                y = run(y, *leaves[1:])
    with count_collectives() as backward:
        gradients = torch.autograd.grad(y.sum(), leaves)
    return [y, *gradients], forward.total.calls, backward.total.calls


@pytest.mark.parametrize("kind", ["two ops", "one op"])
def test_the_last_all_reduce_is_not_repeated(pool, kind):
    """TP-51: two blocks: two all-reduces forward; backward two of dX and none recomputed."""
    plain = pool.run(recomputed, kind, False, world_size=2)
    again = pool.run(recomputed, kind, True, world_size=2)
    for (values, *calls), (expected, *expected_calls) in zip(again, plain, strict=True):
        assert calls == expected_calls == [2, 2]
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def held_memory(group, kind, steps):
    """Tensors alive after each step of training under full recomputation."""
    alive = []
    for _ in range(steps):
        recomputed(group, kind, True)
        gc.collect()
        alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    return alive


@pytest.mark.parametrize("kind", ["two ops", "one op"])
def test_nothing_is_kept_from_step_to_step(pool, kind):
    """TP-51: a leak of one tensor a step would make at least 6 in 6; PyTorch may cache one."""
    for alive in pool.run(held_memory, kind, 8, world_size=2):
        assert alive[-1] - alive[1] < 6, alive


def calls_by_grad_mode(group):
    """Collectives of one forward with and without gradients, plain and under recomputation."""
    name = resolve_group(group).name
    x, weight = torch.ones(8, 2), torch.ones(3, 2, requires_grad=True)
    seen = {}
    with count_collectives() as counts:
        y = gemm_all_reduce(x, weight, None, name)
    seen["grad"] = counts.total.calls
    with count_collectives() as counts, torch.no_grad():
        gemm_all_reduce(x, weight, None, name)
    seen["no_grad"] = counts.total.calls
    with count_collectives() as counts, torch.inference_mode():
        gemm_all_reduce(x, weight, None, name)
    seen["inference"] = counts.total.calls
    with count_collectives() as counts:
        # reentrant: forward runs without gradients, and all of it again in backward
        inner = checkpoint(lambda w: gemm_all_reduce(x, w, None, name), weight, use_reentrant=True)
    seen["reentrant forward"] = counts.total.calls
    with count_collectives() as counts:
        inner.sum().backward()
    seen["reentrant backward"] = counts.total.calls
    assert torch.equal(y, inner)
    return seen


@pytest.mark.parametrize(("strategy", "chunks"), [("chunked", 4), ("off", 1)])
def test_chunks_do_not_depend_on_the_grad_mode(pool, strategy, chunks):
    """TP-52."""
    seen = pool.run(calls_by_grad_mode, world_size=2, env={"TPKERNELS_OVERLAP": strategy})
    for modes in seen:
        assert set(modes.values()) == {chunks}, modes


def dropped_on_one_rank(group):
    name = resolve_group(group).name
    weight = torch.ones(3, 2, requires_grad=True)
    y = gemm_all_reduce(torch.ones(4, 2), weight, None, name, chunks=2)
    (h,) = column_gemm_act(y, [torch.ones(2, 3)], [None], "gelu", name)
    if group.rank() == 0:  # its graph, with a backward that would communicate, goes unused
        del y, h
        gc.collect()
    return gemm_all_reduce(torch.ones(4, 2), torch.ones(3, 2), None, name).sum().item()


def test_a_graph_dropped_on_one_rank_sends_nothing(pool):
    """TP-50."""
    assert pool.run(dropped_on_one_rank, world_size=2) == [48.0, 48.0]
