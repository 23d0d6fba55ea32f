"""Proof that a traced forward is canonical attention: both are evaluated and compared.

The graph and :func:`canonical.attention` get the same random weights, inputs and masks, in two
sizes. What differs in anything but rounding (rotary embeddings, biases on the scores, another
grouping of heads, a mask that means something else) is not canonical attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from tpkernels.recognise import canonical
from tpkernels.recognise.canonical import MaskReading, Roles
from tpkernels.recognise.prove import Linear, run_problem
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import AttentionStructure, leaf_features
from tpkernels.recognise.trace import Trace, evaluate

SHAPES = ((2, 5), (3, 4))  # batch, tokens: all different, so that no axis passes for another
# float64, relative to the largest output: room for a softmax computed in float32 (6e-8 each).
TOLERANCE = 2e-6

class NoAttention(Exception):
    """The module is attention, but not one that can be replaced; the message says why."""


@dataclass(frozen=True)
class Reading:
    """What the graph without a mask says; ``scale`` and ``causal`` as evaluated."""

    roles: Roles
    scale: float
    causal: bool


def fit(
    traced: Trace,
    roles: Roles,
    scores: Tensor,
    scale: float | None,
    neutral: str | None,
    linear: Linear,
) -> Reading | None:
    """Scale and causality with which these roles reproduce the graph; None if none do."""
    if scale is None:
        x = inputs(traced, SHAPES[0], None)[traced.placeholders[0]]
        q, k, _ = canonical.projections(x, roles, linear)
        products = q @ k.repeat_interleave(roles.heads // roles.kv_heads, dim=1).transpose(-2, -1)
        diagonal = products.diagonal(dim1=-2, dim2=-1).flatten()  # visible under any mask
        largest = int(diagonal.abs().argmax())
        given = scores.reshape(products.shape).diagonal(dim1=-2, dim2=-1).flatten()
        scale = float(given[largest] / diagonal[largest])
    for causal in (False, True):
        reading = Reading(roles, scale, causal)
        if agrees(traced, reading, linear, neutral, reading_of_mask="none"):
            return reading
    return None


def agrees(
    traced: Trace,
    reading: Reading,
    linear: Linear,
    mask_name: str | None,
    reading_of_mask: MaskReading,
    masks: dict[tuple[int, int], Tensor] | None = None,
) -> bool:
    """Whether graph and formula give the same, in every shape."""
    for shape in SHAPES:
        env = inputs(traced, shape, mask_name)
        mask = masks[shape] if masks is not None else None
        if mask is not None:
            env |= {p: mask for p in traced.placeholders if p.target == mask_name}
        x = env[traced.placeholders[0]]
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                given = evaluate(traced, traced.output, env, linear)
        except Exception:  # the user's own code on this mask or size: it does not compute this
            return False
        expected = canonical.attention(
            x,
            reading.roles,
            linear,
            scale=reading.scale,
            causal=reading.causal,
            mask=mask,
            reading=reading_of_mask,
        )
        if not isinstance(given, Tensor) or given.shape != expected.shape:
            return False
        error = float((given - expected).abs().max())
        if not error <= TOLERANCE * float(expected.abs().max()):
            return False
    return True


def with_mask(
    traced: Trace, name: str, structure: AttentionStructure, reading: Reading
) -> AttentionStructure:
    """The structure with what its mask means, found by trying the meanings."""
    linear = probe_linears(traced.module, structure.leaves, torch.float64)
    causalities = (True, False) if reading.causal else (False,)
    for causal in causalities:
        as_read = replace(reading, causal=causal)
        for ndim in (4, 2):

            def accepts(meaning: MaskReading) -> bool:
                masks = {shape: _random_mask(shape, meaning, ndim) for shape in SHAPES}  # noqa: B023
                return agrees(traced, as_read, linear, name, meaning, masks)  # noqa: B023

            kind = None
            if accepts("nonzero_keep"):
                kind = "nonzero_keep"
            elif accepts("keep"):
                kind = "sdpa"
            elif accepts("additive"):
                kind = "additive"
            elif accepts("drop"):
                raise NoAttention(
                    f"its argument {name!r} hides where it is True; True must mean attend"
                )
            if kind is not None:
                return replace(
                    structure,
                    mask_kind=kind,
                    causal=reading.causal,
                    mask_replaces_causal=reading.causal and not causal,
                )
    raise NoAttention(
        f"its argument {name!r} is no mask that is broadcast to [batch, heads, tokens, tokens]"
    )


def _random_mask(shape: tuple[int, int], meaning: MaskReading, ndim: int) -> Tensor:
    """A random mask under which every token sees itself."""
    batch, tokens = shape
    size = (batch, 1, tokens, tokens) if ndim == 4 else (tokens, tokens)
    generator = torch.Generator().manual_seed(7)
    random = torch.randn(size, dtype=torch.float64, generator=generator)
    if meaning == "additive":
        return random
    visible = (random > 0) | torch.eye(tokens, dtype=torch.bool)
    if meaning == "drop":
        return ~visible
    return visible.double() if meaning == "nonzero_keep" else visible


def run_itself(traced: Trace, scope: Scope, structure: AttentionStructure, r: Reading) -> str | None:
    """Run the module itself, with its own weights, where it has any."""
    features = features(traced)
    return run_problem(
        traced,
        scope,
        repr(structure),
        (*SHAPES[0], features),
        lambda x, linear: canonical.attention(x, r.roles, linear, scale=r.scale, causal=r.causal),
    )


def inputs(traced: Trace, shape: tuple[int, int], neutral: str | None) -> dict[fx.Node, Tensor]:
    """Random x [B, T, features]; a mask argument that must be given hides nothing."""
    generator = torch.Generator().manual_seed(8)
    size = (*shape, features(traced))
    x = torch.randn(size, dtype=torch.float64, generator=generator)
    known = {traced.placeholders[0]: x}
    for placeholder in traced.placeholders[1:]:
        if placeholder.target == neutral:
            known[placeholder] = torch.ones(shape[0], 1, shape[1], shape[1], dtype=torch.bool)
    return known


def features(traced: Trace) -> int:
    return leaffeatures(traced.submodule(traced.linears[0]))[0]


