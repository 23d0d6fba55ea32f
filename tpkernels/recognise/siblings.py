"""MLPs whose halves are sibling modules (BERT's ``intermediate`` and ``output``).

The parent's forward is seldom traceable, so three facts are put together: one child computes
``act(linear(x))``, another begins with a linear layer of that width, and the source of the parent
hands the result of the one to the other and to nobody else.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass

from torch import Tensor, fx, nn

from tpkernels.recognise.activation import is_elementwise, match_formula, splits_features
from tpkernels.recognise.scope import Scope
from tpkernels.recognise.structure import (
    ActivationName,
    MLPStructure,
    has_hooks,
    is_leaf_linear,
    leaf_features,
)
from tpkernels.recognise.trace import Trace, Untraceable, dropout_of, evaluate, stateless, trace


def match_siblings(parent: nn.Module, scope: Scope) -> MLPStructure | None:
    """The MLP whose halves are two children of ``parent``, each with one linear layer."""
    halves = {name: child for name, child in parent.named_children() if _leaf_count(child) == 1}
    for first_name, first in halves.items():
        upper = None if has_hooks(first) else _linear_then_activation(first, scope)
        if upper is None:
            continue
        for second_name, second in halves.items():
            lower = _begins_with_linear(second) if second is not first else None
            cls = type(parent)
            if lower is None or not feeds(cls, first_name, second_name):  # type: ignore[arg-type]
                continue
            width = leaf_features(first.get_submodule(upper.up))[1]
            if leaf_features(second.get_submodule(lower))[0] != width:
                continue
            return MLPStructure(
                kind="plain",
                up=f"{first_name}.{upper.up}",
                down=f"{second_name}.{lower}",
                act=upper.act,
                act_module=f"{first_name}.{upper.module}" if upper.module is not None else None,
            )
    return None


def begins_with_linear(module: nn.Module, width: int) -> str | None:
    """The path of the linear layer of ``width`` inputs that alone reads the first argument."""
    path = _begins_with_linear(module)
    if path is None or leaf_features(module.get_submodule(path))[0] != width:
        return None
    return path


@functools.cache
def feeds(parent: type[nn.Module], producer: str, consumer: str) -> bool:
    """Whether a method of the class ``parent`` passes ``producer``'s result to ``consumer``.

    Read from the source: ``h = self.producer(...)`` (or ``h, rest = ...``) followed by
    ``self.consumer(h, ...)`` or ``self.consumer(h[0], ...)``, or one call inside the other, with
    ``h`` used nowhere else. False where there is no source.
    """
    methods = _methods(parent)
    nodes = [node for method in methods for node in ast.walk(method)]
    if sum(_is_call(node, producer) for node in nodes) != 1 or any(map(_is_super, nodes)):
        return False
    return any(_feeds_in(method, producer, consumer) for method in methods)


def _methods(cls: type) -> list[ast.AST]:
    """The source of the methods that an object of ``cls`` has, without those of nn.Module."""
    trees: list[ast.AST] = []
    for name in dir(cls):
        function = inspect.unwrap(getattr(cls, name)) if callable(getattr(cls, name)) else None
        if not inspect.isfunction(function) or name == "__init__":
            continue
        if getattr(nn.Module, name, None) is function:
            continue
        try:
            trees.append(ast.parse(textwrap.dedent(inspect.getsource(function))))
        except (OSError, TypeError, SyntaxError):
            continue
    return trees


def _feeds_in(method: ast.AST, producer: str, consumer: str) -> bool:
    calls = [n for n in ast.walk(method) if _is_call(n, consumer)]
    if len(calls) != 1 or not calls[0].args:  # type: ignore[attr-defined]
        return False
    argument = calls[0].args[0]  # type: ignore[attr-defined]
    if isinstance(argument, ast.Subscript):
        argument = argument.value
    if _is_call(argument, producer):
        return True
    if not isinstance(argument, ast.Name):
        return False
    results = [
        target.elts[0] if isinstance(target, ast.Tuple) else target
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and _is_call(node.value, producer)
        for target in node.targets
    ]
    names = [t.id for t in results if isinstance(t, ast.Name)]
    reads = [
        n
        for n in ast.walk(method)
        if isinstance(n, ast.Name) and n.id == argument.id and isinstance(n.ctx, ast.Load)
    ]
    return names == [argument.id] and len(reads) == 1


def _is_super(node: ast.AST) -> bool:
    """``super()``: the inherited method runs too, and is not among the methods."""
    return isinstance(node, ast.Name) and node.id == "super"


def _is_call(node: ast.AST, child: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == child
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    )


@dataclass(frozen=True)
class _UpperHalf:
    up: str
    act: ActivationName | None
    module: str | None


def _linear_then_activation(module: nn.Module, scope: Scope) -> _UpperHalf | None:
    """The first half, if the forward is ``activation(linear(x))``, element-wise."""
    traced = _trace(module)
    if traced is None or not isinstance(traced.output, fx.Node) or len(traced.linears) != 1:
        return None
    (up,) = traced.linears
    inside = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    if up.args != (traced.placeholders[0],) or any(p.users for p in traced.placeholders[1:]):
        return None
    if any(dropout_of(traced, node) is not None or node.op == "get_attr" for node in inside):
        return None
    modules = [node for node in inside if node.op == "call_module" and node is not up]
    if not all(is_elementwise(traced.submodule(n)) and not _hooked(traced, n) for n in modules):
        return None
    width = leaf_features(traced.submodule(up))[1]

    def function(x: Tensor) -> Tensor:
        return evaluate(traced, traced.output, {up: x})

    if traced.output is up or not splits_features(function, width):
        return None
    act = match_formula(function, width)
    if act == "none":
        return None
    alone = len(inside) == 2 and len(modules) == 1 and act is not None
    ours = alone and scope.only_inside(traced.submodule(modules[0]), module)
    return _UpperHalf(str(up.target), act, str(modules[0].target) if ours else None)


def _hooked(traced: Trace, node: fx.Node) -> bool:
    return has_hooks(traced.submodule(node))


def _begins_with_linear(module: nn.Module) -> str | None:
    traced = _trace(module)
    if traced is None or not traced.placeholders:
        return None
    users = list(traced.placeholders[0].users)
    return str(users[0].target) if len(users) == 1 and traced.is_linear(users[0]) else None


def _trace(module: nn.Module) -> Trace | None:
    try:
        return trace(module, stateless)
    except Untraceable:
        return None


def _leaf_count(module: nn.Module) -> int:
    if is_leaf_linear(module):
        return 0  # inline in the parent, not a half of its own
    return sum(is_leaf_linear(m) for m in module.modules())
