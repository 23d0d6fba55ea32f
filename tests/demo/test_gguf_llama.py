"""A Llama from GGUF: names, rotary order, tied or not, and the real SmolLM2's right answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tpkernels.demo.gguf_llama import GGUFLlama, _huggingface_name, _rotary_halves
from tpkernels.demo.packages import SMOLLM2
from tpkernels.errors import ConfigError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

H, F, V, HEADS, KV_HEADS, LAYERS = 16, 24, 32, 4, 2, 2


def for_llama_cpp(weight_NK, heads):
    """What llama.cpp's converter does to query and key projections."""
    N, K = weight_NK.shape
    return weight_NK.reshape(heads, 2, N // heads // 2, K).swapaxes(1, 2).reshape(N, K)


def tiny_llama(tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=F,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_gguf(path, model, architecture="llama", extra=()):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_vocab_size(V)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(F)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, parameter in model.named_parameters():  # a tied head is not among them
        weight = parameter.detach().numpy()
        if "q_proj" in name:
            weight = for_llama_cpp(weight, HEADS)
        if "k_proj" in name:
            weight = for_llama_cpp(weight, KV_HEADS)
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            new = f"blk.{index}.{names[stem]}.weight"
        else:
            new = f"{names[stem]}.weight"
        writer.add_tensor(new, np.ascontiguousarray(weight))
    for name in extra:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_written_model_comes_back_bitwise(tmp_path, tied):
    model = tiny_llama(tied)
    read = GGUFLlama(write_gguf(tmp_path / "tiny.gguf", model)).model()
    expected = model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, weight in read.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(read(ids).logits, model(ids).logits)


def test_dtype_and_no_buffer_left_on_meta(tmp_path):
    read = GGUFLlama(write_gguf(tmp_path / "tiny.gguf", tiny_llama(True))).model(torch.bfloat16)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.bfloat16}
    assert {buffer.device.type for buffer in read.buffers()} == {"cpu"}
    assert read.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not read.training


def test_what_is_not_a_plain_llama_is_refused(tmp_path):
    model = tiny_llama(True)
    with pytest.raises(ConfigError, match="holds a 'phi2' model; only 'llama' is read"):
        GGUFLlama(write_gguf(tmp_path / "phi.gguf", model, architecture="phi2"))
    with pytest.raises(ConfigError, match="rotary frequencies"):
        GGUFLlama(write_gguf(tmp_path / "rope.gguf", model, extra=["rope_freqs.weight"]))
    biased = GGUFLlama(write_gguf(tmp_path / "bias.gguf", model, extra=["blk.0.attn_x.bias"]))
    with pytest.raises(ConfigError, match=r"'blk\.0\.attn_x\.bias'"):
        biased.model()


def test_rotary_halves_undoes_llama_cpp():
    weight = np.arange(8 * 3).reshape(8, 3)
    assert (_rotary_halves(for_llama_cpp(weight, 2), 2) == weight).all()
    # Two heads of four rows: llama.cpp pairs neighbours, Hugging Face rows half a head apart.
    assert _rotary_halves(np.arange(8).reshape(8, 1), 2).ravel().tolist() == [
        0,
        2,
        1,
        3,
        4,
        6,
        5,
        7,
    ]


def test_names():
    assert _huggingface_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    assert _huggingface_name("token_embd.weight") == "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def smollm2():
    try:
        return GGUFLlama(SMOLLM2.path())
    except ConfigError as error:
        pytest.skip(str(error))


def test_the_real_config(smollm2):
    config = smollm2.config()
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (SMOLLM2.num_heads, SMOLLM2.num_kv_heads, SMOLLM2.head_dim) == (9, 3, 64)
    assert config.hidden_size == 9 * 64 and config.num_hidden_layers == 30
    assert config.tie_word_embeddings and config.rope_parameters["rope_theta"] == 100000.0


def test_the_real_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer()
    text = "In 2024, it's  <b>naïve</b>\n\tto say: 日本 🏖️!"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert [t for t in encoding.tokens if any(c.isdigit() for c in t)] == ["2", "0", "2", "4"]
    assert "'s" in encoding.tokens
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]
    short, long = tokenizer.encode_batch(["Hello", "The capital of France is"])
    assert len(short.ids) == len(long.ids) == 5
    assert short.attention_mask == [0, 0, 0, 0, 1]


def test_the_real_model_knows_the_capital_of_france(smollm2):
    model, tokenizer = smollm2.model(), smollm2.tokenizer()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(tokens[0].tolist()).startswith("The capital of France is Paris.")
