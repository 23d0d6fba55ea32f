import pytest
import torch
from torch import nn

from tests.recognise.plain_models import InlineBlock, PlainGPT
from tpkernels.recognise import VocabularyStructure, recognise

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 37}


def vocabulary(model: nn.Module) -> list[VocabularyStructure]:
    return [f.structure for f in recognise(model).found if f.kind == "vocabulary"]


def kept_embeddings(model: nn.Module) -> dict[str, str]:
    return {k.path: k.reason for k in recognise(model).kept if k.kind == "embedding"}


def gpt(tied: bool) -> PlainGPT:
    return PlainGPT([InlineBlock(16, 24, 4)], tied=tied)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_models(tied):
    assert vocabulary(gpt(tied)) == [VocabularyStructure("wte", "lm_head", tied, None)]
    assert list(kept_embeddings(gpt(tied))) == ["wpe"]
    assert not [k for k in recognise(gpt(tied)).kept if k.path == "lm_head"]


def test_two_heads_of_one_size_are_ambiguous():
    model = gpt(tied=False)
    model.second_head = nn.Linear(16, 37)
    assert vocabulary(model) == []
    assert {"wte", "wpe"} == set(kept_embeddings(model))
    heads = {k.path: k for k in recognise(model).kept if k.kind == "linear"}
    assert set(heads) == {"lm_head", "second_head"} and not heads["lm_head"].in_block


def test_bert_with_its_bias_of_two_names():
    config = transformers.BertConfig(**SMALL, intermediate_size=24)
    model = transformers.BertForMaskedLM(config)
    head = "cls.predictions.decoder"
    expected = VocabularyStructure(
        "bert.embeddings.word_embeddings", head, True, "cls.predictions.bias"
    )
    assert vocabulary(model) == [expected]
    assert model.get_submodule(head).bias is model.cls.predictions.bias


def test_an_encoder_without_a_head_keeps_its_embedding():
    model = transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=24))
    assert vocabulary(model) == []
    kept = kept_embeddings(model)
    assert "no output head" in kept["embeddings.word_embeddings"]
    assert len(kept) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied):
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=24, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0
    )
    expected = VocabularyStructure("model.embed_tokens", "lm_head", tied, None)
    assert vocabulary(transformers.LlamaForCausalLM(config)) == [expected]
    assert vocabulary(transformers.LlamaModel(config)) == []


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 4


BROKEN = {
    "scaled": (lambda m: setattr(m.wte, "__class__", Scaled), "not a plain nn.Embedding"),
    "max-norm": (lambda m: setattr(m.wte, "max_norm", 1.0), "max_norm"),
    "third-user": (
        lambda m: setattr(m, "again", _linear_of(m.wte.weight)),
        None,
    ),
}


def _linear_of(weight: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return layer


@pytest.mark.parametrize("name", BROKEN)
def test_never_one_half_of_a_tied_pair(name):
    change, reason = BROKEN[name]
    model = gpt(tied=True)
    change(model)
    assert vocabulary(model) == []
    assert "lm_head" in {k.path for k in recognise(model).kept}
    if reason is not None:
        assert reason in kept_embeddings(model)["wte"]


def test_a_head_that_is_not_plain_keeps_both():
    model = gpt(tied=False)
    model.lm_head = nn.utils.parametrizations.weight_norm(model.lm_head)
    model.get_input_embeddings = lambda: model.wte
    model.get_output_embeddings = lambda: model.lm_head
    assert "'lm_head' cannot be split" in kept_embeddings(model)["wte"]
    assert vocabulary(model) == []


def test_meta_weights_are_tied_by_identity():
    with torch.device("meta"):
        model = gpt(tied=True)
    assert vocabulary(model) == [VocabularyStructure("wte", "lm_head", True, None)]
