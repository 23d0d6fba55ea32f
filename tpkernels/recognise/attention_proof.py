"""Proof that a traced forward is canonical attention: both are evaluated and compared.

The graph and :func:`canonical.attention` get the same random weights, inputs and masks, in two
sizes. What differs in more than rounding (rotary embeddings, biases on the scores, another
grouping of heads, a mask that means something else) is not canonical attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, fx

from tpkernels.recognise import canonical
from tpkernels.recognise.canonical import MaskReading, Roles
from tpkernels.recognise.probes import all_visible, probe
from tpkernels.recognise.prove import Linear
from tpkernels.recognise.structure import leaf_features
from tpkernels.recognise.trace import Trace, evaluate

SHAPES = ((2, 5), (3, 4))  # batch, tokens: all different, so that no axis passes for another
# float64, relative to the largest output: room for a softmax computed in float32 (6e-8 each).
TOLERANCE = 2e-6

MaskKind = Literal["sdpa", "additive", "nonzero_keep"]


class NoAttention(Exception):
    """The module is attention, but not one that can be replaced; the message says why."""


@dataclass(frozen=True)
class Reading:
    """What a graph says about its attention, as far as it was proved."""

    roles: Roles
    scale: float
    causal: bool


@dataclass(frozen=True)
class MaskArgument:
    """An argument of the forward, traced with it given, and what it was found to mean."""

    name: str
    trace: Trace
    kind: MaskKind | None = None
    replaces_causal: bool = False


def prove(
    traced: Trace,
    roles: Roles,
    scores: Tensor,
    scale: float | None,
    linear: Linear,
    required_mask: str | None,
) -> Reading | None:
    """The scale and causality with which ``roles`` reproduce the graph without a mask.

    ``scores`` [B, H, T, T] in any shape is what its softmax gets for ``inputs(SHAPES[0])``; where
    ``scale`` is not stated it is their ratio to q k^T. A ``required_mask`` hides nothing.
    """
    if scale is None:
        x = inputs(traced, SHAPES[0])[traced.placeholders[0]]
        q, k, _ = canonical.projections(x, roles, linear)
        products = q @ k.repeat_interleave(roles.heads // roles.kv_heads, dim=1).transpose(-2, -1)
        given = scores.reshape(products.shape).diagonal(dim1=-2, dim2=-1).flatten()
        products = products.diagonal(dim1=-2, dim2=-1).flatten()  # visible under any mask
        largest = int(products.abs().argmax())
        scale = _rounded(float(given[largest] / products[largest]), roles.head_dim, scores.dtype)
    masks = None
    if required_mask is not None:
        masks = {shape: all_visible(*shape) for shape in SHAPES}
    for causal in (False, True):
        reading = Reading(roles, scale, causal)
        if _agrees(traced, reading, linear, required_mask, masks, "keep"):
            return reading
    return None


def prove_mask(mask: MaskArgument, reading: Reading, linear: Linear) -> MaskArgument:
    """What the mask means, found by trying the meanings; broadcast to [B, H, T, T].

    Raises:
        NoAttention: none of the meanings, or True hides.
    """

    def accepts(meaning: MaskReading, ndim: int, causal: bool) -> bool:
        masks = {shape: _random_mask(shape, meaning, ndim) for shape in SHAPES}
        as_read = replace(reading, causal=causal)
        return _agrees(mask.trace, as_read, linear, mask.name, masks, meaning)

    kinds: tuple[tuple[MaskReading, MaskKind], ...] = (
        ("nonzero_keep", "nonzero_keep"),
        ("keep", "sdpa"),
        ("additive", "additive"),
    )
    for causal in (True, False) if reading.causal else (False,):
        for ndim in (4, 2):
            for meaning, kind in kinds:
                if accepts(meaning, ndim, causal):
                    return replace(mask, kind=kind, replaces_causal=reading.causal and not causal)
            if accepts("drop", ndim, causal):
                reason = f"its argument {mask.name!r} hides where it is True"
                raise NoAttention(f"{reason}; scaled_dot_product_attention attends there")
    raise NoAttention(
        f"its argument {mask.name!r} is no mask that is broadcast to [batch, heads, tokens, tokens]"
    )


def inputs(traced: Trace, shape: tuple[int, int]) -> dict[fx.Node, Tensor]:
    """A random first argument [B, T, features] of float64."""
    features = leaf_features(traced.submodule(traced.linears[0]))[0]
    return {traced.placeholders[0]: probe(*shape, features, seed=8)}


def _rounded(scale: float, head_dim: int, dtype: torch.dtype) -> float:
    """The scale that was meant, from one that was measured in ``dtype``."""
    accuracy = 1e3 * torch.finfo(dtype).eps
    if abs(scale * head_dim**0.5 - 1) < accuracy:
        return head_dim**-0.5
    return float(f"{scale:.{-math.ceil(math.log10(accuracy))}g}")


def _agrees(
    traced: Trace,
    reading: Reading,
    linear: Linear,
    mask_name: str | None,
    masks: dict[tuple[int, int], Tensor] | None,
    meaning: MaskReading,
) -> bool:
    """Whether graph and formula give the same, in every shape."""
    for shape in SHAPES:
        env = inputs(traced, shape)
        x = env[traced.placeholders[0]]
        mask = None if masks is None else masks[shape]
        if mask is not None:
            env |= {p: mask for p in traced.placeholders if p.target == mask_name}
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
            meaning=meaning,
        )
        if not isinstance(given, Tensor) or given.shape != expected.shape:
            return False
        error = float((given - expected).abs().max())
        if not error <= TOLERANCE * float(expected.abs().max()):
            return False
    return True


def _random_mask(shape: tuple[int, int], meaning: MaskReading, ndim: int) -> Tensor:
    """A random mask under which every token sees itself."""
    batch, tokens = shape
    size = (batch, 1, tokens, tokens) if ndim == 4 else (tokens, tokens)
    random = probe(*size, seed=7)
    if meaning == "additive":
        return random
    visible = (random > 0) | torch.eye(tokens, dtype=torch.bool, device="cpu")
    if meaning == "drop":
        return ~visible
    return visible.double() if meaning == "nonzero_keep" else visible
