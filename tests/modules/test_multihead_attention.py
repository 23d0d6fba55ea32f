"""``TPMultiheadAttention`` against ``nn.MultiheadAttention``: same call, same results."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from tests.modules.comparing import TIGHT, Case, assert_ranks_agree, compare
from tpkernels.checkpoint import full_state_dict
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules import TPMultiheadAttention

E, H, L, S, B = 12, 6, 5, 4, 2


def self_attention(module, x, **options):
    return module(x, x, x, **options)


def key_is_value(module, x, memory, **options):
    return module(x, memory, memory, **options)


def all_differ(module, x, k, v, **options):
    return module(x, k, v, **options)


def key_is_query(module, x, v, **options):
    return module(x, x, v, **options)


def later(index, call, module, *inputs):
    """The second result (the attention weights) as the one to compare."""
    return (call(module, *inputs)[index],)


def case(call, inputs, batch_first=True, bias=True, **options):
    build = functools.partial(nn.MultiheadAttention, E, H, bias=bias, batch_first=batch_first)
    return Case(build, TPMultiheadAttention.shard_, inputs, functools.partial(call, **options))


def tokens(*shape):
    return lambda: [torch.randn(*shape, E)]


PADDING = torch.tensor([[False] * L, [False] * 3 + [True] * 2])  # True is hidden here
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)
PER_HEAD = torch.linspace(-1, 1, B * H * L * L, dtype=torch.float64).view(B * H, L, L)
MEMORY = lambda: [torch.randn(B, L, E), torch.randn(B, S, E)]  # noqa: E731
CASES = {
    "self": case(self_attention, tokens(B, L)),
    "no_bias": case(self_attention, tokens(B, L), bias=False),
    "fast_self": case(self_attention, tokens(B, L), need_weights=False),
    "sequence_first": case(self_attention, tokens(L, B), batch_first=False),
    "unbatched": case(self_attention, tokens(L)),
    "unbatched_padding": case(self_attention, tokens(L), key_padding_mask=PADDING[1]),
    "causal": case(self_attention, tokens(B, L), attn_mask=CAUSAL, need_weights=False),
    "causal_padding": case(
        self_attention, tokens(B, L), attn_mask=CAUSAL, key_padding_mask=PADDING
    ),
    "causal_hint": case(self_attention, tokens(B, L), attn_mask=CAUSAL, is_causal=True),
    "additive_per_head": case(self_attention, tokens(B, L), attn_mask=PER_HEAD),
    "additive_padding": case(
        self_attention, tokens(B, L), key_padding_mask=PADDING.double() * -2.0
    ),
    "additive_both": case(
        self_attention, tokens(B, L), attn_mask=PER_HEAD, key_padding_mask=PADDING.double() * -2
    ),
    "key_is_value": case(key_is_value, MEMORY, need_weights=False),
    "all_differ": case(
        all_differ, lambda: [torch.randn(B, n, E) for n in (L, S, S)], need_weights=False
    ),
    "key_is_query": case(key_is_query, lambda: [torch.randn(B, L, E) for _ in range(2)]),
    "weights": case(functools.partial(later, 1, self_attention), tokens(B, L)),
    "weights_per_head": Case(
        functools.partial(nn.MultiheadAttention, E, H, batch_first=True),
        TPMultiheadAttention.shard_,
        tokens(B, L),
        functools.partial(later, 1, functools.partial(self_attention, average_attn_weights=False)),
    ),
}


def mha_task(group):
    outputs = [compare(group, each, torch.float64) for each in CASES.values()]
    for name in ("self", "fast_self", "key_is_value"):
        compare(group, CASES[name], torch.bfloat16)
    return torch.cat([y.flatten() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_nn_multihead_attention(pool, world):
    assert_ranks_agree(pool.run(mha_task, world_size=world))


def trained_and_evaluated_task(group):
    """In evaluation, without gradients, where PyTorch has a path of its own."""
    dense = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True).double().eval()
    split = copy.deepcopy(dense)
    before = dense.state_dict()
    TPMultiheadAttention.shard_(split, group)
    x = torch.randn(B, L, E, dtype=torch.float64)
    with torch.no_grad():
        ours, theirs = split(x, x, x), dense(x, x, x)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, **TIGHT)
    assert isinstance(split, nn.MultiheadAttention)
    whole = full_state_dict(split)
    assert list(whole) == list(before)
    assert all(torch.equal(whole[k], v) for k, v in before.items())


def test_no_dropout_in_evaluation_TP_36(pool):
    pool.run(trained_and_evaluated_task, world_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "bias_k"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": 8}, "kdim or vdim"),
    ],
)
def test_forms_that_cannot_be_split(options, message):
    module = nn.MultiheadAttention(E, H, **options)
    with pytest.raises(UnsupportedModuleError, match=f"block.attn: .*{message}"):
        TPMultiheadAttention.shard_(module, None, name="block.attn")
    assert type(module) is nn.MultiheadAttention


def test_a_module_of_another_class_is_refused():
    with pytest.raises(
        UnsupportedModuleError, match=r"expected nn\.MultiheadAttention, got Linear"
    ):
        TPMultiheadAttention.shard_(nn.Linear(4, 4), None)


def test_causal_without_a_mask_is_refused_as_pytorch_does():
    module = nn.MultiheadAttention(E, H, batch_first=True)
    TPMultiheadAttention.shard_(module, None)
    x = torch.randn(B, L, E)
    with pytest.raises(ConfigError, match="needs attn_mask"):
        module(x, x, x, is_causal=True)
