"""``torch.nn.TransformerEncoderLayer`` and ``TransformerDecoderLayer``.

In evaluation the encoder layer may take a fused path that reads whole weights itself; whoever
splits its layers must keep it off that path.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tpkernels.recognise.activation import identify_activation, is_elementwise
from tpkernels.recognise.adapters.multihead import describe_multihead
from tpkernels.recognise.structure import (
    AttentionStructure,
    Matches,
    MLPStructure,
    Refusal,
    has_hooks,
    is_leaf_linear,
)

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_METHODS = ("forward", "_ff_block", "_sa_block", "_mha_block")


def match(module: nn.Module) -> Matches | Refusal | None:
    """The feed-forward and the attentions of a layer whose methods are torch's own."""
    layer = next((cls for cls in _LAYERS if isinstance(module, cls)), None)
    if layer is None or any(_overrides(module, layer, name) for name in _METHODS):
        return None
    structures: list[tuple[str, AttentionStructure | MLPStructure]] = []
    feed_forward = _feed_forward(module)
    if feed_forward is not None:
        structures.append(("", feed_forward))
    for name, cross in (("self_attn", False), ("multihead_attn", True)):
        attention = getattr(module, name, None)
        if isinstance(attention, nn.MultiheadAttention):
            found = describe_multihead(attention)
            if isinstance(found, AttentionStructure):
                structures.append((name, replace(found, cross=cross)))
    return structures


def _overrides(module: nn.Module, layer: type[nn.Module], name: str) -> bool:
    return getattr(type(module), name, None) is not getattr(layer, name, None)


def _feed_forward(layer: nn.Module) -> MLPStructure | None:
    """``linear2(dropout(activation(linear1(x))))``, which the layer's methods compute."""
    activation, up, down = layer.activation, layer.linear1, layer.linear2
    assert callable(activation) and isinstance(up, nn.Module) and isinstance(down, nn.Module)
    if not (is_leaf_linear(up) and is_leaf_linear(down) and is_elementwise(activation)):
        return None
    act = identify_activation(activation)
    is_module = isinstance(activation, nn.Module) and not has_hooks(activation)
    act_module = "activation" if is_module and act is not None else None
    return MLPStructure(
        "plain", "linear1", "linear2", act=act, act_module=act_module, inner_dropout="dropout"
    )
