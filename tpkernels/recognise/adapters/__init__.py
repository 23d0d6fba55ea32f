"""Families: each module says in one ``match(module)`` which layers of its attention are which.

``match`` returns structures with their paths relative to ``module``, a :class:`Refusal` for an
attention that it knows and cannot split, or None for a module that is none of its business.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tpkernels.recognise.adapters import bert, fused, multihead, separate, torch_transformer
from tpkernels.recognise.attention import KEEP_DENSE, uses_attention_interface
from tpkernels.recognise.structure import Matches, Refusal

Adapter = Callable[[nn.Module], Matches | Refusal | None]

ADAPTERS: tuple[Adapter, ...] = (
    torch_transformer.match,
    multihead.match,
    bert.match,
    fused.match,
    separate.match,
)


def match(module: nn.Module) -> Matches | Refusal | None:
    """What the first adapter that knows ``module`` says."""
    for adapter in ADAPTERS:
        result = adapter(module)
        if result is not None:
            return result
    if uses_attention_interface(module):
        layers = ", ".join(name for name, _ in module.named_children())
        return Refusal(f"no rule knows an attention with the layers {layers}", KEEP_DENSE)
    return None
