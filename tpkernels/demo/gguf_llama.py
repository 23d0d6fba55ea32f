"""A Llama out of a GGUF file: dequantised into `transformers`' `LlamaForCausalLM`, and its
tokenizer.

GGUF names and layouts are llama.cpp's. Two things differ from Hugging Face's: the rows of the
query and key projections of each head are interleaved for llama.cpp's rotary embedding, and
a tied output projection is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpkernels.errors import ConfigError

# llama.cpp's name -> Hugging Face's, within block `blk.N` / `model.layers.N`.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


class GGUFLlama:
    """A GGUF file with a Llama in it.

    Args:
        path: the file.

    Raises:
        ConfigError: the file holds another architecture, or a feature this reader lacks.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path.name} holds a {architecture!r} model; only 'llama' is read")
        if "rope_freqs.weight" in {tensor.name for tensor in self._reader.tensors}:
            raise ConfigError(f"{path.name} scales its rotary frequencies, which is not read")

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def config(self) -> Any:
        """The `LlamaConfig` that the metadata describe."""
        from transformers import LlamaConfig

        names = {tensor.name for tensor in self._reader.tensors}
        heads = self._field("llama.attention.head_count")
        return LlamaConfig(
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=self._field("llama.embedding_length"),
            intermediate_size=self._field("llama.feed_forward_length"),
            num_hidden_layers=self._field("llama.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._field("llama.attention.head_count_kv", heads),
            max_position_embeddings=self._field("llama.context_length"),
            rms_norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self._field("llama.rope.freq_base", 10000.0),
            },
            tie_word_embeddings="output.weight" not in names,
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._field("tokenizer.ggml.eos_token_id"),
            pad_token_id=self._field("tokenizer.ggml.padding_token_id"),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The weights in float32, under Hugging Face's names; nothing for a tied `lm_head`."""
        from gguf.quants import dequantize

        heads = self._field("llama.attention.head_count")
        kv_heads = self._field("llama.attention.head_count_kv", heads)
        state = {}
        for tensor in self._reader.tensors:
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if ".attn_q." in tensor.name:
                weight = _rotary_halves(weight, heads)
            elif ".attn_k." in tensor.name:
                weight = _rotary_halves(weight, kv_heads)
            # A copy: an unquantised tensor is a read-only view of the file.
            state[_huggingface_name(tensor.name)] = torch.from_numpy(weight.copy())
        return state

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """The `LlamaForCausalLM`, in eval mode, on the CPU."""
        from transformers import LlamaForCausalLM

        config = self.config()
        with torch.device("meta"):  # no time lost on initial values
            model = LlamaForCausalLM(config)
        state = {name: weight.to(dtype) for name, weight in self.state_dict().items()}
        missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
        if config.tie_word_embeddings:
            model.tie_weights()
            missing = [name for name in missing if name != "lm_head.weight"]
        if missing or unexpected:
            raise ConfigError(
                f"the GGUF file lacks {missing[:3]} and has {unexpected[:3]} too many; "
                "only plain Llama models are read"
            )
        # Its frequencies are computed, not stored, and so far on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model.eval()

    def tokenizer(self) -> Any:
        """The byte-level BPE as a `tokenizers.Tokenizer` that pads on the left, for generation."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind = (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ConfigError(f"tokenizer {kind} is not read; only ('gpt2', 'smollm')")
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        # llama.cpp's "smollm": each digit by itself, then GPT-2's pattern.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self._field("tokenizer.ggml.token_type")
        control = [
            token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN
        ]
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
        pad = self._field("tokenizer.ggml.padding_token_id")
        tokenizer.enable_padding(direction="left", pad_id=pad, pad_token=tokens[pad])
        return tokenizer


def _huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    block, index, part = stem.split(".")
    if block != "blk" or part not in _BLOCK_NAMES:
        raise ConfigError(f"the GGUF file holds {name!r}, which a plain Llama has not")
    return f"model.layers.{index}.{_BLOCK_NAMES[part]}.{suffix}"


def _rotary_halves(weight_NK: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a head's rows: it pairs rows 2i and 2i + 1, Hugging Face rows i
    and i + head_dim / 2."""
    N, K = weight_NK.shape
    pairs = weight_NK.reshape(heads, N // heads // 2, 2, K)
    return pairs.swapaxes(1, 2).reshape(N, K)
