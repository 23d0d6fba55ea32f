"""``TPAttention`` against attention spelled out: head counts, projections, rotary, gradients."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from tests.modules.comparing import Case, assert_ranks_agree, compare, exact
from tests.modules.dense_attention import DenseAttention
from tpkernels.checkpoint import full_state_dict, load_full_state_dict
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules import HeadPartition, TPAttention
from tpkernels.modules.parameters import gather_full, gather_gradient
from tpkernels.shard_spec import spec_of
from tpkernels.testing import count_collectives

HIDDEN = 12


def split_form(dense, group):
    """A TPAttention with the dense module's weights."""
    ours = TPAttention(
        dense.o_proj.out_features,
        dense.heads,
        dense.kv_heads,
        dense.dim,
        bias=dense.o_proj.bias is not None,
        fused_qkv=hasattr(dense, "qkv_proj"),
        causal=dense.causal,
        rope_theta=dense.rope_theta,
        group=group,
        dtype=dense.o_proj.weight.dtype,
    )
    load_full_state_dict(ours, dense.state_dict())
    return ours


def shard(module, group):
    """As a plan would: the dense module itself becomes the split one."""
    TPAttention.shard_(
        module,
        group,
        num_heads=module.heads,
        num_kv_heads=module.kv_heads,
        head_dim=module.dim,
        qkv="qkv_proj" if hasattr(module, "qkv_proj") else None,
        causal=module.causal,
    )


class ByConstruction(nn.Module):
    """Holds the dense module, then its TPAttention: keys are the same."""

    def __init__(self, *args, **options):
        super().__init__()
        self.attn = DenseAttention(*args, **options)

    def forward(self, *inputs):
        return self.attn(*inputs)


def shard_constructed(module, group):
    module.attn = split_form(module.attn, group)


def case(heads, kv_heads, dim=4, constructed=False, shape=(2, 5), **options):
    cls = ByConstruction if constructed else DenseAttention
    build = functools.partial(cls, HIDDEN, heads, kv_heads, dim, **options)
    prefix = "attn." if constructed else ""
    return Case(
        build,
        shard_constructed if constructed else shard,
        lambda: [torch.randn(*shape, HIDDEN)],
        skip=frozenset({f"{prefix}k_proj.bias"}),  # softmax does not see it
    )


# By the number of ranks that divides or replicates as the name says.
CASES = {
    "mha": (case(12, 12, bias=False), (1, 2, 3, 4)),
    "mha_uneven": (case(5, 5), (2, 3, 4)),
    "mha_fused": (case(12, 12, fused=True, causal=True), (1, 2, 3, 4)),
    "mha_fused_uneven": (case(5, 5, fused=True), (2, 4)),
    "mha_constructed": (case(4, 4, constructed=True, causal=True, rope_theta=1e4), (1, 2, 3, 4)),
    "gqa": (case(8, 4, causal=True), (1, 2, 4)),
    "gqa_uneven": (case(9, 3), (2,)),
    "gqa_fused": (case(8, 4, fused=True), (2, 3, 4)),
    "gqa_replicated": (case(8, 2, causal=True), (4,)),
    "gqa_replicated_fused": (case(8, 2, fused=True), (4,)),
    "mqa": (case(6, 1), (1, 2, 3)),
    "mqa_uneven": (case(5, 1, constructed=True, rope_theta=1e4), (2, 3, 4)),
    "mqa_fused": (case(6, 1, fused=True, causal=True), (2, 4)),
    "one_token": (case(4, 2, causal=True, shape=(1, 1)), (2, 4)),
    "empty_batch": (case(4, 2, shape=(0, 3)), (2, 4)),
}


def attention_task(group, dtypes):
    outputs = []
    for each, worlds in CASES.values():
        if group.size() in worlds:
            outputs += [compare(group, each, dtype) for dtype in dtypes]
    return torch.cat([y.flatten().double() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_attention_equals_dense_TP_5_TP_21_TP_24_TP_25_TP_54(pool, world):
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if world == 2 else [torch.float64]
    assert_ranks_agree(pool.run(attention_task, dtypes, world_size=world))


def exact_task(group):
    """One token attends to itself: v and o are all that is left, and they are linear."""
    for heads, kv_heads, fused in ((4, 2, False), (6, 1, False), (8, 2, True)):
        exact(group, case(heads, kv_heads, shape=(3, 1), fused=fused))


@pytest.mark.parametrize("world", [2, 4])
def test_whole_numbers_are_exact_TP_1_TP_2(pool, world):
    pool.run(exact_task, world_size=world)


def replicated_task(group):
    """Every holder of a key-value head has its whole gradient; the true count stays (TP-27)."""
    torch.manual_seed(0)
    dense = DenseAttention(HIDDEN, 8, 2, 4).double()
    ours = split_form(dense, group)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    ours(x).square().sum().backward()
    dense(x).square().sum().backward()
    for name in ("k_proj", "v_proj"):
        leaf = ours.get_submodule(name)
        head = group.rank() // 2  # ranks 0, 1 hold head 0; ranks 2, 3 hold head 1
        rows = dense.get_submodule(name).weight.grad[4 * head : 4 * head + 4]
        torch.testing.assert_close(leaf.weight.grad, rows, rtol=1e-12, atol=1e-12)
    assert "2+2+2+2 heads, 1+1+1+1 KV heads" in repr(ours)
    assert ours.k_proj.out_features == 8 and ours.k_proj.output_sizes() == [4] * 4
    assert spec_of(ours.k_proj.weight).global_shape == (8, HIDDEN)


def test_replicated_key_value_heads_TP_24_TP_25_TP_27(pool):
    pool.run(replicated_task)


def step_together_task(group):
    """After a step the holders of one head still agree: they had the same gradient."""
    torch.manual_seed(0)
    ours = split_form(DenseAttention(HIDDEN, 4, 1, 4), group)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        ours(torch.randn(2, 5, HIDDEN)).square().sum().backward()
        optimizer.step()
    assert gather_gradient(ours.k_proj.weight, ours.group).shape == (4, HIDDEN)
    return ours.k_proj.weight.plain()


def test_replicas_stay_equal_through_optimizer_steps(pool):
    assert_ranks_agree(pool.run(step_together_task))


def refused_task(group, heads, kv_heads):
    """On rank 0 alone: had it communicated, it would hang."""
    if group.rank() != 0:
        return ""
    with count_collectives() as counts:
        try:
            TPAttention(HIDDEN, heads, kv_heads, 4, group=group)
        except UnsupportedModuleError as error:
            assert counts.total.calls == 0
            return str(error)
    raise AssertionError("accepted")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "allowed"),
    [
        (2, 2, "any tp size from 1 to 2"),
        (6, 3, "any tp size from 1 to 3, or 6"),
        (3, 1, "any tp size from 1 to 1, or 2, 3"),
    ],
)
def test_heads_that_do_not_divide_TP_24_TP_25(pool, heads, kv_heads, allowed):
    message = pool.run(refused_task, heads, kv_heads)[0]
    counts = f"{heads} query heads with {kv_heads} key-value heads cannot be split over 4 ranks"
    assert counts in message
    assert f"Allowed: {allowed}. Fix:" in message


def test_heads_that_share_nothing_evenly():
    with pytest.raises(
        UnsupportedModuleError, match="6 query heads cannot share 4 key-value heads"
    ):
        HeadPartition.of(6, 4, 8, 2, "attn")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 3), {}, "hidden_size=10"),
        ((12, 3), {"dropout": -0.1}, "dropout=-0.1"),
        ((8, 4, 0), {}, "num_kv_heads=0 must be at least 1. Fix: None"),
        ((8, 0), {}, "num_heads=0 must be at least 1"),
        (("8", 4), {}, r"TPAttention: hidden_size='8' must be a whole number \(int\)"),
        ((8, 4.0), {}, r"num_heads=4\.0 must be a whole number"),
        ((12, 4), {"rope_theta": 1e4}, r"head_dim=3 is odd, but rope_theta=10000\.0.*Fix: "),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        TPAttention(*arguments, **options)


def init_task(group):
    torch.manual_seed(4)
    ours = TPAttention(HIDDEN, 6, 3, 4, out_bias=False, group=group)
    torch.manual_seed(4)
    drawn = [nn.Linear(HIDDEN, n) for n in (24, 12, 12)] + [nn.Linear(24, HIDDEN, bias=False)]
    leaves = (ours.q_proj, ours.k_proj, ours.v_proj, ours.o_proj)
    for ours_leaf, dense_leaf in zip(leaves, drawn, strict=True):
        assert torch.equal(gather_full(ours_leaf.weight, ours.group), dense_leaf.weight)
    assert ours.o_proj.bias is None
    fused = TPAttention(HIDDEN, 6, 3, 4, fused_qkv=True, group=group)
    before = full_state_dict(fused)
    load_full_state_dict(fused, before)
    assert all(torch.equal(v, before[k]) for k, v in full_state_dict(fused).items())


def test_initial_weights_and_reload(pool):
    pool.run(init_task, world_size=2)


def autocast_task(group):
    torch.manual_seed(0)
    dense = DenseAttention(HIDDEN, 6, 3, 4, causal=True)
    ours = split_form(dense, group)
    x = torch.randn(2, 5, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ours(x), dense(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)  # a few roundings of 2^-8
    y.float().sum().backward()
    assert ours.q_proj.weight.grad.dtype is torch.float32


def test_autocast(pool):
    pool.run(autocast_task, world_size=2)
