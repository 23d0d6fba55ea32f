"""``torch.compile(fullgraph=True)`` between two ranks gives and sends what eager does."""

from __future__ import annotations

import pytest
import torch

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

SIZES = [6, 4]


def layers(name):
    """Functions of (x, up, gate, down) that end on the group."""

    def row(x, up, gate, down):
        return gemm_all_reduce(torch.tanh(x @ up.t()), down, None, name, chunks=2)

    def column_row(x, up, gate, down):
        first, second = column_gemm_act(x, [up, gate], [None, None], "silu", name)
        return gemm_all_reduce(first * second, down, None, name)

    def plain(x, up, gate, down):
        return mlp(x, up, None, down, None, act="gelu", group_name=name)

    def gated(x, up, gate, down):
        return mlp(x, up, None, down, None, act="silu", group_name=name, w_gate=gate)

    def sequence(x, up, gate, down):
        both = {"dim": 0, "chunks": 2}
        _, (first, second) = all_gather_gemm(x, [up, gate], None, "silu", name, **both)
        return gemm_reduce_scatter(first * second, down, None, name, **both)

    return {
        "row": row,
        "column_row": column_row,
        "plain": plain,
        "gated": gated,
        "sequence": sequence,
    }


def both_ways(group, kind, backend, use_checkpoint=False):
    """For two batches of different size: eager and compiled value, gradients, bytes sent."""
    name, rank = resolve_group(group).name, group.rank()
    function = layers(name)[kind]

    def step(*tensors):
        if use_checkpoint:
            y = torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
        else:
            y = function(*tensors)
        return torch.sin(y)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    weights = [normals(2, 10, 8), normals(3, 10, 8), normals(4, 5, 10)]
    own = [
        part(w, SIZES, int(i == 2), rank).clone().requires_grad_() for i, w in enumerate(weights)
    ]
    results = []
    for call, rows in enumerate((4, 4, 7)):
        x = normals(10 + call, rows, 8).requires_grad_()
        pair = []
        for run in (step, compiled):
            if run is compiled and call != 1:
                run(x, *own)  # compiles: its tracing sends nothing that is counted
            with count_collectives() as counts:
                y = run(x, *own)
                gradients = torch.autograd.grad(y.sum(), [x, *own], allow_unused=True)
            sent = [(c.kind, c.bytes) for c in counts.calls]
            pair.append(([y, *(g for g in gradients if g is not None)], sent))
        results.append(pair)
    with torch.no_grad():
        results.append([([run(x, *own)], []) for run in (step, compiled)])
    return results


@pytest.mark.parametrize("kind", ["row", "column_row", "plain", "gated", "sequence"])
def test_compiled_equals_eager_on_every_call(pool, kind):
    """TP-39: the graph runs the real collective from the first call; TP-41: in one graph."""
    for results in pool.run(both_ways, kind, "aot_eager", world_size=2, timeout=60):
        for (eager, sent), (compiled, sent_compiled) in results:
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
            assert sorted(sent) == sorted(sent_compiled)


@pytest.mark.parametrize("kind", ["plain", "sequence"])
def test_compiled_with_recomputation(pool, kind):
    """TP-41: a compiled, checkpointed tensor-parallel MLP is right."""
    for results in pool.run(both_ways, kind, "aot_eager", True, world_size=2, timeout=60):
        for (eager, _), (compiled, _) in results:
            assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def graph_of(group):
    name, targets = resolve_group(group).name, []

    def backend(graph, inputs):
        targets.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    torch._dynamo.reset()
    weights = [torch.ones(3, 8), torch.ones(3, 8), torch.ones(5, 3)]
    torch.compile(layers(name)["plain"], backend=backend, fullgraph=True)(
        torch.ones(2, 8), *weights
    )
    return targets


def test_the_graph_holds_the_op_itself(pool):
    """TP-41: fusion is not silently skipped; TP-40: an op needs no pass to set anything up."""
    assert pool.run(graph_of, world_size=2)[0] == ["tpkernels.mlp.default"]


def opcheck_on_ranks(group):
    name, rank = resolve_group(group).name, group.rank()
    x, w, down = normals(1, 4, 3), normals(2 + rank, 5, 3), normals(4 + rank, 3, 5)
    wants = [t.clone().requires_grad_() for t in (x, w, down)]
    ops = torch.ops.tpkernels
    checks = [
        (ops.gemm_all_reduce.default, (x, w, None, name, None, 2)),
        (ops.gemm_all_reduce.default, (wants[0], wants[1], None, name, None, None)),
        (ops.column_gemm_act.default, (wants[0], [wants[1]], [None], "gelu", name)),
        (
            ops.column_backward.default,
            ([x @ w.t()], x, [w], name, True, [True], [x[:, :2]], [x], ""),
        ),
        (ops.mlp.default, (wants[0], wants[1], None, None, None, wants[2], None, "gelu", name)),
        (ops.sum_replicated.default, (x, [0, 2], [1, 0], [2, 1], 3, name)),
        (
            ops.all_gather_gemm.default,
            (wants[0], [wants[1]], [None], "gelu", False, name, 0, [4, 4], 2, ""),
        ),
        (
            ops.all_gather_gemm_backward.default,
            ([torch.cat([x, x]) @ w.t()], None, x, [w], name, 0, None, True, [True], 2, ""),
        ),
        (
            ops.gemm_reduce_scatter.default,
            (wants[0], wants[1], None, name, 0, [3, 1], None, 2, "layer"),
        ),
        (
            ops.gemm_reduce_scatter_backward.default,
            (x[:2] @ w.t(), x, w, name, 0, [2, 2], [True, True, True], 2, ""),
        ),
    ]
    for op, args in checks:
        torch.library.opcheck(op, args)


def test_opcheck_between_ranks(pool):
    pool.run(opcheck_on_ranks, world_size=2, timeout=60)
