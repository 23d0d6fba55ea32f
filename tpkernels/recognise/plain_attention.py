"""Attention that users wrote: read from the graph, then proved by evaluating it.

The graph says which linear layers come before and after the softmax (or
``scaled_dot_product_attention``), where dropouts are and which argument could be a mask; shapes
give the head counts. Whether all that is canonical attention is decided by numbers, in
:mod:`tpkernels.recognise.attention_proof`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tpkernels.recognise import canonical
from tpkernels.recognise.attention import KEEP_DENSE
from tpkernels.recognise.attention_proof import (
    SHAPES,
    MaskArgument,
    NoAttention,
    Reading,
    inputs,
    prove,
    prove_mask,
)
from tpkernels.recognise.canonical import Roles
from tpkernels.recognise.probes import all_visible
from tpkernels.recognise.prove import Linear, probe_linears, run_problem
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import AttentionStructure, Refusal, has_hooks, leaf_features
from tpkernels.recognise.trace import (
    Trace,
    Untraceable,
    bind_sdpa,
    buffers_of,
    dropout_of,
    evaluate,
    linears_before,
    signature_of,
    trace,
)

_MATMULS = ("matmul", "bmm", "baddbmm", "einsum")
_DROPOUT_ELSEWHERE = "a dropout lies elsewhere than on the probabilities and the output"


def match_plain_attention(module: nn.Module, scope: Scope) -> AttentionStructure | Refusal | None:
    """The attention that ``module.forward`` computes; None if it does not look like one."""
    optional = _optional_arguments(module)
    try:
        traced = trace(module, _nothing, optional)
    except Untraceable:
        return None  # whoever needs the layers inline finds the reason again
    core = _core(traced)
    if core is None:
        return None
    try:
        return _match(scope, traced, core, optional)
    except NoAttention as problem:
        return Refusal(str(problem), KEEP_DENSE)


def attention_layers(traced: Trace) -> list[str]:
    """The linear layers around the attention that a traced forward computes, if it does."""
    core = _core(traced)
    if core is None:
        return []
    reached = {core, *_until_linear(traced, core)}
    after = [n for n in traced.linears if reached & set(n.all_input_nodes)]
    return [str(n.target) for n in (*linears_before(traced, core), *after)]


def _match(
    scope: Scope, traced: Trace, core: fx.Node, optional: tuple[str, ...]
) -> AttentionStructure:
    out, outer_dropout = _output(traced)
    _check_module(traced)
    if any(n.args != (traced.placeholders[0],) for n in traced.linears if n is not out):
        raise NoAttention("its projections do not all read its first argument (cross attention?)")
    dropout = _inner_dropout(traced, core, out)
    mask = _mask_argument(traced, optional)
    if mask is not None and mask.trace is not traced:
        masked_core = _core(mask.trace)
        masked_out, masked_outer = _output(mask.trace)
        if masked_core is None or masked_outer != outer_dropout:
            raise NoAttention(f"with {mask.name!r} it computes something else")
        if _inner_dropout(mask.trace, masked_core, masked_out) != dropout:
            raise NoAttention(f"with {mask.name!r} its dropout is another")
    traces = [traced] if mask is None else [traced, mask.trace]
    signature = " ".join(signature_of(t) for t in traces)
    buffers = [tensor for t in traces for tensor in buffers_of(t)]
    structure = scope.proved_attention(signature, buffers)
    if structure is None:
        structure = _prove(traced, core, out, mask)
        scope.remember_attention(signature, buffers, structure)
    structure = replace(structure, dropout=dropout, outer_dropout=outer_dropout)
    if mask is None or mask.trace is not traced:
        _run(traced, scope, structure)
    return structure


def _prove(
    traced: Trace, core: fx.Node, out: fx.Node, mask: MaskArgument | None
) -> AttentionStructure:
    paths = tuple(str(node.target) for node in traced.linears)
    linear = probe_linears(traced.module, paths)
    required = mask.name if mask is not None and mask.trace is traced else None
    reading = _read(traced, core, out, linear, required)
    if mask is not None:
        mask = prove_mask(mask, reading, linear)
    roles = reading.roles
    return AttentionStructure(
        core="",
        q=roles.q,
        k=roles.k,
        v=roles.v,
        qkv=roles.qkv,
        qkv_layout="blocks" if roles.qkv is not None else None,
        out=roles.out,
        num_heads=roles.heads,
        num_kv_heads=roles.kv_heads,
        head_dim=roles.head_dim,
        how="replace",
        causal=reading.causal,
        scale=None if reading.scale == roles.head_dim**-0.5 else reading.scale,
        mask_argument=mask.name if mask is not None else None,
        mask_kind=mask.kind if mask is not None else None,
        mask_replaces_causal=mask is not None and mask.replaces_causal,
    )


def _run(traced: Trace, scope: Scope, structure: AttentionStructure) -> None:
    """Run the module itself, without a mask, with its own weights where it has any."""
    s = structure
    roles = Roles(s.out, s.num_heads, s.num_kv_heads, s.head_dim, s.q, s.k, s.v, s.qkv)
    scale = s.head_dim**-0.5 if s.scale is None else s.scale

    def formula(x: Tensor, linear: Linear) -> Tensor:
        return canonical.attention(x, roles, linear, scale=scale, causal=bool(s.causal))

    features = leaf_features(traced.submodule(traced.linears[0]))[0]
    problem = run_problem(traced, scope, repr(s), (*SHAPES[0], features), formula)
    if problem is not None:
        raise NoAttention(problem)


def _check_module(traced: Trace) -> None:
    """Nothing in the module would be lost by replacing it."""
    calls = [str(node.target) for node in traced.linears]
    twice = [path for path in calls if calls.count(path) > 1]
    if twice:
        raise NoAttention(f"the layer {twice[0]!r} is called twice")
    own = {id(p) for path in calls for p in traced.module.get_submodule(path).parameters()}
    extra = [name for name, p in traced.module.named_parameters() if id(p) not in own]
    if extra:
        raise NoAttention(f"it has parameters beside its projections: {', '.join(extra)}")
    hooked = [name for name, m in traced.module.named_modules() if name and has_hooks(m)]
    if hooked:
        raise NoAttention(f"its part {hooked[0]!r} has a hook, which a replacement would not run")
    if traced.kwargs_read:
        raise NoAttention("its forward reads **kwargs")


def _mask_argument(traced: Trace, optional: tuple[str, ...]) -> MaskArgument | None:
    """The one argument beside the first that takes part; whether it is a mask is not yet known."""
    masks = [MaskArgument(str(p.target), traced) for p in traced.placeholders[1:] if p.users]
    for name in optional:
        others = tuple(other for other in optional if other != name)
        try:
            given = trace(traced.module, _nothing, others)
        except Untraceable as error:
            raise NoAttention(f"given {name!r}, {error}") from error
        if any(p.target == name and p.users for p in given.placeholders):
            masks.append(MaskArgument(name, given))
    if len(masks) > 1:
        raise NoAttention(f"its arguments {', '.join(m.name for m in masks)} take part, not one")
    return masks[0] if masks else None


def _core(traced: Trace) -> fx.Node | None:
    """The one call of SDPA, or the one softmax whose result a matrix product takes."""
    cores = []
    for node in traced.graph.nodes:
        weighs = _is_softmax(traced, node) and any(map(_is_matmul, _until_linear(traced, node)))
        if weighs or node.target is F.scaled_dot_product_attention:
            cores.append(node)
    return cores[0] if len(cores) == 1 else None


def _is_softmax(traced: Trace, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(traced.submodule(node), nn.Softmax)
    return node.target in (F.softmax, torch.softmax, "softmax")


def _is_matmul(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    return getattr(node.target, "__name__", str(node.target)) in _MATMULS


def _until_linear(traced: Trace, node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that depend on ``node``, up to the next linear layers."""
    seen: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user not in seen and not traced.is_linear(user):
            seen.add(user)
            yield user
            stack.extend(user.users)


def _output(traced: Trace) -> tuple[fx.Node, str | float | None]:
    """The output projection and the dropout after it."""
    node = traced.output
    if not isinstance(node, fx.Node):
        raise NoAttention("it returns more than one tensor; return the output alone")
    dropout = dropout_of(traced, node)
    if dropout is not None:
        node = node.all_input_nodes[0]
    if not traced.is_linear(node):
        raise NoAttention("its output does not come from one linear layer")
    return node, dropout or None


def _inner_dropout(traced: Trace, core: fx.Node, out: fx.Node) -> str | float | None:
    """The dropout of the probabilities; any other makes it something else."""
    dropouts = [n for n in traced.graph.nodes if dropout_of(traced, n) is not None]
    inner = [n for n in dropouts if n.all_input_nodes[0] is not out]
    if core.target is F.scaled_dot_product_attention:
        p = bind_sdpa(core.args, core.kwargs).get("dropout_p", 0.0)
        if inner or not isinstance(p, float | int):
            raise NoAttention(_DROPOUT_ELSEWHERE)
        return float(p) or None
    for node in inner:
        source = node.all_input_nodes[0]
        while source is not core and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]  # a cast of the probabilities
        if source is not core or len(inner) > 1:
            raise NoAttention(_DROPOUT_ELSEWHERE)
    return (dropout_of(traced, inner[0]) or None) if inner else None


def _read(
    traced: Trace, core: fx.Node, out: fx.Node, linear: Linear, required_mask: str | None
) -> Reading:
    """Roles, scale and causality for which the graph is canonical attention."""
    batch, tokens = SHAPES[0]
    try:
        scores, scale = _scores(traced, core, linear, required_mask)
    except Exception as error:  # the user's own code on another dtype, device or size
        raise NoAttention(f"evaluating it raised {type(error).__name__}: {error}") from error
    width = leaf_features(traced.submodule(out))[0]
    heads, rest = divmod(scores.numel(), batch * tokens * tokens)
    if rest or not heads or width % heads:
        raise NoAttention(f"{width} features into the output layer do not make {heads} heads")
    reason = f"the widths of its projections do not make {heads} heads of {width // heads}"
    for roles in _candidates(traced, core, out, heads, width // heads):
        reading = prove(traced, roles, scores, scale, linear, required_mask)
        if reading is not None and roles.layout == "blocks":
            return reading
        if reading is not None:
            raise NoAttention(
                f"the rows of {roles.qkv!r} go head by head, not in blocks [q | k | v]"
            )
        reason = (
            "it does not compute softmax(scale * q k^T) v on its projections "
            "(position terms inside, or another layout of the heads)"
        )
    raise NoAttention(reason)


def _scores(
    traced: Trace, core: fx.Node, linear: Linear, required_mask: str | None
) -> tuple[Tensor, float | None]:
    """What the softmax gets for the first shape, and the scale where it is stated."""
    batch, tokens = SHAPES[0]
    env = inputs(traced, SHAPES[0])
    env |= {p: all_visible(batch, tokens) for p in traced.placeholders if p.target == required_mask}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if core.target is not F.scaled_dot_product_attention:
            return evaluate(traced, core.all_input_nodes[0], env, linear), None
        arguments = bind_sdpa(core.args, core.kwargs)
        names = ("query", "key", "scale")
        query, key, scale = (evaluate(traced, arguments.get(n), env, linear) for n in names)
    if key.shape[:-2] != query.shape[:-2]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return query @ key.transpose(-2, -1), scale


def _candidates(
    traced: Trace, core: fx.Node, out: fx.Node, heads: int, head_dim: int
) -> Iterator[Roles]:
    """Assignments of the linear layers before the softmax to q, k and v that fit the widths."""
    before = [node for node in traced.linears if node is not out]
    width = {str(n.target): leaf_features(traced.submodule(n))[1] for n in before}
    path = str(out.target)
    if len(width) == 1:
        (qkv,) = width
        kv_heads, rest = divmod(width[qkv] - heads * head_dim, 2 * head_dim)
        if rest == 0 and kv_heads > 0 and heads % kv_heads == 0:
            yield Roles(path, heads, kv_heads, head_dim, qkv=qkv)
        if kv_heads == heads and rest == 0:
            yield Roles(path, heads, heads, head_dim, qkv=qkv, layout="per_head")
        return
    if len(width) != 3:
        raise NoAttention(f"{len(width)} linear layers come before its softmax, not 3 or 1")
    for q, k, v in _orders(traced, core, list(width)):
        kv_heads, rest = divmod(width[k], head_dim)
        fits = width[q] == heads * head_dim and width[k] == width[v] and rest == 0
        if fits and kv_heads > 0 and heads % kv_heads == 0:
            yield Roles(path, heads, kv_heads, head_dim, q=q, k=k, v=v)


def _orders(traced: Trace, core: fx.Node, paths: list[str]) -> list[tuple[str, ...]]:
    """The layers as (q, k, v); for a softmax both orders of the two that it depends on."""
    if core.target is F.scaled_dot_product_attention:
        arguments = bind_sdpa(core.args, core.kwargs)
        sources = [_linears_of(traced, arguments.get(n)) for n in ("query", "key", "value")]
        order = tuple(paths_of[0] for paths_of in sources if len(paths_of) == 1)
        if len(set(order)) != 3:
            raise NoAttention("query, key and value do not come from one linear layer each")
        return [order]
    scoring = _linears_of(traced, core)
    (value, *others) = [path for path in paths if path not in scoring] or [""]
    if len(scoring) != 2 or others:
        raise NoAttention(f"its softmax depends on {len(scoring)} linear layers, not 2")
    return [(scoring[0], scoring[1], value), (scoring[1], scoring[0], value)]


def _linears_of(traced: Trace, node: Any) -> list[str]:
    """Linear layers that ``node`` depends on."""
    sources = {node, *_sources(node)} if isinstance(node, fx.Node) else set()
    return [str(n.target) for n in traced.linears if n in sources]


def _sources(node: fx.Node) -> set[fx.Node]:
    """Everything that ``node`` depends on."""
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source not in seen:
            seen.add(source)
            stack.extend(source.all_input_nodes)
    return seen


def _optional_arguments(module: nn.Module) -> tuple[str, ...]:
    """Arguments after the first whose default is None."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    return tuple(p.name for p in parameters if p.default is None)


def _nothing(module: nn.Module) -> bool:
    """Trace through everything that is not a layer of ``torch.nn``."""
    return False
