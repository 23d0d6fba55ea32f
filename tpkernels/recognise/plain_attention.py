"""Attention that users wrote: read from the graph, then proved by evaluating it.

The graph says which linear layers come before and after the softmax (or
``scaled_dot_product_attention``), where dropouts are and which argument could be a mask; shapes
give the head counts and one pair of scores the scale. Whether all that is canonical attention is
decided by numbers: the graph and :func:`canonical.attention` get the same random weights and
inputs, in two sizes, and must agree. Rotary embeddings, biases on the scores, another grouping of
heads or a fused projection that is laid out otherwise fail this, whatever they look like.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tpkernels.recognise import canonical
from tpkernels.recognise.attention import KEEP_DENSE
from tpkernels.recognise.canonical import MaskReading, Roles
from tpkernels.recognise.prove import probe_linears, run_problem
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import AttentionStructure, Refusal, has_hooks, leaf_features
from tpkernels.recognise.trace import (
    Trace,
    Untraceable,
    bind_sdpa,
    dropout_of,
    evaluate,
    signature_of,
    trace,
)

_MATMULS = ("matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__")


def match_plain_attention(module: nn.Module, scope: Scope) -> AttentionStructure | Refusal | None:
    """The attention that ``module.forward`` computes; None if it does not look like one."""
    optional = _optional_arguments(module)
    try:
        traced = trace(module, _opaque, optional)
    except Untraceable:
        return None  # the caller reports why
    core = _core(traced)
    if core is None:
        return None
    try:
        return _match(module, scope, traced, core, optional)
    except NoAttention as problem:
        return Refusal(str(problem), KEEP_DENSE)


def _match(
    module: nn.Module, scope: Scope, traced: Trace, core: fx.Node, optional: tuple[str, ...]
) -> AttentionStructure:
    out, outer_dropout = _output(traced)
    _check_module(traced)
    used = [p for p in traced.placeholders[1:] if p.users]
    if len(used) > 1:
        raise NoAttention(f"its arguments {', '.join(p.name for p in used)} take part")
    mask_trace: Trace | None = traced if used else None
    mask_name = str(used[0].target) if used else None
    for name in optional:
        with_argument = _trace_with(module, tuple(o for o in optional if o != name))
        argument = next(p for p in with_argument.placeholders if p.target == name)
        if argument.users and mask_name is not None:
            raise NoAttention(f"its arguments {mask_name} and {name} both take part")
        if argument.users:
            mask_trace, mask_name = with_argument, name
    neutral = None if traced is not mask_trace else mask_name
    reading = _read(traced, core, out, neutral)
    dropout = _inner_dropout(traced, core, out, outer_dropout)
    roles = reading.roles
    structure = AttentionStructure(
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
        dropout=dropout,
        scale=None if math.isclose(reading.scale, roles.head_dim**-0.5) else reading.scale,
        mask_argument=mask_name,
        outer_dropout=outer_dropout,
    )
    if mask_trace is not None and mask_name is not None:
        structure = with_mask(mask_trace, mask_name, structure, reading)
    if neutral is None:
        problem = run_itself(traced, scope, structure, reading)
        if problem is not None:
            raise NoAttention(problem)
    return structure


def _check_module(traced: Trace) -> None:
    calls = [str(node.target) for node in traced.linears]
    twice = [path for path in calls if calls.count(path) > 1]
    if twice:
        raise NoAttention(f"the layer {twice[0]!r} is called twice")
    own = {id(p) for path in calls for p in traced.module.get_submodule(path).parameters()}
    extra = [name for name, p in traced.module.named_parameters() if id(p) not in own]
    if extra:
        raise NoAttention(f"it has parameters beside its projections: {', '.join(extra)}")
    hooked = [n for n, m in traced.module.named_modules() if n and has_hooks(m)]
    if hooked:
        raise NoAttention(f"its part {hooked[0]!r} has a hook, which a replacement would not run")
    if traced.kwargs_read:
        raise NoAttention("its forward reads **kwargs")


def _core(traced: Trace) -> fx.Node | None:
    """The one call of SDPA, or the one softmax whose result a matrix product takes."""
    cores = []
    for node in traced.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            cores.append(node)
        elif _is_softmax(traced, node) and any(_is_matmul(n) for n in _until_linear(traced, node)):
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
        if user in seen or traced.is_linear(user):
            continue
        seen.add(user)
        yield user
        stack.extend(user.users)


def _output(traced: Trace) -> tuple[fx.Node, str | float | None]:
    """The output projection and the dropout after it."""
    node = traced.output
    if not isinstance(node, fx.Node):
        raise NoAttention("it returns more than one tensor; return the output alone")
    dropout: str | float | None = None
    if dropout_of(traced, node) is not None:
        dropout = dropout_of(traced, node)
        node = node.all_input_nodes[0]
    if not traced.is_linear(node):
        raise NoAttention("its output does not come from one linear layer")
    return node, dropout


def _read(traced: Trace, core: fx.Node, out: fx.Node, neutral: str | None) -> Reading:
    """Roles, scale and causality for which the graph is canonical attention."""
    linear = probe_linears(traced.module, tuple(str(n.target) for n in traced.linears), torch.float64)
    env = inputs(traced, SHAPES[0], neutral)
    try:
        scores, scale = _scores(traced, core, env, linear)
    except Exception as error:  # the user's own code on another dtype, device or size
        raise NoAttention(f"evaluating it raised {type(error).__name__}: {error}") from error
    batch, tokens = SHAPES[0]
    width = leaf_features(traced.submodule(out))[0]
    heads = scores.numel() // (batch * tokens * tokens)
    if scores.numel() != heads * batch * tokens * tokens or not heads or width % heads:
        raise NoAttention(f"{width} features into the output layer do not make {heads} heads")
    reason = "its heads and widths do not fit together"
    for roles in _candidates(traced, core, out, heads, width // heads):
        reading = fit(traced, roles, scores, scale, neutral, linear)
        if reading is None:
            reason = (
                "it does not compute softmax(scale * q k^T) v on its projections "
                "(rotary or position terms inside, or another layout of the heads)"
            )
        elif roles.layout == "per_head":
            raise NoAttention(
                f"the rows of {roles.qkv!r} alternate q, k and v by head; blocks [q | k | v] can be split"
            )
        else:
            return reading
    raise NoAttention(reason)


def _scores(
    traced: Trace, core: fx.Node, env: dict[fx.Node, Tensor], linear: canonical.Linear
) -> tuple[Tensor, float | None]:
    """What the softmax gets, as far as the graph shows, and the scale if it is stated."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if core.target is not F.scaled_dot_product_attention:
            scores = evaluate(traced, core.all_input_nodes[0], env, linear)
            return scores, None
        arguments = bind_sdpa(core.args, core.kwargs)
        query = evaluate(traced, arguments["query"], env, linear)
        key = evaluate(traced, arguments["key"], env, linear)
        scale = evaluate(traced, arguments.get("scale"), env, linear)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    repeats = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    key = key.repeat_interleave(repeats, dim=-3) if repeats > 1 else key
    return query @ key.transpose(-2, -1), float(scale)


def _candidates(
    traced: Trace, core: fx.Node, out: fx.Node, heads: int, head_dim: int
) -> Iterator[Roles]:
    """Assignments of the linear layers before the softmax to q, k and v."""
    names = [str(n.target) for n in traced.linears if n is not out]
    if any(n.args != (traced.placeholders[0],) for n in traced.linears if n is not out):
        raise NoAttention("its projections do not all read its first argument (cross attention?)")
    widths = [leaf_features(traced.module.get_submodule(name))[1] for name in names]
    path = str(out.target)
    if len(names) == 1:
        kv_heads, rest = divmod(widths[0] - heads * head_dim, 2 * head_dim)
        if rest == 0 and kv_heads > 0 and heads % kv_heads == 0:
            yield Roles(path, heads, kv_heads, head_dim, qkv=names[0])
            if kv_heads == heads:
                yield Roles(path, heads, heads, head_dim, qkv=names[0], layout="per_head")
        return
    if len(names) != 3:
        raise NoAttention(f"{len(names)} linear layers come before its softmax, not 3 or 1")
    before = _ancestors(core)
    if core.target is F.scaled_dot_product_attention:
        by_argument = bind_sdpa(core.args, core.kwargs)
        order = [by_argument[name] for name in ("query", "key", "value")]
        found = [next((n for n in names if n in _linears_of(traced, a)), "") for a in order]
        permutations = [tuple(found)]
    else:
        scoring = [str(n.target) for n in traced.linears if n in before]
        value = [n for n in names if n not in scoring]
        if len(scoring) != 2:
            raise NoAttention(f"{len(scoring)} linear layers come before its softmax, not 2")
        permutations = [(*scoring, *value), (*reversed(scoring), *value)]
    for q, k, v in permutations:
        if len({q, k, v}) != 3:
            raise NoAttention("query, key and value do not come from one linear layer each")
        size = dict(zip(names, widths, strict=True))
        kv_heads, rest = divmod(size[k], head_dim)
        fits = size[q] == heads * head_dim and size[k] == size[v] and rest == 0 and kv_heads > 0
        if fits and heads % kv_heads == 0:
            yield Roles(path, heads, kv_heads, head_dim, q=q, k=k, v=v)


def _inner_dropout(
    traced: Trace, core: fx.Node, out: fx.Node, outer: str | float | None
) -> str | float | None:
    """The dropout of the probabilities; every other one makes it something else."""
    dropouts = [n for n in traced.graph.nodes if dropout_of(traced, n) is not None]
    inner = [n for n in dropouts if n.all_input_nodes[0] is not out]
    if core.target is F.scaled_dot_product_attention:
        if inner:
            raise NoAttention("a dropout lies elsewhere than on the probabilities and the output")
        p = bind_sdpa(core.args, core.kwargs).get("dropout_p", 0.0)
        return float(p) if isinstance(p, float | int) and p else None
    for node in inner:
        source = node.all_input_nodes[0]
        while source is not core and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]  # a cast of the probabilities
        if source is not core or len(inner) > 1 or any(_is_matmul(n) for n in _between(core, node)):
            raise NoAttention("a dropout lies elsewhere than on the probabilities and the output")
    return dropout_of(traced, inner[0]) if inner else None


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = last
    while node is not first:
        yield node
        node = node.all_input_nodes[0]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def _linears_of(traced: Trace, node: Any) -> list[str]:
    """Linear layers that ``node`` depends on."""
    if not isinstance(node, fx.Node):
        return []
    ancestors = {node, *_ancestors(node)}
    return [str(n.target) for n in traced.linears if n in ancestors]


def _optional_arguments(module: nn.Module) -> tuple[str, ...]:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    return tuple(p.name for p in parameters if p.default is None)


def _trace_with(module: nn.Module, absent: tuple[str, ...]) -> Trace:
    try:
        return trace(module, _opaque, absent)
    except Untraceable as error:
        raise NoAttention(f"with its optional arguments, {error}") from error


def _opaque(module: nn.Module) -> bool:
    return False


def has_attention(traced: Trace) -> bool:
    """Whether a traced forward computes attention."""
    return _core(traced) is not None
