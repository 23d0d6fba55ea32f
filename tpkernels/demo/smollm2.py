"""SmolLM2-135M: greedy text from a Llama of 9 query and 3 key-value heads, out of a GGUF file."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.demo import timing
from tpkernels.demo.gguf_llama import GGUFLlama
from tpkernels.demo.packages import SMOLLM2
from tpkernels.demo.session import Check, Outcome, Session, error_check

PROMPTS = (
    "The capital of France is",
    "The first ten prime numbers are 2, 3,",
    "Once upon a time, in a small village by the sea, there lived",
    "To make a good cup of tea, first boil the water and then",
)
NEW_TOKENS = 12
# Rounding in float32 gives about 2e-6 after thirty layers.
FLOAT32_LIMIT = 1e-5


def demo(session: Session) -> Outcome:
    """Compare the dense model with its tensor-parallel copy on `session`'s ranks."""
    outcome = Outcome(SMOLLM2.title)
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), session.batch or len(PROMPTS)))
    session.say(f"\n== {SMOLLM2.title}: greedy text after {len(prompts)} prompts")
    with session.step("loading and dequantising"):
        file = GGUFLlama(SMOLLM2.path())
        dense = file.model(session.dtype).to(session.device)
        tokenizer = file.tokenizer()
    encodings = tokenizer.encode_batch(prompts)
    inputs = {
        "input_ids": torch.tensor([e.ids for e in encodings], device=session.device),
        "attention_mask": torch.tensor(
            [e.attention_mask for e in encodings], device=session.device
        ),
    }

    parallel, report = session.parallelize(dense)
    with torch.inference_mode():
        with session.step("dense run"):
            expected = session.from_rank_0(_references(session, file, dense, inputs))
        with session.step("tensor-parallel run"):
            ours, our_tokens = logits(parallel, inputs), generate(parallel, inputs)
        _show_texts(session, tokenizer, our_tokens)
        tokens = int(inputs["attention_mask"].sum())
        timings = {}
        for title, run in (
            (f"prompt, {tokens} tokens", logits),
            (f"prompt and {NEW_TOKENS} tokens each", generate),
        ):
            runs = partial(run, dense, inputs), partial(run, parallel, inputs)
            timings[title] = timing.compare(session, title, *runs, report)
    timing.show(session, timings)

    dense_logits, exact_logits, dense_tokens = expected
    differing = int((our_tokens != dense_tokens).sum())
    outcome.facts = {
        "timings": {title: timing.as_rows(variants) for title, variants in timings.items()},
        "tokens": our_tokens.tolist(),
        "tokens that differ": differing,
    }
    real = inputs["attention_mask"].bool()  # where there is padding, logits mean nothing
    if session.dtype == torch.float32:
        outcome.checks.append(Check("tokens that differ from the dense run's", differing, 0.0))
    else:
        session.say(f"tokens that differ from the dense run's: {differing} (ties in low precision)")
    outcome.checks += [
        Check("ranks that disagree", float(not session.ranks_agree(ours)), 0.0),
        error_check(ours[real], dense_logits[real], exact_logits[real], FLOAT32_LIMIT),
    ]
    session.show(outcome)
    return outcome


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """[prompts, longest, vocabulary], as `generate` would ask for them."""
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    return model(**inputs, position_ids=positions, use_cache=False).logits


def generate(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """[prompts, longest + NEW_TOKENS]: greedy, with the key-value cache."""
    return model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,  # an end of text would shorten what is timed
    )


def _references(
    session: Session, file: GGUFLlama, dense: nn.Module, inputs: dict[str, Tensor]
) -> list[Tensor] | None:
    """Rank 0: dense logits in the session's dtype and in float32, and the dense tokens."""
    if session.rank != 0:
        return None
    own = logits(dense, inputs)
    exact = own
    if session.dtype != torch.float32:
        exact = logits(file.model().to(session.device), inputs)
    return [own, exact, generate(dense, inputs)]


def _show_texts(session: Session, tokenizer: Any, tokens: Tensor) -> None:
    session.say()
    for row in tokens[: len(PROMPTS)].tolist():
        session.say("  " + " ".join(tokenizer.decode(row).split()))
    session.say()
