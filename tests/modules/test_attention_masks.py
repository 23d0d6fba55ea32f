"""``TPAttention`` with every form of mask, cross-attention, and a cache filled step by step."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.modules.comparing import Case, assert_ranks_agree, compare
from tests.modules.dense_attention import DenseAttention
from tests.modules.test_attention import HIDDEN, shard, split_form
from tpkernels.errors import ConfigError
from tpkernels.modules import TPAttention
from tpkernels.modules.kv_cache import KVCache

B, S, T, H = 2, 5, 4, 6


def masks():
    """One of every form; drawn alike on every rank."""
    generator = torch.Generator().manual_seed(7)

    def keep(*shape):  # True attends; every query sees at least the first key
        mask = torch.rand(*shape, generator=generator) < 0.6
        mask[..., 0] = True
        return mask

    def add(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return {
        "none": {},
        "padding": {"key_padding_mask": lengths},
        "padding_bool": {"key_padding_mask": lengths.bool()},
        "bool_ST": {"attention_mask": keep(S, S)},
        "bool_BST": {"attention_mask": keep(B, S, S)},
        "bool_B1ST": {"attention_mask": keep(B, 1, S, S)},
        "bool_per_head": {"attention_mask": keep(B, H, S, S)},
        "additive_ST": {"attention_mask": add(S, S)},
        "additive_per_head": {"attention_mask": add(B, H, S, S)},
        "additive_11ST": {"attention_mask": add(1, 1, S, S)},
        "per_head_of_one_batch": {"attention_mask": add(1, H, S, S)},
        "bool_and_padding": {"attention_mask": keep(S, S), "key_padding_mask": lengths},
        "additive_and_padding": {"attention_mask": add(B, H, S, S), "key_padding_mask": lengths},
    }


def with_mask(name, module, x):
    options = dict(masks()[name])
    mask = options.get("attention_mask")
    if mask is not None and mask.is_floating_point():
        options["attention_mask"] = mask.to(x.dtype)
    return module(x, **options)


def mask_task(group, heads, kv_heads):
    outputs = []
    for name in masks():
        for causal in (False, True):
            case = Case(
                functools.partial(DenseAttention, HIDDEN, heads, kv_heads, 4, causal=causal),
                shard,
                lambda: [torch.randn(B, S, HIDDEN)],
                functools.partial(with_mask, name),
                skip=frozenset({"k_proj.bias"}),
            )
            outputs.append(compare(group, case, torch.float64))
            if name in ("additive_and_padding", "bool_per_head"):
                compare(group, case, torch.bfloat16)
    return torch.stack(outputs)


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 3), (3, 1), (4, 6)])
def test_masks_TP_36(pool, world, kv_heads):
    """In training mode and without dropout; masks count, per-head ones are cut by rank."""
    assert_ranks_agree(pool.run(mask_task, H, kv_heads, world_size=world))


def fully_masked_task(group):
    """Queries that may attend to nothing give the bias, finite, and so do their gradients."""
    torch.manual_seed(0)
    dense = DenseAttention(HIDDEN, H, 3, 4).double()
    ours = split_form(dense, group)
    nothing = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = ours(x, key_padding_mask=nothing)
    torch.testing.assert_close(y[1], dense.o_proj.bias.expand(S, HIDDEN), rtol=1e-12, atol=1e-12)
    y.sum().backward()
    for value in (y, x.grad, *(p.grad for p in ours.parameters())):
        local = value.to_local() if hasattr(value, "to_local") else value
        assert bool(torch.isfinite(local).all())


def test_fully_masked_rows_are_finite(pool):
    pool.run(fully_masked_task, world_size=2)


def cross(module, x, context, mask):
    return module(x, context=context, key_padding_mask=mask)


def cross_task(group):
    lengths = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for heads, kv_heads in ((4, 4), (6, 3), (6, 1)):
        case = Case(
            functools.partial(DenseAttention, HIDDEN, heads, kv_heads, 4, causal=True),
            shard,
            lambda: [torch.randn(B, S, HIDDEN), torch.randn(B, T, HIDDEN), lengths],
            cross,
            skip=frozenset({"k_proj.bias"}),
        )
        compare(group, case, torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_cross_attention(pool, world):
    """Other length, causal ignored, and the context's gradient comes back whole."""
    pool.run(cross_task, world_size=world)


def cache_task(group, heads, kv_heads, fused):
    torch.manual_seed(0)
    dense = DenseAttention(HIDDEN, heads, kv_heads, 4, fused=fused, causal=True, rope_theta=1e4)
    dense = dense.double()
    ours = split_form(dense, group)
    x = torch.randn(B, 7, HIDDEN, dtype=torch.float64)
    padding = torch.ones(B, 7)
    padding[1, :2] = 0  # left padding, as in generation
    expected = dense(x, key_padding_mask=padding)
    with torch.no_grad():
        for steps in ([1] * 7, [3, 1, 2, 1], [7]):
            cache, start, parts = KVCache(), 0, []
            for step in steps:
                end = start + step
                mask = padding[:, :end]
                parts.append(ours(x[:, start:end], key_padding_mask=mask, cache=cache))
                start = end
            torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-12, atol=1e-12)
            assert cache.get_seq_length() == 7


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "fused"),
    [(1, 4, 2, False), (2, 6, 3, True), (3, 6, 1, False), (4, 8, 2, True)],
)
def test_cache_step_by_step_equals_the_whole_sequence(pool, world, heads, kv_heads, fused):
    pool.run(cache_task, heads, kv_heads, fused, world_size=world)


def positions_task(group):
    """position_ids given by hand are honoured: shifted positions leave rotary scores alike."""
    torch.manual_seed(0)
    dense = DenseAttention(HIDDEN, 4, 2, 4, causal=True, rope_theta=1e4).double()
    ours = split_form(dense, group)
    x = torch.randn(1, S, HIDDEN, dtype=torch.float64)
    expected = dense(x)
    shifted = torch.arange(3, 3 + S)[None]
    torch.testing.assert_close(ours(x, position_ids=shifted), expected, rtol=1e-6, atol=1e-6)
    reversed_ids = torch.arange(S).flip(0)[None]
    assert not torch.allclose(ours(x, position_ids=reversed_ids), expected, atol=1e-3)


def test_position_ids(pool):
    pool.run(positions_task, world_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.zeros(5)}, r"attention_mask must be \[S, T\]"),
        ({"attention_mask": torch.zeros(2, 3, 5, 5)}, "3 heads; allowed: 1 or 4"),
        ({"attention_mask": torch.zeros(5, 5, dtype=torch.int64)}, "torch.int64"),
        ({"key_padding_mask": torch.zeros(2, 1, 5)}, r"key_padding_mask must be \[B, T\]"),
    ],
)
def test_wrong_masks(options, message):
    module = TPAttention(12, 4)
    with pytest.raises(ConfigError, match=message):
        module(torch.randn(2, 5, 12), **options)


def test_wrong_calls():
    with pytest.raises(ConfigError, match=r"x must be \[B, S, hidden\]"):
        TPAttention(12, 4)(torch.randn(5, 12))
    with pytest.raises(ConfigError, match="fused_qkv=False"):
        TPAttention(12, 4, fused_qkv=True)(torch.randn(2, 5, 12), context=torch.randn(2, 3, 12))
