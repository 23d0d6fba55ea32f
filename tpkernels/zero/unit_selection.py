"""From what the user gives as ``units`` to groups of modules, each group the heads of a unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import is_size, parse_bytes
from tpkernels.zero.unit_policies import heads_from_policy, is_policy

_ATOMIC = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_ALLOWED = (
    "None, a list of module classes, class names or modules, a size such as '64MiB', a callable "
    "module -> bool, or a wrap policy of torch.distributed.fsdp.wrap"
)


def select_heads(
    root: nn.Module, units: Any, param_dtype: torch.dtype | None
) -> list[list[nn.Module]]:
    """Groups of modules that ``units`` picks in ``root``; see :func:`find_units`.

    Raises:
        ConfigError: another kind of value, or a name, class or module that is not in ``root``.
    """
    if units is None:
        return [[each] for each in repeated_blocks(root) or _opened(root)]
    if isinstance(units, (bool, float, Mapping)):
        raise _unknown(units)
    if isinstance(units, int) or (isinstance(units, str) and is_size(units)):
        return groups_of_size(root, parse_bytes(units, "units"), param_dtype)
    if isinstance(units, (type, str, nn.Module)):
        units = [units]
    if is_policy(units):
        picked = heads_from_policy(root, units)
        if picked is not None:
            return [[each] for each in _callable_places(root, picked)]
        raise ConfigError(
            f"units={units!r} picks no module of {type(root).__name__}. Fix: pick some of the "
            f"classes in it: {_classes(root)}"
        )
    if not isinstance(units, Iterable):
        raise _unknown(units)
    return [[each] for each in _named(root, list(units))]


def _unknown(units: Any) -> ConfigError:
    return ConfigError(
        f"units={units!r} is not known; allowed: {_ALLOWED}. Fix: units=None takes the repeated "
        "blocks"
    )


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward; a ``ModuleList`` or ``ParameterList`` has none."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def is_atomic(module: nn.Module) -> bool:
    """Whether the forward of ``module`` reads the weights of its children without calling them.

    So do two of PyTorch's modules, and tensor-parallel ones, which hold their split in ``_tp``.
    """
    return isinstance(module, _ATOMIC) or "_tp" in module.__dict__


def _is_container(module: nn.Module) -> bool:
    return not is_called(module) or type(module).forward is nn.Sequential.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(module: nn.Module) -> bool:
    """Not a leaf: at least two parameters, and children."""
    return len(list(module.parameters())) >= 2 and next(module.children(), None) is not None


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Children with children of the outermost containers that hold several of one class.

    A ``ModuleList`` with a single such child is taken for a stack of one layer. A container in
    a stack is opened: ``ModuleList([ModuleList([attention, mlp]), ...])`` gives attention and mlp,
    a stage that is itself a ``Sequential`` of blocks gives the blocks.
    """
    if is_atomic(module):
        return []
    blocks = [child for child in module.children() if _is_block(child)]
    if not (_is_container(module) and _is_stack(module, blocks)):
        return [each for child in module.children() for each in repeated_blocks(child)]
    found: list[nn.Module] = []
    for block in blocks:
        inside = repeated_blocks(block) if _is_container(block) else []
        if inside:
            found += inside
        elif is_called(block):
            found.append(block)
        else:
            found += [child for child in block.children() if _is_block(child) and is_called(child)]
    return found


def _is_stack(module: nn.Module, blocks: list[nn.Module]) -> bool:
    kinds = [type(block) for block in blocks]
    return len(set(kinds)) < len(kinds) or (isinstance(module, nn.ModuleList) and len(kinds) == 1)


def _opened(module: nn.Module) -> list[nn.Module]:
    """Children with parameters, ``Sequential`` and ``ModuleList`` opened."""
    if is_atomic(module):
        return []
    found: list[nn.Module] = []
    for child in module.children():
        if _is_container(child):
            found += _opened(child)
        elif _has_parameters(child):
            found.append(child)
    return found


def _open_modules(root: nn.Module) -> Iterator[nn.Module]:
    """Every module but the root and those inside an atomic one, once, parents first."""
    seen = {id(root)}
    pending = [] if is_atomic(root) else list(root.children())[::-1]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            if not is_atomic(module):
                pending += list(module.children())[::-1]


def _callable_places(root: nn.Module, picked: list[nn.Module]) -> list[nn.Module]:
    wanted = {id(each) for each in picked}
    return [each for each in _open_modules(root) if id(each) in wanted]


def _named(root: nn.Module, items: list[Any]) -> list[nn.Module]:
    if not items:
        raise ConfigError(
            "units=[] picks nothing. Fix: units=[model] gathers the whole model as one unit"
        )
    wanted: set[int] = set()
    for item in items:
        matches = [module for module in root.modules() if _matches(module, item)]
        if not matches:
            raise ConfigError(
                f"units: {item!r} matches no module of {type(root).__name__}; the classes in it "
                f"are: {_classes(root)}. Fix: name one of these"
            )
        wanted |= {id(each) for each in matches}
        opened = {id(root)} | {id(each) for each in _open_modules(root)}
        if not any(id(each) in opened for each in matches):
            raise ConfigError(
                f"units: {item!r} is only inside a module that reads its weights without "
                "calling it (nn.MultiheadAttention, nn.TransformerEncoderLayer, tensor-parallel "
                "modules). Fix: name the module around it"
            )
    return [each for each in _open_modules(root) if id(each) in wanted]


def _matches(module: nn.Module, item: Any) -> bool:
    if isinstance(item, nn.Module):
        return module is item
    if isinstance(item, type) and issubclass(item, nn.Module):
        return isinstance(module, item)
    if isinstance(item, str):
        cls = type(module)
        return item in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    raise ConfigError(
        f"units: {item!r} is no module, module class or class name; allowed: {_ALLOWED}. "
        "Fix: remove it"
    )


def _classes(root: nn.Module) -> str:
    return ", ".join(sorted({type(each).__name__ for each in root.modules()}))


def groups_of_size(
    root: nn.Module, limit: int, param_dtype: torch.dtype | None
) -> list[list[nn.Module]]:
    """Neighbours of together at most ``limit`` bytes; a module larger than that is opened.

    Parameters of an opened module itself stay with the unit around it.
    """
    if limit <= 0:
        raise ConfigError(f"units={limit!r}; allowed: a size > 0. Fix: units='64MiB'")
    counted: set[int] = set()  # a shared parameter takes its place once

    def size(module: nn.Module) -> int:
        new = [each for each in module.parameters() if id(each) not in counted]
        return sum(
            each.numel()
            * (param_dtype if param_dtype and each.is_floating_point() else each.dtype).itemsize
            for each in new
        )

    groups: list[list[nn.Module]] = []
    room = 0

    def visit(module: nn.Module) -> None:
        nonlocal room
        needed = size(module)
        leaf = is_atomic(module) or not any(map(_has_parameters, module.children()))
        if is_called(module) and module is not root and (leaf or needed <= limit):
            if needed == 0:
                return
            if needed > room or not groups:
                groups.append([])
                room = limit
            groups[-1].append(module)
            room -= needed
            counted.update(id(each) for each in module.parameters())
        else:
            for child in module.children() if not is_atomic(module) else ():
                visit(child)

    if size(root) > limit:
        visit(root)
    return groups
