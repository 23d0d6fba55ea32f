"""Symbolic tracing of small modules, without a trace of the tracing.

A module is traced with ``torch.fx`` once in training and once in evaluation. The two graphs must
be the same but for dropouts; the training graph, which shows where they are, is what the rules
read. Linear layers, activations, dropouts, norms and everything a rule calls opaque stay single
nodes. Graphs are evaluated on the CPU by :func:`evaluate`, with probe weights where asked, so
that no hook of the model runs and no weight, buffer or random state is touched.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tpkernels.recognise.structure import is_leaf_linear, looks_linear

Opaque = Callable[[nn.Module], bool]

_FACTORIES = (torch.ones, torch.zeros, torch.full, torch.arange, torch.empty, torch.eye)
_FUNCTIONAL_DROPOUTS = (F.dropout, torch.dropout)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Untraceable(Exception):
    """The module cannot be read as one graph; the message says why."""


@dataclass
class Trace:
    """One module as a graph. ``names`` are the arguments of its forward, without ``self``."""

    module: nn.Module
    graph: fx.Graph
    constants: dict[str, Tensor] = field(default_factory=dict)
    kwargs_read: bool = False
    """The forward reads its ``*args`` or ``**kwargs``, which the graph does not show."""

    def submodule(self, node: fx.Node) -> nn.Module:
        """The module that a ``call_module`` node calls."""
        return self.module.get_submodule(str(node.target))

    def is_linear(self, node: fx.Node) -> bool:
        """Whether ``node`` is the call of a linear leaf."""
        return node.op == "call_module" and self.is_linear_path(str(node.target))

    def is_linear_path(self, path: str) -> bool:
        """Whether the layer at ``path`` is a linear leaf."""
        return is_leaf_linear(self.module.get_submodule(path))

    @property
    def linears(self) -> list[fx.Node]:
        """Calls of linear leaves, in order; a layer called twice is there twice."""
        return [node for node in self.graph.nodes if self.is_linear(node)]

    @property
    def placeholders(self) -> list[fx.Node]:
        """The forward's arguments that were given, in order."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> Any:
        """What the forward returns: a node, or a structure of nodes."""
        return next(node for node in self.graph.nodes if node.op == "output").args[0]


def trace(module: nn.Module, opaque: Opaque, absent: tuple[str, ...] = ()) -> Trace:
    """Trace ``module.forward`` with the arguments in ``absent`` left at their defaults.

    Raises:
        Untraceable: control flow on values, attributes written, another computation in training
            than in evaluation, a forward replaced on the instance, or any error while tracing.
    """
    if "forward" in vars(module):
        raise Untraceable("its forward was replaced on the instance")
    training = _trace_in_mode(module, opaque, absent, training=True)
    evaluation = _trace_in_mode(module, opaque, absent, training=False)
    if _without_dropout(training, True) != _without_dropout(evaluation, False):
        raise Untraceable("it computes something else in training than in evaluation")
    return training


def dropout_of(trace: Trace, node: fx.Node) -> str | float | None:
    """The path of the dropout module or the p of the functional dropout that ``node`` is."""
    if node.op == "call_module" and isinstance(trace.submodule(node), _DROPOUTS):
        return str(node.target)
    if node.op == "call_function" and node.target in _FUNCTIONAL_DROPOUTS:
        bound = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
        active = bound.get("training", bound.get("train", True))
        p = bound.get("p", 0.5)
        if active is True and isinstance(p, float | int):
            return float(p)
        return 0.0 if active is False or p == 0 else None
    return None


def evaluate(
    trace: Trace,
    node: Any,
    known: dict[fx.Node, Tensor],
    linear: Callable[[str, Tensor], Tensor] | None = None,
) -> Any:
    """The value of ``node`` (or a structure of nodes) in evaluation, on the CPU.

    ``known`` gives placeholders and any node whose inputs should not be computed, and is filled.
    Floating buffers are read in the dtype of the first known tensor. ``linear(path, x)`` replaces
    linear leaves. Errors of the module's own code pass through, random functions are the
    caller's to fence (``torch.random.fork_rng``).
    """
    dtype = next((v.dtype for v in known.values() if v.is_floating_point()), torch.float64)

    def compute(node: fx.Node) -> Any:
        if dropout_of(trace, node) is not None:
            return known[node.all_input_nodes[0]]
        args: Any = fx.map_arg(node.args, known.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, known.__getitem__)
        match node.op:
            case "call_function":
                if node.target is F.scaled_dot_product_attention:
                    args, kwargs = (), bind_sdpa(args, kwargs) | {"dropout_p": 0.0}
                return node.target(*args, **kwargs)  # type: ignore[operator]
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case "get_attr":
                return _attribute(trace, str(node.target), dtype)
            case "call_module" if linear is not None and trace.is_linear(node):
                (x,) = args
                return linear(str(node.target), x)
            case "call_module":
                with in_mode(trace.submodule(node), training=False):
                    return trace.submodule(node).forward(*args, **kwargs)  # runs no hooks
        raise LookupError(f"the argument {node.target!r} takes part in the computation")

    needed = _needed(trace, node, known)
    with torch.device("cpu"):  # for tensors that the module's code makes
        for candidate in trace.graph.nodes:
            if candidate in needed:
                known[candidate] = compute(candidate)
    return fx.map_arg(node, known.__getitem__)


def bind_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``scaled_dot_product_attention`` by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return dict(zip(names, args, strict=False)) | kwargs


def stateless(module: nn.Module) -> bool:
    """An :data:`Opaque` that keeps activations single nodes, whoever wrote them."""
    return not isinstance(module, nn.Sequential) and next(module.parameters(), None) is None


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[list[str]]:
    """Restore every attribute of ``module`` and its children; yields the names that were written.

    The list is complete after the block. Tensors' contents are not watched.
    """
    before = [(name, _snapshot(m)) for name, m in module.named_modules()]
    written: list[str] = []
    try:
        with torch.random.fork_rng(devices=[]):
            yield written
    finally:
        for name, state in before:
            for key, container, values in state:
                changed = _changed(container, values)
                written += [f"{name}.{k or key}".lstrip(".") for k in changed if k != "training"]
                if changed:
                    container.clear()
                    container.update(values) if isinstance(values, dict) else container.extend(
                        values
                    )


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # an in-place op on a buffer is recorded, not run
    trace_asserts = True

    def __init__(self, opaque: Opaque, absent: tuple[str, ...]) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)  # torch.ones(T, T) with a traced T
        self.opaque = opaque
        self.absent = absent

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if looks_linear(m) or isinstance(m, _DROPOUTS) or self.opaque(m):
            return True
        if isinstance(m, nn.Sequential | nn.Identity):
            return False
        known = type(m).__module__.startswith("torch.nn.")
        no_children = next(m.children(), None) is None
        return known or (no_children and next(m.parameters(), None) is not None)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.is_leaf_module(m, ""):
            return super().call_module(m, forward, args, kwargs)
        return type(m).forward(m, *args, **kwargs)  # not __call__: hooks would see proxies

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        positional: list[Any] = []
        named: dict[str, Any] = {}
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        for parameter in parameters:
            if parameter.name in self.absent:
                continue
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            proxy = self.create_proxy("placeholder", parameter.name, (), {})
            if parameter.kind is parameter.POSITIONAL_ONLY or not positional:
                positional.append(proxy)
            else:
                named[parameter.name] = proxy
        return lambda *_: root_fn(self.root, *positional, **named), []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        length = _length(obj.node)
        if length is None:
            return super().iter(obj)
        return iter([operator.getitem(obj, i) for i in range(length)])  # type: ignore[call-overload]


class _Proxy(fx.Proxy):
    def __len__(self) -> int:  # asked by ``f(*x.shape[:-1])``
        length = _length(self.node)
        return super().__len__() if length is None else length


def _length(node: fx.Node) -> int | None:
    """How many items a traced sequence has, where the code says it."""
    source = node.args[0] if node.args else None
    if node.target in (torch.chunk, "chunk"):
        chunks = node.args[1] if len(node.args) > 1 else node.kwargs.get("chunks")
        return chunks if isinstance(chunks, int) else None
    if node.target in (torch.split, "split"):
        sizes = node.args[1] if len(node.args) > 1 else None
        return len(sizes) if isinstance(sizes, list | tuple) else None
    if node.target is operator.getitem and isinstance(source, fx.Node):
        whole = _length(source)
        index = node.args[1]
        return len(range(whole)[index]) if whole and isinstance(index, slice) else None
    if _is_shape(node):
        return _rank(source)
    return None


def _is_shape(node: fx.Node) -> bool:
    if node.target == "size":
        return len(node.args) == 1
    return node.target is getattr and node.args[1] == "shape"


def _rank(node: Any) -> int | None:
    """Three for the module's first argument ([batch, tokens, features]) and layers over it."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "placeholder":
        first = next(n for n in node.graph.nodes if n.op == "placeholder")
        return 3 if node is first else None
    one_input = node.op == "call_module" and len(node.all_input_nodes) == 1
    return _rank(node.all_input_nodes[0]) if one_input else None


def _trace_in_mode(
    module: nn.Module, opaque: Opaque, absent: tuple[str, ...], training: bool
) -> Trace:
    tracer = _Tracer(opaque, absent)
    try:
        with undisturbed(module) as written, torch.no_grad():
            for m in module.modules():
                m.training = training
            graph = tracer.trace(module)
            constants = {
                name: tensor
                for name, tensor in vars(module).items()
                if name.startswith("_tensor_constant") and isinstance(tensor, Tensor)
            }
    except Exception as error:  # tracing runs the user's code with stand-ins: it may raise anything
        first_line = str(error).strip().split("\n")[0][:200]
        raise Untraceable(f"torch.fx cannot trace it: {first_line}") from error
    written = [name for name in written if name not in constants]
    if written:
        raise Untraceable(f"its forward writes the attribute {written[0]!r}")
    return Trace(module, graph, constants, _reads_variadic(type(module).forward))


@functools.cache
def _reads_variadic(forward: Any) -> bool:
    """Whether the code of ``forward`` reads its ``*args`` or ``**kwargs``."""
    forward = inspect.unwrap(forward)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = {p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds}
    loads = (i for i in dis.get_instructions(forward) if i.opname.startswith("LOAD_"))
    values = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in loads)
    return any(name in names for loaded in values for name in loaded)


def _without_dropout(trace: Trace, training: bool) -> list[tuple[Any, ...]]:
    """The graph as comparable rows, without dropouts that are on in training only."""
    number: dict[fx.Node, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in trace.graph.nodes:
        dropout = dropout_of(trace, node)
        if isinstance(dropout, str) or (dropout is not None and (training or dropout == 0)):
            number[node] = number[node.all_input_nodes[0]]
            continue
        args, kwargs = node.args, node.kwargs
        if node.target is F.scaled_dot_product_attention:
            args, kwargs = (), bind_sdpa(args, kwargs)
            if training or kwargs.get("dropout_p", 0) == 0:
                kwargs.pop("dropout_p", None)
        as_numbers = _numbered((args, kwargs), number)
        number[node] = len(rows)
        rows.append((node.op, node.target, repr(as_numbers)))
    return rows


def _numbered(args: Any, number: dict[fx.Node, int]) -> Any:
    def row(node: fx.Node) -> Any:
        return f"row {number[node]}"

    return fx.map_arg(args, row)


def linears_before(trace: Trace, node: fx.Node) -> list[fx.Node]:
    """Calls of linear layers whose results reach ``node`` through no other."""
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if trace.is_linear(node):
            found.append(node)
        else:
            stack.extend(node.all_input_nodes)
    return found


def signature_of(trace: Trace) -> str:
    """A text equal for modules of one class that compute the same with the same sizes.

    Weights and the values of buffers are not in it, nor are dropouts.
    """
    called = [n for n in trace.graph.nodes if n.op == "call_module" and not dropout_of(trace, n)]
    modules = [_describe(trace.submodule(node)) for node in called]
    return f"{type(trace.module)} {_without_dropout(trace, True)} {modules}"


def _describe(module: nn.Module) -> str:
    attributes = {k: v for k, v in vars(module).items() if k != "training" and k[0] != "_"}
    shapes = [tuple(p.shape) for p in module.parameters()]
    return f"{type(module)} {shapes} {attributes if len(shapes) == 0 else ''}"


def buffers_of(trace: Trace) -> list[Tensor]:
    """The tensors that the graph reads from the module's attributes (a causal mask...)."""
    values = (
        _attribute(trace, str(node.target), torch.float64)
        for node in trace.graph.nodes
        if node.op == "get_attr"
    )
    return [value for value in values if isinstance(value, Tensor)]


def _attribute(trace: Trace, path: str, dtype: torch.dtype) -> Any:
    if path in trace.constants:
        return trace.constants[path]
    owner, _, name = path.rpartition(".")
    tensor = getattr(trace.module.get_submodule(owner), name)
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.is_meta:
        raise LookupError(f"the tensor {path!r} is on the meta device: its values are unknown")
    tensor = tensor.detach().to("cpu")
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put ``module`` in training or evaluation for a block, without its ``train`` method."""
    with undisturbed(module):
        for m in module.modules():
            m.training = training
        yield


def _needed(trace: Trace, target: Any, known: dict[fx.Node, Tensor]) -> set[fx.Node]:
    """The nodes that ``target`` depends on and ``known`` lacks, with in-place statements."""
    needed: set[fx.Node] = set()

    def add(node: fx.Node) -> fx.Node:
        if node not in known and node not in needed:
            needed.add(node)
            for source in node.all_input_nodes:
                add(source)
        return node

    fx.map_arg(target, add)
    for node in trace.graph.nodes:
        in_place = node.op == "call_method" and str(node.target).endswith("_")
        if in_place and node.args[0] in needed:
            add(node)
    return needed


def _snapshot(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """(name, container, copy) of every dictionary and list of the module, then of itself."""
    inner = [(key, v) for key, v in vars(module).items() if type(v) in (dict, list)]
    return [(key, container, container.copy()) for key, container in (*inner, ("", vars(module)))]


def _changed(container: Any, values: Any) -> list[str]:
    """The keys at which a dictionary differs from its copy; [""] for a list that differs."""
    if isinstance(values, list):
        same = len(container) == len(values) and all(map(operator.is_, container, values))
        return [] if same else [""]
    missing = object()
    keys = list(dict.fromkeys((*container, *values)))
    return [k for k in keys if container.get(k, missing) is not values.get(k, missing)]
