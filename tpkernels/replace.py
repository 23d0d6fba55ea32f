"""From what was recognised to split modules: one function a kind, checks before changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from tpkernels.comm.group import Group
from tpkernels.errors import UnsupportedModuleError
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    HeadPartition,
    RowParallelLinear,
    TPAttention,
    TPMultiheadAttention,
    VocabParallelEmbedding,
)
from tpkernels.modules.causal_lm_loss import split_loss_
from tpkernels.modules.class_swap import set_attributes
from tpkernels.modules.dropout import FusedActivation, ShardedDropout
from tpkernels.modules.head_partition import rows_layout
from tpkernels.modules.head_sharded import shard_heads_
from tpkernels.modules.mlp import fused_layout
from tpkernels.modules.projections import split_output_, split_projections_
from tpkernels.recognise.structure import (
    AttentionStructure,
    Found,
    MLPStructure,
    VocabularyStructure,
    leaf_features,
)
from tpkernels.shard_spec import layout_from_blocks

LEAVES = "Column+RowParallelLinear"  # linear layers in a module whose forward stays


@dataclass(frozen=True)
class Replacement:
    """A change that has been checked and can be made: ``apply()``, described for the report."""

    name: str
    kind: str
    action: str
    detail: str
    apply: Callable[[], None]


class TiedParameters:
    """Parameters registered under several names stay one parameter after one owner splits it."""

    def __init__(self, model: nn.Module) -> None:
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        dense: dict[int, Tensor] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, name))
                    dense[id(parameter)] = parameter
        self._tied = [(dense[key], held) for key, held in owners.items() if len(held) > 1]

    def rebind(self) -> None:
        """Give every owner the split parameter that one of them has got."""
        for dense, owners in self._tied:
            current = [module._parameters[name] for module, name in owners]
            split = next((p for p in current if p is not dense), None)
            if split is not None:
                for module, name in owners:
                    module._parameters[name] = split  # type: ignore[assignment]


def plan_replacement(model: nn.Module, found: Found, group: Group) -> Replacement:
    """Check that ``found`` can be split over ``group``; raises before anything has changed."""
    structure = found.structure
    if isinstance(structure, MLPStructure):
        return _plan_mlp(model.get_submodule(found.path), found, structure, group)
    if isinstance(structure, AttentionStructure):
        return _plan_attention(model, found, structure, group)
    return _plan_vocabulary(model, found, structure, group)


# --- MLP ------------------------------------------------------------------------------------


def _plan_mlp(module: nn.Module, found: Found, s: MLPStructure, group: Group) -> Replacement:
    _, out_features = leaf_features(module.get_submodule(s.up))
    width = out_features // 2 if s.kind == "gated_fused" else out_features
    if s.kind == "gated_fused":
        fused_layout(out_features, group, found.path)  # raises when it is odd
    if not s.whole and isinstance(s.inner_dropout, float) and s.inner_dropout > 0.0:
        raise UnsupportedModuleError(
            f"{found.path or 'model'}: between {s.up} and {s.down} its forward calls a functional "
            f"dropout (p={s.inner_dropout}), whose masks would be equal on all ranks. "
            "Fix: use an nn.Dropout module there"
        )
    form = f"{s.kind.replace('_fused', '')} {s.act or 'other activation'}, d_ff {width}"
    if s.whole and s.act is not None:
        act = s.act

        def apply_whole() -> None:
            TPMLP.shard_(
                module,
                group,
                up=s.up,
                down=s.down,
                gate=s.gate,
                activation=act,
                fused=s.kind == "gated_fused",
                gate_first=s.gate_first,
                dropout=s.inner_dropout or 0.0,
                outer_dropout=s.outer_dropout or 0.0,
                name=found.path,
            )

        return Replacement(found.path, "mlp", "TPMLP", form, apply_whole)

    def apply_leaves() -> None:
        fuse = s.act_module is not None and s.kind == "plain" and s.act is not None
        layout = fused_layout(out_features, group, s.up) if s.kind == "gated_fused" else None
        for leaf in (s.up, s.gate):
            if leaf is not None:
                ColumnParallelLinear.shard_(
                    module.get_submodule(leaf),
                    group,
                    name=f"{found.path}.{leaf}",
                    layout=layout,
                    activation=(s.act or "none") if fuse else "none",
                )
        if fuse and s.act_module is not None:
            FusedActivation.fuse_(module.get_submodule(s.act_module), module.get_submodule(s.up))
        if isinstance(s.inner_dropout, str):
            inner = module.get_submodule(s.inner_dropout)
            if isinstance(inner, nn.Dropout):  # an nn.Identity took its place otherwise
                ShardedDropout.shard_(inner, group)
        RowParallelLinear.shard_(module.get_submodule(s.down), group, name=f"{found.path}.{s.down}")
        if isinstance(module, nn.TransformerEncoderLayer):
            _disable_fast_path(module)

    return Replacement(found.path, "mlp", LEAVES, form, apply_leaves)


def _disable_fast_path(layer: nn.TransformerEncoderLayer) -> None:
    """PyTorch's fused inference path reads whole weights past our modules; switch it off."""
    set_attributes(layer, activation_relu_or_gelu=0)


# --- attention ------------------------------------------------------------------------------


def _plan_attention(
    model: nn.Module, found: Found, s: AttentionStructure, group: Group
) -> Replacement:
    module = model.get_submodule(found.path)
    heads = HeadPartition.of(
        s.num_heads, s.num_kv_heads, s.head_dim, group.size, found.path or "model"
    )
    if s.how == "mha":

        def apply_mha() -> None:
            TPMultiheadAttention.shard_(module, group, name=found.path)
            parent = model.get_submodule(found.path.rpartition(".")[0])
            if isinstance(parent, nn.TransformerEncoderLayer):
                _disable_fast_path(parent)

        action, apply = "TPMultiheadAttention", apply_mha
    elif s.how == "replace":

        def apply_replace() -> None:
            TPAttention.shard_(
                module,
                group,
                num_heads=s.num_heads,
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                q=s.q or "",
                k=s.k or "",
                v=s.v or "",
                qkv=s.qkv,
                out=s.out,
                causal=bool(s.causal),
                dropout=s.dropout or 0.0,
                outer_dropout=s.outer_dropout or 0.0,
                scale=s.scale,
                mask_argument=s.mask_argument,
                mask_kind=s.mask_kind,
                mask_replaces_causal=s.mask_replaces_causal,
                own_keywords=False,
                name=found.path,
            )

        action, apply = "TPAttention", apply_replace
    else:

        def apply_leaves() -> None:
            _split_leaves(module, s, heads, group, found.path)

        action, apply = "HeadShardedAttention", apply_leaves
    return Replacement(found.path, "attention", action, heads.describe(), apply)


def _split_leaves(
    module: nn.Module, s: AttentionStructure, heads: HeadPartition, group: Group, name: str
) -> None:
    core = module.get_submodule(s.core)
    projections: list[nn.Module] = []
    if s.qkv is not None:
        rows = {"q": heads.q_rows(), "k": heads.kv_rows(), "v": heads.kv_rows()}
        layout = layout_from_blocks([(rows[role], total) for role, total in s.qkv_blocks])
        fused = module.get_submodule(s.qkv)
        ColumnParallelLinear.shard_(fused, group, name=name, layout=layout)
        if s.q is None:
            projections = [fused]
        else:
            ColumnParallelLinear.shard_(
                module.get_submodule(s.q), group, name=name, layout=rows_layout(heads.q_rows())
            )
    else:
        if s.q is None or s.k is None or s.v is None:
            raise UnsupportedModuleError(f"{name}: found no q, k and v projections")
        leaves = [module.get_submodule(leaf) for leaf in (s.q, s.k, s.v)]
        split_projections_(leaves, heads, group, name)
        projections = leaves[1:] if s.cross else leaves
    out = module.get_submodule(s.out)
    split_output_(out, heads, group, name)
    shard_heads_(
        core,
        group,
        heads,
        widths=dict(s.width_attributes),
        dropout=_within(s.core, s.dropout),
        projections=projections,  # type: ignore[arg-type]
        out=out,
    )


def _within(core: str, dropout: float | str | None) -> float | str | None:
    """A path relative to the found module, as seen from its ``core``."""
    return dropout.removeprefix(f"{core}.") if core and isinstance(dropout, str) else dropout


# --- vocabulary -----------------------------------------------------------------------------


def _plan_vocabulary(
    model: nn.Module, found: Found, s: VocabularyStructure, group: Group
) -> Replacement:
    embedding = model.get_submodule(s.embedding)
    rows = embedding.weight.shape[0]  # type: ignore[union-attr,index]

    def apply() -> None:
        VocabParallelEmbedding.shard_(embedding, group, name=s.embedding)
        if s.head is not None:
            ColumnParallelLinear.shard_(
                model.get_submodule(s.head), group, name=s.head, gather_output=True
            )
            split_loss_(model, model.get_submodule(s.head), group)

    detail = f"{rows} rows" + (", one shard shared with the head" if s.tied else "")
    head = "" if s.head is None else " + ColumnParallelLinear"
    name = s.embedding if s.head is None else f"{s.embedding} + {s.head}"
    return Replacement(name, "vocabulary", f"VocabParallelEmbedding{head}", detail, apply)
