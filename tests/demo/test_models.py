"""Both pretrained models: dense answers that make sense, and the same from several ranks."""

from __future__ import annotations

import pytest
import torch

from tpkernels.demo import minilm, smollm2
from tpkernels.demo.packages import MINILM, SMOLLM2
from tpkernels.demo.session import Session
from tpkernels.errors import ConfigError

LIMIT = 240  # seconds: loading a model on every rank, on two busy cores


def outcome_of(group, demo, dtype=torch.float32, batch=None, repeat=0):
    session = Session(group, torch.device("cpu"), dtype, batch, repeat)
    return demo(session).as_dict()


def need(model):
    try:
        model.path()
    except ConfigError as error:
        pytest.skip(str(error))


def checked(outcomes):
    """The checks of rank 0, having passed on every rank."""
    for outcome in outcomes:
        assert outcome["passed"], outcome["checks"]
    return {check["name"]: check for check in outcomes[0]["checks"]}


def test_sentences_that_mean_the_same_are_closest():
    need(MINILM)
    model = minilm.load(MINILM.path())
    inputs = model.tokenize(list(minilm.SENTENCES))
    with torch.inference_mode():
        hidden = model.encoder(**inputs).last_hidden_state
    vectors = minilm.embed(hidden, inputs["attention_mask"])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(vectors)))
    cosines = vectors @ vectors.t() - 2 * torch.eye(len(vectors))
    partners = torch.arange(len(vectors)) ^ 1
    assert torch.equal(cosines.argmax(dim=1), partners)


def test_padding_does_not_change_an_embedding():
    need(MINILM)
    model = minilm.load(MINILM.path())
    sentences = list(minilm.SENTENCES[:6])
    together = model.tokenize(sentences)
    with torch.inference_mode():
        hidden = model.encoder(**together).last_hidden_state
        vectors = minilm.embed(hidden, together["attention_mask"])
        for sentence, vector in zip(sentences, vectors, strict=True):
            alone = model.tokenize([sentence])
            hidden = model.encoder(**alone).last_hidden_state
            expected = minilm.embed(hidden, alone["attention_mask"])[0]
            assert torch.allclose(vector, expected, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_minilm(pool, world_size):
    need(MINILM)
    outcomes = pool.run(outcome_of, minilm.demo, repeat=1, world_size=world_size, timeout=LIMIT)
    error = checked(outcomes)["max relative error"]
    assert error["value"] <= 1e-5 and error["limit"] == 1e-5
    rows = outcomes[0]["timings"]["16 sentences, 246 tokens"]
    assert rows[-1]["variant"].startswith("tensor-parallel")
    if world_size > 1:
        assert rows[-1]["parameter_bytes"] < rows[0]["parameter_bytes"]
    for row in outcomes[0]["cosines"]:
        assert row["parallel"] == pytest.approx(row["dense"], abs=1e-5)
        assert (row["dense"] > 0.3) == (row["kind"] == "alike")


def test_minilm_in_bfloat16(pool):
    need(MINILM)
    outcomes = pool.run(outcome_of, minilm.demo, torch.bfloat16, 4, world_size=2, timeout=LIMIT)
    assert checked(outcomes)["max relative error"]["limit"] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_smollm2(pool, world_size):
    """Key-value heads split as 2 + 1, and as 1 + 1 + 1."""
    need(SMOLLM2)
    outcomes = pool.run(
        outcome_of, smollm2.demo, torch.float32, 2, world_size=world_size, timeout=LIMIT
    )
    checks = checked(outcomes)
    assert checks["max relative error"]["value"] <= 1e-5
    assert checks["tokens that differ from the dense run's"]["value"] == 0
    assert len({str(outcome["tokens"]) for outcome in outcomes}) == 1
