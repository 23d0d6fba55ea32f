"""``torch.nn``: MultiheadAttention, TransformerEncoderLayer and TransformerDecoderLayer.

In evaluation the encoder layer may take a fused path that reads whole weights itself; whoever
splits its layers must keep it off that path.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from tpkernels.recognise.activation import identify_activation, is_elementwise
from tpkernels.recognise.attention import KEEP_DENSE
from tpkernels.recognise.structure import (
    AttentionStructure,
    Matches,
    MLPStructure,
    Refusal,
    has_hooks,
    is_leaf_linear,
)

_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def match(module: nn.Module) -> Matches | Refusal | None:
    """The attention of a MultiheadAttention, or the feed-forward and attentions of a layer."""
    if isinstance(module, nn.MultiheadAttention):
        result = _multihead(module)
        return result if isinstance(result, Refusal) else [("", result)]
    layer = next((c for c in _LAYERS if isinstance(module, c)), None)
    if layer is None:
        return None
    own = {
        name
        for cls in type(module).__mro__[: type(module).__mro__.index(layer)]
        for name in vars(cls)
    }
    overridden = own & {"forward", "_ff_block", "_sa_block", "_mha_block"}
    if overridden:
        return None  # its forward is its own; the other rules read it
    structures: list[tuple[str, AttentionStructure | MLPStructure]] = []
    feed_forward = _feed_forward(module)
    if feed_forward is not None:
        structures.append(("", feed_forward))
    for name, cross in (("self_attn", False), ("multihead_attn", True)):
        attention = getattr(module, name, None)
        found = _multihead(attention) if isinstance(attention, nn.MultiheadAttention) else None
        if isinstance(found, AttentionStructure):
            structures.append((name, replace(found, cross=cross)))
    return structures


def _feed_forward(layer: nn.Module) -> MLPStructure | None:
    """``linear2(dropout(activation(linear1(x))))``, which the layer's methods compute."""
    activation = layer.activation
    assert callable(activation)
    if not (is_leaf_linear(layer.linear1) and is_leaf_linear(layer.linear2)):  # type: ignore[arg-type]
        return None
    if not is_elementwise(activation):
        return None
    act = identify_activation(activation)
    is_module = isinstance(activation, nn.Module) and not has_hooks(activation)
    return MLPStructure(
        kind="plain",
        up="linear1",
        down="linear2",
        act=act,
        act_module="activation" if is_module and act is not None else None,
        inner_dropout="dropout",
    )


def _multihead(module: nn.MultiheadAttention) -> AttentionStructure | Refusal:
    if type(module).forward is not nn.MultiheadAttention.forward:
        return Refusal(
            f"{type(module).__qualname__} overrides MultiheadAttention.forward", KEEP_DENSE
        )
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        reason = "add_bias_kv and add_zero_attn add keys that belong to no head shard"
        return Refusal(reason, KEEP_DENSE)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    fused = isinstance(module.in_proj_weight, Tensor)
    weights = [getattr(module, name) for name in (("in_proj_weight",) if fused else names)]
    if not is_leaf_linear(module.out_proj) or any(type(w) is not nn.Parameter for w in weights):
        return Refusal("its weights are not plain nn.Parameters", KEEP_DENSE)
    width = sum(weight.shape[0] for weight in weights)
    if module.embed_dim % module.num_heads or width != 3 * module.embed_dim:
        numbers = f"embed_dim={module.embed_dim}, num_heads={module.num_heads}, rows {width}"
        return Refusal(f"its sizes disagree: {numbers}", KEEP_DENSE)
    q, k, v = (None, None, None) if fused else names
    return AttentionStructure(
        core="",
        q=q,
        k=k,
        v=v,
        qkv="in_proj_weight" if fused else None,
        qkv_layout="blocks" if fused else None,
        out="out_proj",
        num_heads=module.num_heads,
        num_kv_heads=module.num_heads,
        head_dim=module.embed_dim // module.num_heads,
        cross=not fused,
        how="mha",
        dropout=float(module.dropout),
        mask_argument="attn_mask",
    )
