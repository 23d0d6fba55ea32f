"""``torch.nn.MultiheadAttention``, whose projections are parameters of its own."""

from __future__ import annotations

from torch import Tensor, nn

from tpkernels.recognise.attention import KEEP_DENSE
from tpkernels.recognise.structure import AttentionStructure, Matches, Refusal, is_leaf_linear

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def match(module: nn.Module) -> Matches | Refusal | None:
    """The attention that ``module`` is; cross where keys and values have their own widths."""
    if not isinstance(module, nn.MultiheadAttention):
        return None
    result = describe_multihead(module)
    return result if isinstance(result, Refusal) else [("", result)]


def describe_multihead(module: nn.MultiheadAttention) -> AttentionStructure | Refusal:
    """The structure of a MultiheadAttention, or why it cannot be split."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        name = type(module).__qualname__
        return Refusal(f"{name} overrides MultiheadAttention.forward", KEEP_DENSE)
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        reason = "add_bias_kv and add_zero_attn add keys that belong to no head shard"
        return Refusal(reason, KEEP_DENSE)
    fused = isinstance(module.in_proj_weight, Tensor)
    weights = [getattr(module, name) for name in (("in_proj_weight",) if fused else _SEPARATE)]
    if not is_leaf_linear(module.out_proj) or any(type(w) is not nn.Parameter for w in weights):
        return Refusal("its weights are not plain nn.Parameters", KEEP_DENSE)
    rows = sum(weight.shape[0] for weight in weights)
    if module.embed_dim % module.num_heads or rows != 3 * module.embed_dim:
        numbers = f"embed_dim={module.embed_dim}, num_heads={module.num_heads}, rows {rows}"
        return Refusal(f"its sizes disagree: {numbers}", KEEP_DENSE)
    q, k, v = (None, None, None) if fused else _SEPARATE
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
