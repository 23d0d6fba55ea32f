"""Small random models of each family, built alike on every rank, and how each is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0
VOCABULARY = 51


def _transformers() -> Any:
    import transformers  # costs a second: only where a model of it is built

    return transformers


def bert(**changes: Any) -> nn.Module:
    t = _transformers()
    return t.BertModel(t.BertConfig(**_BERT | changes))


def bert_mlm(**changes: Any) -> nn.Module:
    t = _transformers()
    return t.BertForMaskedLM(t.BertConfig(**_BERT | changes))


_BERT = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}


def gpt2(**changes: Any) -> nn.Module:
    t = _transformers()
    sizes = {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, **sizes | ends | changes))


def llama(**changes: Any) -> nn.Module:
    t = _transformers()
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
    }
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes | changes))


class EncoderModel(nn.Module):
    """``nn.TransformerEncoder`` over token ids."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 6, 41, 0.1, batch_first=True, **options)
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.encoder(x, src_key_padding_mask=attention_mask == 0)


class CrossBert(nn.Module):
    """A decoder that also attends to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        t = _transformers()
        config = t.BertConfig(**_BERT | {"is_decoder": True, "add_cross_attention": True})
        self.bert = t.BertModel(config, add_pooling_layer=False)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(ids, attention_mask, encoder_hidden_states=memory(self))[0]


class CrossGPT2(nn.Module):
    """GPT-2 with cross-attention: q_attn beside a c_attn that holds keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = gpt2(add_cross_attention=True)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = {"encoder_hidden_states": memory(self)}
        return self.gpt2(ids, attention_mask=attention_mask, **hidden).logits


class DecoderModel(nn.Module):
    """``nn.TransformerDecoder``: causal self-attention, then cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 6, 40), 2)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(0, 1)
        causal = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        return self.decoder(x, memory(self).transpose(0, 1), tgt_mask=causal)


def memory(model: nn.Module) -> Tensor:
    """The other sequence, [2, 5, 24]."""
    drawn = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return drawn.to(next(model.parameters()).dtype)


class UserAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = 0.1

    def forward(self, hidden: Tensor) -> Tensor:
        b, t, c = hidden.shape
        q, k, v = self.qkv(hidden).split(c, dim=2)
        q, k, v = (x.view(b, t, self.heads, c // self.heads).transpose(1, 2) for x in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class UserMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, False), nn.Linear(width, inner, False)
        self.down = nn.Linear(inner, width, False)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.drop(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))


class UserBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = UserAttention(width, 6), UserMLP(width, 37)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(hidden=self.norm1(x))
        return x + self.mlp(hidden=self.norm2(x))


class UserModel(nn.Module):
    """A small language model as users write them, with weight tying."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList([UserBlock(24) for _ in range(2)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {
    "bert": bert,
    "bert_mlm": bert_mlm,
    "gpt2": gpt2,
    "llama_gqa": llama,
    "llama_mqa_tied": lambda: llama(
        num_key_value_heads=1, intermediate_size=41, tie_word_embeddings=True
    ),
    "llama_uneven": lambda: llama(hidden_size=36, num_attention_heads=9, attention_bias=True),
    "encoder": lambda: EncoderModel(activation="gelu"),
    "encoder_norm_first": lambda: EncoderModel(norm_first=True, activation=F.relu, bias=False),
    "bert_cross": CrossBert,
    "gpt2_cross": CrossGPT2,
    "decoder": DecoderModel,
    "user": UserModel,
}
CAUSAL = ("gpt2", "llama_gqa", "llama_mqa_tied", "llama_uneven")
HUGGING_FACE = ("bert", "bert_mlm", *CAUSAL)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model ``name`` in evaluation mode, with weights large enough to tell layers apart."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0 if name in HUGGING_FACE else 1.0)  # initialised with std 0.02
    return model


def batch() -> tuple[Tensor, Tensor]:
    """(ids [2, 7], attention mask): the second sequence ends in two padding tokens."""
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:], ids[1, 5:] = 0, PAD
    return ids, mask


def outputs(name: str, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """What the model says about :func:`batch`, by name: logits, every hidden state, the loss."""
    ids, mask = batch()
    if name not in HUGGING_FACE:
        return {"output": model(ids, attention_mask=mask)}
    if name != "bert":
        options["labels"] = ids
    result = model(ids, attention_mask=mask, output_hidden_states=True, **options)
    found = {f"hidden {i}": h for i, h in enumerate(result.hidden_states)}
    for key in ("loss", "logits", "last_hidden_state", "pooler_output"):
        if result.get(key) is not None:
            found[key] = result[key]
    for i, weights in enumerate(result.get("attentions") or ()):
        found[f"attention {i}"] = weights
    return found


def scalar(found: dict[str, Tensor]) -> Tensor:
    """A loss in which every output has a part, for the gradients of everything."""
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for value in found.values():
        weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        total = total + (value.double() * weight).sum()
    return total
