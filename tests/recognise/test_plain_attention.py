import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.recognise.plain_models import (
    CausalOnTheFly,
    EinsumAttention,
    GroupedAttention,
    NanoGPTAttention,
    TimmAttention,
)
from tpkernels.recognise import AttentionStructure, recognise


def only_attention(model: nn.Module) -> AttentionStructure:
    recognition = recognise(model)
    assert not recognition.kept
    (found,) = recognition.found
    assert found.kind == "attention"
    return found.structure


def only_refusal(model: nn.Module) -> str:
    recognition = recognise(model)
    assert not recognition.found
    (kept,) = recognition.kept
    assert (kept.kind, kept.path) == ("attention", "") and kept.fix
    return kept.reason


def replaced(model: nn.Module, s: AttentionStructure, x, mask=None):
    """The structure's docstring, run."""

    def heads(y):
        return y.unflatten(-1, (-1, s.head_dim)).transpose(1, 2)

    if s.qkv is not None:
        sizes = [rows for _, rows in s.qkv_blocks]
        q, k, v = map(heads, model.get_submodule(s.qkv)(x).split(sizes, -1))
    else:
        q, k, v = (heads(model.get_submodule(path)(x)) for path in (s.q, s.k, s.v))
    if s.mask_kind == "nonzero_keep" and mask is not None:
        mask = mask != 0
    causal = s.causal and not (mask is not None and s.mask_replaces_causal)
    if causal and mask is not None:
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = mask & future if mask.dtype == torch.bool else mask.masked_fill(~future, -math.inf)
        causal = False
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=s.scale, enable_gqa=True
    )
    return model.get_submodule(s.out)(y.transpose(1, 2).flatten(-2))


def separate(**kwargs) -> AttentionStructure:
    defaults = {"core": "", "qkv": None, "qkv_layout": None, "how": "replace", "causal": False}
    return AttentionStructure(**(defaults | kwargs))


def fused(qkv, out, heads, head_dim, **kwargs) -> AttentionStructure:
    counts = {"num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    return separate(
        q=None, k=None, v=None, qkv=qkv, qkv_layout="blocks", out=out, **counts, **kwargs
    )


EXPECTED = {
    "nanogpt-flash": (
        NanoGPTAttention(16, 4, flash=True),
        fused("c_attn", "c_proj", 4, 4, causal=True, dropout=0.1, outer_dropout="resid_dropout"),
    ),
    "nanogpt-manual": (
        NanoGPTAttention(16, 4, flash=False),
        fused(
            "c_attn", "c_proj", 4, 4, causal=True, dropout="attn_dropout",
            outer_dropout="resid_dropout",
        ),
    ),
    "nanogpt-one-head": (
        NanoGPTAttention(12, 1, flash=True, dropout=0.0),
        fused("c_attn", "c_proj", 1, 12, causal=True, outer_dropout="resid_dropout"),
    ),
    "timm": (
        TimmAttention(12, 3),
        fused("qkv", "proj", 3, 4, dropout="attn_drop", outer_dropout="proj_drop"),
    ),
    "on-the-fly": (CausalOnTheFly(12, 3), fused("qkv", "proj", 3, 4, causal=True)),
    "grouped": (
        GroupedAttention(16, 6, 2, 8),
        separate(
            q="q_proj", k="k_proj", v="v_proj", out="out_proj", num_heads=6, num_kv_heads=2,
            head_dim=8, causal=True, mask_argument="attn_mask", mask_kind="sdpa",
            mask_replaces_causal=True,
        ),
    ),
    "multi-query": (
        GroupedAttention(16, 3, 1, 4),
        separate(
            q="q_proj", k="k_proj", v="v_proj", out="out_proj", num_heads=3, num_kv_heads=1,
            head_dim=4, causal=True, mask_argument="attn_mask", mask_kind="sdpa",
            mask_replaces_causal=True,
        ),
    ),
    "einsum": (
        EinsumAttention(16, 2),
        separate(
            q="to_q", k="to_k", v="to_v", out="to_out", num_heads=2, num_kv_heads=2, head_dim=8,
            scale=0.25, mask_argument="mask", mask_kind="nonzero_keep",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_recognised_and_equal_to_the_structure(name):
    model, expected = EXPECTED[name]
    assert only_attention(model) == expected
    model = model.double().eval()
    x = torch.randn(3, 6, model.get_submodule(expected.out).out_features, dtype=torch.float64)
    masks = [None] if expected.mask_argument is None else [torch.rand(3, 1, 6, 6) > 0.5]
    for mask in masks:
        if mask is not None:
            mask = mask | torch.eye(6, dtype=torch.bool)
        given = model(x) if mask is None else model(x, mask)
        torch.testing.assert_close(given, replaced(model, expected, x, mask), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["nanogpt-flash", "grouped", "einsum"])
def test_weights_on_the_meta_device_are_enough(name):
    model, expected = EXPECTED[name]
    assert only_attention(copy.deepcopy(model).to("meta")) == expected


class Plain(nn.Module):
    """Four layers and a forward from outside; q, k, v [B, heads, T, head_dim] are given to it."""

    def __init__(self, forward, dim=12, heads=3, *, out=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.o = nn.Linear(dim, dim) if out else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.heads, self.how = heads, forward
        self.register_buffer("angles", torch.rand(1, 1, 32, 1) + 1)

    def forward(self, x, mask=None):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        return self.how(self, q, k, v, x, mask)


def merge(y):
    return y.transpose(1, 2).flatten(-2)


def scores(q, k):
    return q @ k.transpose(-2, -1) * 0.5


def additive(s, q, k, v, x, mask):
    logits = scores(q, k) if mask is None else scores(q, k) + mask
    return s.o(merge(logits.softmax(-1) @ v))


def keep_manual(s, q, k, v, x, mask):
    logits = scores(q, k) if mask is None else scores(q, k).masked_fill(~mask, -1e30)
    return s.o(merge(F.softmax(logits, -1) @ v))


def sdpa_mask(s, q, k, v, x, mask):
    return s.o(merge(F.scaled_dot_product_attention(q, k, v, mask)))


def sdpa_scale(s, q, k, v, x, mask):
    return s.o(merge(F.scaled_dot_product_attention(q, k, v, scale=0.3)))


def measured_scale(s, q, k, v, x, mask):
    return s.o(merge(((q / 3) @ k.transpose(-2, -1) * 0.7).softmax(-1) @ v))


def keys_first(s, q, k, v, x, mask):
    return s.o(merge(scores(k, q).transpose(-2, -1).softmax(-1) @ v))


def functional_dropout(s, q, k, v, x, mask):
    return s.o(merge(F.dropout(scores(q, k).softmax(-1), 0.2, s.training) @ v))


def batched(s, q, k, v, x, mask):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).mul(0.5).softmax(-1), v)
    return s.o(merge(y.unflatten(0, (-1, s.heads))))


FORMS = {
    additive: {"mask_kind": "additive", "scale": None, "mask_argument": "mask"},
    keep_manual: {"mask_kind": "sdpa", "scale": None, "mask_argument": "mask"},
    sdpa_mask: {"mask_kind": "sdpa", "causal": False, "mask_argument": "mask"},
    sdpa_scale: {"scale": 0.3, "mask_argument": None},
    measured_scale: {"scale": pytest.approx(0.7 / 3, rel=1e-9)},
    keys_first: {"scale": None},
    functional_dropout: {"dropout": 0.2},
    batched: {"num_heads": 3},
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms_of_one_attention(form):
    expected = FORMS[form]
    structure = only_attention(Plain(form))
    given = dataclasses.asdict(structure)
    assert {key: given[key] for key in expected} == expected
    assert (structure.q, structure.k, structure.v, structure.out) == ("q", "k", "v", "o")
    assert (structure.num_heads, structure.head_dim) == (3, 4)


def rotary(s, q, k, v, x, mask):
    q, k = q * s.angles[:, :, : q.shape[2]], k * s.angles[:, :, : k.shape[2]]
    return s.o(merge(scores(q, k).softmax(-1) @ v))


def alibi(s, q, k, v, x, mask):
    return s.o(merge((scores(q, k) + s.angles[:, :, : q.shape[2], 0]).softmax(-1) @ v))


def softmax_over_queries(s, q, k, v, x, mask):
    return s.o(merge(scores(q, k).softmax(-2) @ v))


def heads_not_merged(s, q, k, v, x, mask):
    return s.o((scores(q, k).softmax(-1) @ v).reshape(x.shape))


def true_hides(s, q, k, v, x, mask):
    logits = scores(q, k) if mask is None else scores(q, k).masked_fill(mask, -1e30)
    return s.o(merge(logits.softmax(-1) @ v))


def key_padding(s, q, k, v, x, mask):
    hidden = mask if mask is None else ~mask[:, None, None]
    logits = scores(q, k) if mask is None else scores(q, k).masked_fill(hidden, -1e30)
    return s.o(merge(logits.softmax(-1) @ v))


def argument_is_no_mask(s, q, k, v, x, mask):
    return s.o(merge(scores(q, k).softmax(-1) @ (v if mask is None else v + mask)))


def dropout_on_values(s, q, k, v, x, mask):
    return s.o(merge(scores(q, k).softmax(-1) @ s.drop(v)))


def dropout_before_output(s, q, k, v, x, mask):
    return s.o(s.drop(merge(F.scaled_dot_product_attention(q, k, v))))


def returns_weights(s, q, k, v, x, mask):
    weights = scores(q, k).softmax(-1)
    return s.o(merge(weights @ v)), weights


def residual(s, q, k, v, x, mask):
    return x + s.o(merge(F.scaled_dot_product_attention(q, k, v)))


def two_values(s, q, k, v, x, mask):
    return s.o(merge(F.scaled_dot_product_attention(q, k, v + q)))


REFUSED = {
    rotary: "position terms",
    alibi: "position terms",
    softmax_over_queries: "does not compute softmax",
    heads_not_merged: "another layout",
    true_hides: "hides where it is True",
    key_padding: "no mask that is broadcast",
    argument_is_no_mask: "no mask that is broadcast",
    dropout_on_values: "a dropout lies elsewhere",
    dropout_before_output: "a dropout lies elsewhere",
    returns_weights: "more than one tensor",
    residual: "does not come from one linear",
    two_values: "one linear layer each",
}


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.__name__)
def test_refused_as_one_with_the_reason(form):
    assert REFUSED[form] in only_refusal(Plain(form))


def test_no_output_projection_is_refused():
    model = Plain(
        lambda s, q, k, v, x, m: merge(F.scaled_dot_product_attention(q, k, v)), out=False
    )
    assert "does not come from one linear" in only_refusal(model)


def test_a_projection_laid_out_by_head_is_named():
    assert "head by head" in only_refusal(TimmAttention(12, 3, per_head=True))


def test_parameters_beside_the_projections_are_named():
    model = Plain(lambda s, q, k, v, x, m: s.o(merge(F.scaled_dot_product_attention(q, k, v))))
    model.q_norm = nn.LayerNorm(4)
    assert "q_norm.weight, q_norm.bias" in only_refusal(model)


def test_hooks_inside_are_named():
    model = NanoGPTAttention(16, 4, flash=True)
    model.c_proj.register_forward_hook(lambda *_: None)
    assert "'c_proj' has a hook" in only_refusal(model)


def test_cross_attention_in_user_code_is_refused():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x, context):
            q, k, v = self.q(x)[:, None], self.k(context)[:, None], self.v(context)[:, None]
            return self.o(F.scaled_dot_product_attention(q, k, v)[:, 0])

    assert "first argument" in only_refusal(Cross())


def test_tiled_heads_are_not_grouped_heads():
    class Tiled(GroupedAttention):
        def forward(self, x):
            b, s, _ = x.shape
            q, k, v = (
                p(x).reshape(b, s, -1, self.head_dim).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            k, v = k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)
            return self.out_proj(
                F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            )

    assert "does not compute softmax" in only_refusal(Tiled(16, 6, 2, 8))
    assert only_attention(Tiled(16, 3, 1, 8)).num_kv_heads == 1  # one head: the same thing


def test_sdpa_enable_gqa():
    class Enabled(GroupedAttention):
        def forward(self, x):
            q, k, v = (
                p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.out_proj(y.transpose(1, 2).flatten(-2))

    structure = only_attention(Enabled(16, 6, 2, 8))
    assert (structure.num_heads, structure.num_kv_heads) == (6, 2)


def test_a_proof_is_used_again_only_for_the_same_buffers():
    first, second = (NanoGPTAttention(16, 4, flash=False) for _ in range(2))
    second.bias[..., 3, 0] = 0  # no longer a triangle
    recognition = recognise(nn.ModuleList([first, second]))
    assert [found.path for found in recognition.found] == ["0"]
    assert [kept.path for kept in recognition.kept] == ["1"]


def test_dropouts_are_read_from_every_module():
    model = nn.ModuleList([NanoGPTAttention(16, 4, flash=True, dropout=p) for p in (0.1, 0.2, 0.0)])
    assert [f.structure.dropout for f in recognise(model).found] == [0.1, 0.2, None]
