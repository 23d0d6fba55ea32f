"""What goes over the wire: one all-reduce a layer and direction, of exactly the output's bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    TPAttention,
    TPMultiheadAttention,
)
from tpkernels.testing import count_collectives

M, K = 6, 16  # tokens, width
BYTES = M * K * 4
CHECK_OFF = {"TPKERNELS_CHECK": "off"}


def multihead(group):
    module = nn.MultiheadAttention(K, 4, batch_first=True)
    TPMultiheadAttention.shard_(module, group)
    return module


def call_multihead(module, x):
    return module(x, x, x, need_weights=False)[0]


def call(module, x):
    return module(x)


MODULES = {
    "mlp": (functools.partial(TPMLP, K, 24), call),
    "gated_mlp": (functools.partial(TPMLP, K, 24, gated=True, activation="silu"), call),
    "mlp_with_dropout": (functools.partial(TPMLP, K, 24, dropout=0.5), call),
    "attention": (functools.partial(TPAttention, K, 4, causal=True), call),
    "grouped_attention": (functools.partial(TPAttention, K, 4, 2, rope_theta=1e4), call),
    "fused_attention": (functools.partial(TPAttention, K, 4, fused_qkv=True), call),
    "multihead_attention": (lambda group: multihead(group), call_multihead),
}


def one_each_way_task(group):
    for name, (build, run) in MODULES.items():
        module = build(group=group)
        x = torch.randn(2, M // 2, K, requires_grad=True)
        with count_collectives() as forward:
            y = run(module, x)
        with count_collectives() as backward:
            y.sum().backward()
        for direction, counts in (("forward", forward), ("backward", backward)):
            found = (counts.total.calls, counts["all_reduce"].calls, counts["all_reduce"].bytes)
            assert found == (1, 1, BYTES), f"{name} {direction}: {counts}"
        with torch.no_grad(), count_collectives() as inference:
            run(module, x)
        assert inference.total.calls == 1, name


def test_one_all_reduce_each_way(pool):
    pool.run(one_each_way_task, world_size=2, env=CHECK_OFF)


def replicated_heads_task(group):
    """Key-value heads held by two ranks: their weights' gradients are added up as well."""
    module = TPAttention(K, 4, 2, group=group)
    x = torch.randn(1, M, K, requires_grad=True)
    with count_collectives() as forward:
        y = module(x)
    assert (forward.total.calls, forward.total.bytes) == (1, BYTES)
    with count_collectives() as backward:
        y.sum().backward()
    kv_rows = 2 * 4  # of k or v: 2 heads of 4
    expected = BYTES + 2 * (kv_rows * K + kv_rows) * 4
    assert backward.total.bytes == expected
    assert backward["all_reduce"].calls == backward.total.calls == 5


def test_replicated_heads_send_their_gradients(pool):
    pool.run(replicated_heads_task, env=CHECK_OFF)


def leaves_task(group):
    column = ColumnParallelLinear(K, 24, group=group)
    row = RowParallelLinear(24, K, group=group)
    x = torch.randn(M, K, requires_grad=True)
    with count_collectives() as up:
        h = column(x)
    with count_collectives() as down:
        y = row(h)
    with count_collectives() as back:
        y.sum().backward()
    assert (up.total.calls, down.total.calls, down["all_reduce"].bytes) == (0, 1, BYTES)
    assert (back.total.calls, back["all_reduce"].bytes) == (1, BYTES)
    column.gather_output = True
    with count_collectives() as gathered:
        column(x)
    assert gathered["all_gather"].calls == gathered.total.calls == 1
    frozen_input = torch.randn(M, K)  # nobody asks for its gradient: nothing is sent
    with count_collectives() as nothing:
        ColumnParallelLinear(K, 24, group=group)(frozen_input).sum().backward()
    assert nothing.total.calls == 0


def test_linear_layers(pool):
    pool.run(leaves_task, world_size=2, env=CHECK_OFF)


def recompute_task(group):
    """Recomputation ends before the last collective: its result is not needed again."""
    for name in ("gated_mlp", "attention"):
        build, run = MODULES[name]
        module = build(group=group)
        x = torch.randn(2, M // 2, K, requires_grad=True)
        y = checkpoint(functools.partial(run, module), x, use_reentrant=False)
        with count_collectives() as backward:
            y.sum().backward()
        assert (backward.total.calls, backward["all_reduce"].bytes) == (1, BYTES), name


def test_recompute_does_not_repeat_the_all_reduce_TP_51(pool):
    pool.run(recompute_task, world_size=2, env=CHECK_OFF)


def wide_wire_task(group):
    module = TPMLP(K, 24, group=group, dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with count_collectives() as counts:
        module(torch.randn(M, K, dtype=torch.bfloat16))
    assert [(c.kind, c.dtype, c.bytes) for c in counts.calls] == [
        ("all_reduce", torch.float32, BYTES)
    ]


def test_reduce_dtype_is_what_is_sent_TP_33(pool):
    pool.run(wide_wire_task, world_size=2, env=CHECK_OFF)


def sub_group_task(group):
    """TP-42: two groups of two in a world of four; nothing is asked of the others."""
    module = TPMLP(K, 24, group=group)
    assert module.group.size == 2
    with count_collectives() as counts:
        module(torch.randn(M, K)).sum().backward()
    assert {call.group_name for call in counts.calls} == {group.group_name}
    return True


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3)])
def test_strided_sub_groups_TP_42(pool, ranks):
    assert pool.run(sub_group_task, ranks=ranks) == [True, True]


def one_rank_task(group):
    for build, run in MODULES.values():
        with count_collectives() as counts:
            run(build(group=group), torch.randn(2, 3, K)).sum().backward()
        assert counts.total.calls == 0


def test_one_rank_communicates_nothing_TP_54(pool):
    pool.run(one_rank_task, world_size=1)
