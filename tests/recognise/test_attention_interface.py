"""Families of the transformers library, from small random configurations.

Every claim is taken at its word: the layers are split as described, and the sum over the ranks
must be what the dense layer gives.
"""

import pytest
import torch
from torch import nn

from tests.recognise.simulated_split import dense_and_summed
from tpkernels.recognise import AttentionStructure, MLPStructure, recognise

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
IDS = torch.arange(14).reshape(2, 7)


def bert(**kwargs):
    return transformers.BertModel(transformers.BertConfig(**SMALL, **kwargs))


def bert_decoder():
    config = transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    return transformers.BertLMHeadModel(config)


def gpt2(**kwargs):
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=4, vocab_size=61, n_positions=32,
        bos_token_id=0, eos_token_id=0, **kwargs,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**kwargs):
    sizes = SMALL | {"bos_token_id": 0, "eos_token_id": 0} | kwargs
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def run(model: nn.Module) -> None:
    model(input_ids=IDS)


def run_padded(model: nn.Module) -> None:
    mask = torch.ones_like(IDS)
    mask[0, 4:] = 0
    model(input_ids=IDS, attention_mask=mask)


def run_cross(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    encoded = torch.randn(2, 5, 24, dtype=torch.float64, generator=generator)
    model(input_ids=IDS, encoder_hidden_states=encoded)


def separate(core, out, prefix, heads, kv_heads, head_dim, attributes, **kwargs):
    q, k, v = (f"{prefix}{name}" for name in kwargs.pop("names", ("q_proj", "k_proj", "v_proj")))
    return AttentionStructure(
        core=core, q=q, k=k, v=v, qkv=None, qkv_layout=None, out=out, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, width_attributes=attributes,
        mask_argument="attention_mask", **kwargs,
    )  # fmt: skip


def bert_attention(**kwargs):
    attributes = {"num_attention_heads": "q_heads", "all_head_size": "q_width"}
    names = ("query", "key", "value")
    return separate(
        "self", "output.dense", "self.", 4, 4, 6, attributes, names=names,
        dropout="self.dropout", **kwargs,
    )  # fmt: skip


def gpt2_attention(**kwargs):
    return AttentionStructure(
        core="", k=None, v=None, qkv="c_attn", qkv_layout="blocks", out="c_proj", num_heads=4,
        num_kv_heads=4, head_dim=6, mask_argument="attention_mask", dropout="attn_dropout",
        width_attributes={"num_heads": "q_heads", "split_size": "q_width"}, **kwargs,
    )  # fmt: skip


def llama_attention(kv_heads, head_dim):
    attributes = {"num_key_value_groups": "kv_groups"}
    return separate("", "o_proj", "", 4, kv_heads, head_dim, attributes, causal=True, dropout=0.0)


BERT_MLP = MLPStructure(
    "plain", "intermediate.dense", "output.dense", act="gelu",
    act_module="intermediate.intermediate_act_fn",
)  # fmt: skip
GPT2_MLP = MLPStructure(
    "plain", "c_fc", "c_proj", act="gelu_tanh", whole=True, act_module="act",
    outer_dropout="dropout",
)  # fmt: skip
LLAMA_MLP = MLPStructure(
    "gated", "up_proj", "down_proj", gate="gate_proj", act="silu", whole=True, act_module="act_fn"
)

FAMILIES = {
    "bert": (
        bert, run_padded, "encoder.layer.{}",
        {"": BERT_MLP, ".attention": bert_attention(causal=False)},
    ),
    "bert-eager": (
        lambda: bert(attn_implementation="eager"), run_padded, "encoder.layer.{}",
        {"": BERT_MLP, ".attention": bert_attention(causal=False)},
    ),
    "bert-decoder": (
        bert_decoder, run_cross, "bert.encoder.layer.{}",
        {
            "": BERT_MLP,
            ".attention": bert_attention(causal=True),
            ".crossattention": bert_attention(causal=False, cross=True),
        },
    ),
    "gpt2": (
        gpt2, run_padded, "transformer.h.{}",
        {".attn": gpt2_attention(q=None, causal=True), ".mlp": GPT2_MLP},
    ),
    "gpt2-upcast": (
        lambda: gpt2(
            attn_implementation="eager", reorder_and_upcast_attn=True,
        ),
        run, "transformer.h.{}",
        {".attn": gpt2_attention(q=None, causal=True), ".mlp": GPT2_MLP},
    ),
    "gpt2-cross": (
        lambda: gpt2(add_cross_attention=True), run_cross, "transformer.h.{}",
        {
            ".attn": gpt2_attention(q=None, causal=True),
            ".crossattention": gpt2_attention(q="q_attn", causal=False, cross=True),
            ".mlp": GPT2_MLP,
        },
    ),
    "llama": (
        llama, run_padded, "model.layers.{}",
        {".self_attn": llama_attention(4, 6), ".mlp": LLAMA_MLP},
    ),
    "llama-grouped-wide": (
        lambda: llama(num_key_value_heads=2, head_dim=10, attention_bias=True, mlp_bias=True),
        run_padded, "model.layers.{}",
        {".self_attn": llama_attention(2, 10), ".mlp": LLAMA_MLP},
    ),
    "llama-eager": (
        lambda: llama(num_key_value_heads=2, attn_implementation="eager"), run, "model.layers.{}",
        {".self_attn": llama_attention(2, 6), ".mlp": LLAMA_MLP},
    ),
    "llama-multi-query": (
        lambda: llama(num_key_value_heads=1), None, "model.layers.{}",
        {".self_attn": llama_attention(1, 6), ".mlp": LLAMA_MLP},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    make, run_model, block, expected = FAMILIES[name]
    torch.manual_seed(0)
    upcast = name == "gpt2-upcast"  # its scores are float32, and it insists on it
    model = make().to(torch.float32 if upcast else torch.float64).eval()
    recognition = recognise(model)
    assert not [kept for kept in recognition.kept if kept.in_block]
    found = {f.path: f for f in recognition.found if f.kind != "vocabulary"}
    for path, structure in expected.items():
        for layer in (0, 1):
            assert found[block.format(layer) + path].structure == structure
    if run_model is None:  # one key head cannot be cut in two
        return
    for path in expected:
        part = found[block.format(0) + path]
        dense, summed = dense_and_summed(model, part, run_model, ranks=2)
        tolerance = 1e-6 if upcast else 1e-9
        torch.testing.assert_close(summed, dense, rtol=tolerance, atol=tolerance)


def test_a_scale_that_is_not_the_usual_one_is_stated():
    found = {f.path: f for f in recognise(gpt2(scale_attn_by_inverse_layer_idx=True)).found}
    scales = [found[f"transformer.h.{i}.attn"].structure.scale for i in (0, 1)]
    assert scales == [None, 6**-0.5 / 2]


def kept_attention(model):
    (kept,) = [k for k in recognise(model).kept if k.kind == "attention"]
    assert kept.in_block and kept.fix
    assert not [k for k in recognise(model).kept if k.kind == "linear" and k.in_block]
    return kept


def test_head_counts_that_disagree_are_refused_with_the_numbers():
    model = llama(num_key_value_heads=2)
    model.model.layers[1].self_attn.num_key_value_groups = 4
    kept = kept_attention(model)
    assert kept.path == "model.layers.1.self_attn"
    assert "num_key_value_groups=4, but the layers' widths give 2" in kept.reason
    model = bert()
    model.encoder.layer[0].attention.self.num_attention_heads = 8
    assert "num_attention_heads=8, but the layers' widths give 4" in kept_attention(model).reason


def test_a_config_that_disagrees_is_refused():
    model = llama(num_key_value_heads=2)
    attention = model.model.layers[0].self_attn
    attention.q_proj = nn.Linear(24, 36)  # 6 heads
    attention.o_proj = nn.Linear(36, 24)
    assert (
        "config.num_attention_heads=4, but the layers' widths give 6"
        in kept_attention(model).reason
    )


def test_an_attention_is_never_recognised_by_halves():
    model = llama()
    model.model.layers[0].self_attn.o_proj = nn.Linear(18, 24)
    kept = kept_attention(model)
    assert "query 24, key 24, value 24, output 18" in kept.reason

    class OtherLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = llama()
    model.model.layers[0].self_attn.o_proj = OtherLinear(24, 24)
    assert "'o_proj' cannot be split" in kept_attention(model).reason
    model = bert()
    model.encoder.layer[0].attention.output.dense = OtherLinear(24, 24)
    assert "no sibling of 'self' begins" in kept_attention(model).reason


def test_parameters_that_the_rule_does_not_know_are_named():
    model = llama()
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(6)
    assert "q_norm.weight, q_norm.bias" in kept_attention(model).reason


def test_the_same_names_laid_out_otherwise_are_another_family():
    config = transformers.GPTBigCodeConfig(
        n_embd=24, n_layer=1, n_head=4, vocab_size=61, n_positions=32, multi_query=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    kept = kept_attention(transformers.GPTBigCodeForCausalLM(config))
    assert "no rule knows an attention with the layers c_attn, c_proj" in kept.reason


def test_a_forward_that_reads_head_counts_from_the_config_is_refused():
    llama_attention_class = type(llama().model.layers[0].self_attn)
    all_functions = "ALL_ATTENTION_FUNCTIONS"

    class FromConfig(llama_attention_class):
        def forward(self, x, **kwargs):
            assert all_functions and ALL_ATTENTION_FUNCTIONS  # noqa: F821
            return self.q_proj(x).view(*x.shape[:-1], self.config.num_attention_heads, -1)

    model = llama()
    model.model.layers[0].self_attn.__class__ = FromConfig
    assert "config.num_attention_heads, which is not per rank" in kept_attention(model).reason
