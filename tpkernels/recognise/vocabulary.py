"""The token embedding and the output head of a language model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import (
    VocabularyStructure,
    is_leaf_linear,
    leaf_features,
    linear_problem,
)


@dataclass(frozen=True)
class VocabularyMatch:
    """The pair, if there is one that can be split, and why other embeddings stay, by path."""

    structure: VocabularyStructure | None
    kept: dict[str, str]


def match_vocabulary(model: nn.Module, scope: Scope) -> VocabularyMatch:
    """Find the embedding and head: what transformers' accessors say, else by weights and sizes.

    Without accessors: an embedding whose weight is also a linear layer's, or the one linear layer
    outside the repeated blocks that maps the embedding's width to its number of rows.
    """
    embeddings = [m for m in scope.names if isinstance(m, nn.Embedding)]
    kept = {scope.path(m): "no output head belongs to it (positions, types)" for m in embeddings}
    if callable(getattr(model, "get_input_embeddings", None)):
        pair = _by_accessors(model)
        if pair is not None and pair[1] is None and scope.path(pair[0]) in kept:
            kept[scope.path(pair[0])] = "the model has no output head over its vocabulary"
    else:
        pair = _by_weights(embeddings, scope)
    embedding, head = pair if pair is not None else (None, None)
    if embedding is None or head is None or embedding not in scope.names:
        return VocabularyMatch(None, kept)
    problem = _problem(embedding, head, scope)
    if problem is not None:
        return VocabularyMatch(None, kept | {scope.path(embedding): problem})
    kept.pop(scope.path(embedding))
    structure = VocabularyStructure(
        embedding=scope.path(embedding),
        head=scope.path(head),
        tied=head.weight is embedding.weight,
        head_bias_tied_to=_other_name(head, scope),
    )
    return VocabularyMatch(structure, kept)


def _by_accessors(model: nn.Module) -> tuple[nn.Module, nn.Module | None] | None:
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None
    return None if embedding is None else (embedding, head)


def _by_weights(
    embeddings: list[nn.Embedding], scope: Scope
) -> tuple[nn.Module, nn.Module | None] | None:
    linears = [m for m in scope.names if is_leaf_linear(m) and not scope.in_block(m)]
    tied = [(e, m) for e in embeddings for m in linears if m.weight is e.weight]
    sized = [
        (e, m)
        for e in embeddings
        for m in linears
        if leaf_features(m) == (e.embedding_dim, e.num_embeddings) and scope.block_items
    ]
    candidates = tied or sized
    return candidates[0] if len(candidates) == 1 else None


def _problem(embedding: nn.Module, head: nn.Module, scope: Scope) -> str | None:
    """Why the pair cannot be split over the vocabulary; never one half of it."""
    if (
        not isinstance(embedding, nn.Embedding)
        or type(embedding).forward is not nn.Embedding.forward
    ):
        return f"{type(embedding).__qualname__} is not a plain nn.Embedding"
    if type(embedding.weight) is not nn.Parameter or not embedding.weight.is_floating_point():
        return f"its weight is a {type(embedding.weight).__qualname__} of {embedding.weight.dtype}"
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return "max_norm, scale_grad_by_freq and sparse need the whole table"
    if not is_leaf_linear(head):
        return f"the output head {scope.path(head)!r} cannot be split: {linear_problem(head)}"
    sizes = embedding.embedding_dim, embedding.num_embeddings
    if leaf_features(head) != sizes:
        return f"the output head {scope.path(head)!r} maps {leaf_features(head)}, not {sizes}"
    allowed = {f"{scope.path(m)}.weight" for m in (embedding, head)}
    for layer in (embedding, head):
        others = set(scope.owners[id(layer.weight)]) - allowed
        if others:
            return f"its weight is also {sorted(others)[0]!r}"
    return None


def _other_name(head: nn.Module, scope: Scope) -> str | None:
    names = scope.owners.get(id(head.bias), []) if head.bias is not None else []
    others = [name for name in names if name != f"{scope.path(head)}.bias"]
    return others[0] if others else None
