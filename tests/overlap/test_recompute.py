"""Activation recomputation: no collective twice for nothing, and the same plan either way."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.overlap.samples import normals, part
from tpkernels.comm.group import resolve_group
from tpkernels.overlap import (
    all_gather_gemm,
    column_gemm_act,
    gemm_all_reduce,
    gemm_reduce_scatter,
    mlp,
)
from tpkernels.testing import count_collectives

SIZES = [3, 2]


def block(kind, name):
    """A block that ends in the row GEMM, as two ops or as one."""

    def two_ops(x, w_up, w_down):
        (h,) = column_gemm_act(x, [w_up], [None], "gelu", name)
        return gemm_all_reduce(h, w_down, None, name)

    def one_op(x, w_up, w_down):
        return mlp(x, w_up, None, w_down, None, act="gelu", group_name=name)

    def sequence(x, w_up, w_down):
        _, (h,) = all_gather_gemm(x, [w_up], None, "gelu", name, chunks=1)
        return gemm_reduce_scatter(h, w_down, None, name, chunks=1)

    return {"two ops": two_ops, "one op": one_op, "sequence": sequence}[kind]


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


def test_the_last_reduce_scatter_is_not_repeated(pool):
    """TP-51: of two blocks, each an all-gather and a reduce-scatter forward.

    Backward: for each a gather of dY, and one of x with a reduce-scatter of dX; the gather of the
    forward is repeated, as h is not kept, and the reduce-scatter is not.
    """
    plain = pool.run(recomputed, "sequence", False, world_size=2)
    again = pool.run(recomputed, "sequence", True, world_size=2)
    for (values, *calls), (expected, *expected_calls) in zip(again, plain, strict=True):
        assert (expected_calls, calls) == ([4, 6], [4, 8])
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


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


@pytest.mark.parametrize("kind", ["two ops", "one op", "sequence"])
def test_nothing_is_kept_from_step_to_step(pool, kind):
    """TP-51: a leak of one tensor a step would make at least 6 in 6; PyTorch may cache one."""
    for alive in pool.run(held_memory, kind, 8, world_size=2):
        assert alive[-1] - alive[1] < 6, alive


def calls_by_grad_mode(group, op):
    """Collectives of one forward with and without gradients, plain and under recomputation."""
    name = resolve_group(group).name
    x, weight = torch.ones(8, 2), torch.ones(3, 2, requires_grad=True)
    run = {
        "gemm_all_reduce": lambda w: gemm_all_reduce(x, w, None, name),
        "gemm_reduce_scatter": lambda w: gemm_reduce_scatter(x, w, None, name),
        "all_gather_gemm": lambda w: all_gather_gemm(x[:4], [w], None, "none", name)[1][0],
    }[op]
    seen = {}
    with count_collectives() as counts:
        y = run(weight)
    seen["grad"] = counts.total.calls
    with count_collectives() as counts, torch.no_grad():
        run(weight)
    seen["no_grad"] = counts.total.calls
    with count_collectives() as counts, torch.inference_mode():
        run(weight)
    seen["inference"] = counts.total.calls
    with count_collectives() as counts:
        # reentrant: forward runs without gradients, and all of it again in backward
        inner = checkpoint(run, weight, use_reentrant=True)
    seen["reentrant forward"] = counts.total.calls
    with count_collectives() as plain:
        y.sum().backward()
    with count_collectives() as counts:
        inner.sum().backward()
    seen["reentrant backward"] = counts.total.calls - plain.total.calls
    assert torch.equal(y, inner)
    return seen


@pytest.mark.parametrize(
    ("op", "strategy", "chunks"),
    [
        ("gemm_all_reduce", "chunked", 4),
        ("gemm_all_reduce", "off", 1),
        ("gemm_reduce_scatter", "chunked", 2),  # of each rank's rows
        ("all_gather_gemm", "chunked", 2),
        ("all_gather_gemm", "off", 1),
    ],
)
def test_chunks_do_not_depend_on_the_grad_mode(pool, op, strategy, chunks):
    """TP-52."""
    env = {"TPKERNELS_OVERLAP": strategy}
    for modes in pool.run(calls_by_grad_mode, op, world_size=2, env=env):
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
