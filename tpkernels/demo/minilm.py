"""all-MiniLM-L6-v2: sentences to embeddings, dense and tensor-parallel."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.demo import timing
from tpkernels.demo.packages import MINILM
from tpkernels.demo.session import Check, Outcome, Session, error_check
from tpkernels.errors import ConfigError
from tpkernels.testing.comparison import max_relative_error

# Each sentence is followed by one that says nearly the same.
SENTENCES = (
    "The cat sat on the warm windowsill and watched the birds.",
    "A kitten was lying by the sunny window, looking at sparrows.",
    "The central bank raised interest rates by half a percentage point.",
    "Borrowing became more expensive after the monetary authority's decision.",
    "She repaired the bicycle chain with a small set of tools.",
    "The bike's chain was fixed by her using a pocket toolkit.",
    "Glaciers in the Alps have been shrinking faster every summer.",
    "Mountain ice in Switzerland melts more quickly with each passing year.",
    "The recipe calls for two eggs, flour, butter and a pinch of salt.",
    "To bake it you need butter, flour, a little salt and a couple of eggs.",
    "The orchestra played Beethoven's fifth symphony to a full hall.",
    "A sold-out audience heard the musicians perform a Beethoven symphony.",
    "Our train was delayed for three hours because of heavy snow.",
    "Due to the snowstorm the railway service ran very late.",
    "The new vaccine protects children against severe forms of measles.",
    "Immunisation keeps kids from becoming seriously ill with measles.",
)
# Rounding in float32 gives a few 1e-7, as six layers' sums of 384 to 1536 terms do.
FLOAT32_LIMIT = 1e-5


@dataclass(frozen=True)
class SentenceModel:
    """The encoder with what turns its hidden states into embeddings."""

    encoder: nn.Module
    tokenizer: Any

    def tokenize(self, sentences: list[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, [sentences, longest], int64."""
        encodings = self.tokenizer.encode_batch(sentences)
        return {
            "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
        }


def load(path: Path, dtype: torch.dtype = torch.float32) -> SentenceModel:
    """The model in directory `path`, in eval mode, on the CPU.

    Raises:
        ConfigError: it does not pool by the mean, the only way `embed` knows.
    """
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging

    pooling = json.loads((path / "1_Pooling" / "config.json").read_text())
    modes = [mode for mode, on in pooling.items() if mode.startswith("pooling_mode") and on]
    if modes != ["pooling_mode_mean_tokens"]:
        raise ConfigError(f"{path} pools by {modes}; only the mean over tokens is known")
    longest = json.loads((path / "sentence_bert_config.json").read_text())["max_seq_length"]
    logging.disable_progress_bar()
    encoder = BertModel.from_pretrained(path, dtype=dtype, local_files_only=True)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(longest)
    tokenizer.enable_padding(pad_id=encoder.config.pad_token_id, pad_token="[PAD]")
    return SentenceModel(encoder.eval(), tokenizer)


def embed(last_hidden_BSH: Tensor, attention_mask_BS: Tensor) -> Tensor:
    """The mean over a sentence's tokens, scaled to length 1: [B, H] in float32."""
    weights_BS1 = attention_mask_BS.unsqueeze(-1).float()
    sums_BH = (last_hidden_BSH.float() * weights_BS1).sum(dim=1)
    return F.normalize(sums_BH / weights_BS1.sum(dim=1).clamp(min=1e-9), dim=1)


def demo(session: Session) -> Outcome:
    """Compare the dense model with its tensor-parallel copy on `session`'s ranks."""
    outcome = Outcome(MINILM.title)
    sentences = list(itertools.islice(itertools.cycle(SENTENCES), session.batch or len(SENTENCES)))
    session.say(f"\n== {MINILM.title}: embeddings of {len(sentences)} sentences")
    with session.step("loading"):
        model = load(MINILM.path(), session.dtype)
        dense = model.encoder.to(session.device)
        inputs = {k: v.to(session.device) for k, v in model.tokenize(sentences).items()}
    mask = inputs["attention_mask"]
    parallel, report = session.parallelize(dense)

    def hidden(encoder: nn.Module) -> Tensor:
        return encoder(**inputs).last_hidden_state

    with torch.inference_mode():
        with session.step("dense run"):
            expected = session.from_rank_0(_references(session, dense, inputs))
        with session.step("tensor-parallel run"):
            our_hidden = hidden(parallel)
        dense_hidden, exact_hidden = expected
        ours, theirs, exact = (embed(h, mask) for h in (our_hidden, dense_hidden, exact_hidden))
        cosines = _show_cosines(session, theirs, ours)
        title = f"{len(sentences)} sentences, {int(mask.sum())} tokens"
        runs = partial(hidden, dense), partial(hidden, parallel)
        timings = {title: timing.compare(session, title, *runs, report)}
    timing.show(session, timings)

    hidden_error = max_relative_error(our_hidden, dense_hidden)
    session.say(f"max relative error of the last hidden state, against dense: {hidden_error:.1e}")
    outcome.facts = {
        "cosines": cosines,
        "timings": {title: timing.as_rows(variants) for title, variants in timings.items()},
        "last hidden state": hidden_error,
    }
    dtype = session.dtype
    outcome.checks = [
        Check("ranks that disagree", float(not session.ranks_agree(our_hidden)), 0.0),
        error_check(ours.to(dtype), theirs.to(dtype), exact, FLOAT32_LIMIT),
    ]
    session.show(outcome)
    return outcome


def _references(
    session: Session, dense: nn.Module, inputs: dict[str, Tensor]
) -> list[Tensor] | None:
    """Rank 0: the dense hidden states in the session's dtype, and in float32."""
    if session.rank != 0:
        return None
    states = dense(**inputs).last_hidden_state
    if session.dtype == torch.float32:
        return [states, states]
    wide = load(MINILM.path()).encoder.to(session.device)
    return [states, wide(**inputs).last_hidden_state]


def _show_cosines(session: Session, dense_BH: Tensor, ours_BH: Tensor) -> list[dict[str, Any]]:
    """Cosine similarities of a few pairs: alike, and not."""
    last = min(len(dense_BH), 8) // 2 * 2
    alike = [(i, i + 1) for i in range(0, last, 2)]
    unlike = [(i, i + 2) for i in range(0, last - 2, 2)]
    rows = []
    session.say("\ncosine similarity      dense   tensor-parallel")
    for kind, pairs in (("alike", alike), ("unlike", unlike)):
        for a, b in pairs:
            dense, ours = float(dense_BH[a] @ dense_BH[b]), float(ours_BH[a] @ ours_BH[b])
            rows.append({"sentences": [a, b], "kind": kind, "dense": dense, "parallel": ours})
            session.say(f"sentences {a:>2} {b:>2} {kind:<7} {dense:7.4f}   {ours:15.4f}")
    return rows
