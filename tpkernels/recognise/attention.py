"""Attention whose forward can stay: it takes its sizes from the layers, so the layers are split.

Modules of the transformers library hand queries, keys and values as heads to an *attention
interface* (``ALL_ATTENTION_FUNCTIONS``) and view with -1, so they work on a part of the heads.
An adapter says which layers are q, k, v and out (:class:`Projections`); :func:`describe` checks
that this is so and counts the heads from the layers' widths. Every number that the module or its
config also states must agree.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from tpkernels.recognise.structure import (
    AttentionStructure,
    Refusal,
    WidthMeaning,
    is_leaf_linear,
    leaf_features,
    linear_problem,
)

KEEP_DENSE = "strict=False keeps it dense; plan={...} names the layers to split by hand"

_Q_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_KV_GROUPS = ("num_key_value_groups",)
_Q_WIDTHS = ("all_head_size", "split_size")
_MODEL_WIDTHS = ("embed_dim", "hidden_size", "inner_dim")  # rank-local only where they mean heads
_HEAD_DIMS = ("head_dim", "attention_head_size")
_CROSS_ARGUMENTS = ("encoder_hidden_states", "key_value_states")


@dataclass(frozen=True)
class Projections:
    """Where an attention has its layers; paths relative to the found module."""

    out: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None
    core: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """All layers, each once."""
        return tuple(p for p in (self.q, self.k, self.v, self.qkv, self.out) if p is not None)


@dataclass(frozen=True)
class _Heads:
    query: int
    kv: int
    dim: int


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether the forward hands its heads to transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def forward_reads(module: nn.Module, attribute: str) -> bool:
    """Whether a method of ``module`` (but not ``__init__``) reads ``self.<attribute>``."""
    return ("self", attribute) in _attribute_reads(type(module))  # type: ignore[arg-type]


def describe(module: nn.Module, names: Projections) -> AttentionStructure | Refusal:
    """The attention with these projections, or why it cannot be split."""
    core = module.get_submodule(names.core)
    for path in names.paths:
        layer = module.get_submodule(path)
        if not is_leaf_linear(layer):
            return Refusal(f"{path!r} cannot be split: {linear_problem(layer)}", KEEP_DENSE)
    own = {id(p) for path in names.paths for p in module.get_submodule(path).parameters()}
    extra = [name for name, p in core.named_parameters() if id(p) not in own]
    if extra:
        return Refusal(f"it has parameters beside its projections: {', '.join(extra)}", KEEP_DENSE)
    heads = _count_heads(module, core, names)
    if isinstance(heads, Refusal):
        return heads
    for owner, attribute in _attribute_reads(type(core)):  # type: ignore[arg-type]
        if owner == "config" and attribute in (*_Q_HEADS, *_KV_HEADS, *_MODEL_WIDTHS):
            return Refusal(
                f"its forward reads config.{attribute}, which is not per rank", KEEP_DENSE
            )
    scale = vars(core).get("scaling")
    default_scale = isinstance(scale, float) and math.isclose(scale, heads.dim**-0.5)
    causal = vars(core).get("is_causal")
    parameters = inspect.signature(inspect.unwrap(type(core).forward)).parameters
    return AttentionStructure(
        core=names.core,
        q=names.q,
        k=names.k,
        v=names.v,
        qkv=names.qkv,
        qkv_layout="blocks" if names.qkv is not None else None,
        out=names.out,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        width_attributes=_width_attributes(core, heads),
        cross=_is_cross(module, core),
        how="leaves",
        causal=causal if isinstance(causal, bool) else None,
        dropout=_dropout(core, names.core),
        scale=scale if isinstance(scale, float) and not default_scale else None,
        mask_argument="attention_mask" if "attention_mask" in parameters else None,
    )


def _count_heads(module: nn.Module, core: nn.Module, names: Projections) -> _Heads | Refusal:
    """Heads from the layers' widths, checked against every number stated elsewhere."""
    merged = leaf_features(module.get_submodule(names.out))[0]

    def width(path: str) -> int:
        return leaf_features(module.get_submodule(path))[1]

    if names.qkv is not None:
        total = width(names.qkv)
        q_width = width(names.q) if names.q is not None else merged
        kv_total = total if names.q is not None else total - q_width
        k_width, v_width = kv_total // 2, kv_total - kv_total // 2
    else:
        assert names.q is not None and names.k is not None and names.v is not None
        q_width, k_width, v_width = width(names.q), width(names.k), width(names.v)
    sizes = f"query {q_width}, key {k_width}, value {v_width}, output {merged} features"
    if q_width != merged or k_width != v_width:
        return Refusal(f"the widths of its projections disagree: {sizes}", KEEP_DENSE)
    head_dim = _stated(core, _HEAD_DIMS)
    if head_dim is None:
        count = _stated(core, _Q_HEADS)
        if not count or q_width % count:
            return Refusal(f"its head size is not stated ({sizes}; heads: {count})", KEEP_DENSE)
        head_dim = q_width // count
    if head_dim < 1 or q_width % head_dim or k_width % head_dim or k_width == 0:
        return Refusal(f"head size {head_dim} does not divide {sizes}", KEEP_DENSE)
    heads = _Heads(q_width // head_dim, k_width // head_dim, head_dim)
    if heads.query % heads.kv:
        return Refusal(f"{heads.query} query heads are no multiple of {heads.kv}", KEEP_DENSE)
    for source, attribute, given, counted in _claims(core, heads):
        if given != counted:
            reason = f"{source}{attribute}={given}, but the layers' widths give {counted} ({sizes})"
            return Refusal(reason, f"{KEEP_DENSE}; or set {attribute} to what the layers have")
    return heads


def _claims(core: nn.Module, heads: _Heads) -> Iterator[tuple[str, str, int, int]]:
    """(source, attribute, given, counted) of each head count that the module states.

    The config is asked only where the module itself does not say.
    """
    config = vars(core).get("config")
    for attributes, counted, in_config in (
        (_Q_HEADS, heads.query, "num_attention_heads"),
        (_KV_HEADS, heads.kv, "num_key_value_heads"),
        (_KV_GROUPS, heads.query // heads.kv, ""),
    ):
        stated = [name for name in attributes if isinstance(vars(core).get(name), int)]
        yield from (("", name, vars(core)[name], counted) for name in stated)
        given = getattr(config, in_config, None) if in_config and not stated else None
        if isinstance(given, int):
            yield "config.", in_config, given, counted


def _width_attributes(core: nn.Module, heads: _Heads) -> dict[str, WidthMeaning]:
    attributes: dict[str, WidthMeaning] = {}
    meanings: tuple[tuple[tuple[str, ...], WidthMeaning], ...] = (
        (_Q_HEADS, "q_heads"),
        (_KV_HEADS, "kv_heads"),
        (_KV_GROUPS, "kv_groups"),
        (_Q_WIDTHS, "q_width"),
    )
    for names, meaning in meanings:
        attributes |= {n: meaning for n in names if isinstance(vars(core).get(n), int)}
    q_width = heads.query * heads.dim
    for name in _MODEL_WIDTHS:
        if vars(core).get(name) == q_width and forward_reads(core, name):
            attributes[name] = "q_width"
    return attributes


def _is_cross(module: nn.Module, core: nn.Module) -> bool:
    for holder in (module, core):
        if isinstance(vars(holder).get("is_cross_attention"), bool):
            return bool(vars(holder)["is_cross_attention"])
    parameters = inspect.signature(inspect.unwrap(type(core).forward)).parameters
    return any(name in parameters for name in _CROSS_ARGUMENTS)


def _dropout(core: nn.Module, path: str) -> str | float | None:
    for name in ("attn_dropout", "attention_dropout", "dropout"):
        value = getattr(core, name, None)
        if isinstance(value, nn.Dropout):
            return f"{path}.{name}".lstrip(".")
        if isinstance(value, float):
            return value
    return None


def _stated(core: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((vars(core)[n] for n in names if isinstance(vars(core).get(n), int)), None)


@functools.cache
def _attribute_reads(cls: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """(owner, attribute) of every attribute that methods read: ("self", "x"), ("config", "y")."""
    reads: list[tuple[str, str]] = []
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, function in vars(base).items():
            function = inspect.unwrap(function) if callable(function) else function
            if not isinstance(function, FunctionType) or name == "__init__":
                continue
            previous = ""
            for instruction in dis.get_instructions(function):
                loaded = instruction.argval
                argument = str(loaded[-1] if isinstance(loaded, tuple) else loaded)
                if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    reads.append((previous, argument))
                previous = argument
    return tuple(dict.fromkeys(reads))
