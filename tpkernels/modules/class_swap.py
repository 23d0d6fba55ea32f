"""Turning a module into its tensor-parallel form in place, and back.

As ``fully_shard`` does: the instance's class becomes ``type(name, (Parallel, Original), {})``.
The object stays the same, so its name, its hooks, its keys, references to it and
``isinstance(module, Original)`` keep working; restoring the class undoes it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tpkernels.errors import ConfigError

_RECORD = "_tpkernels_swap"


@dataclass
class _Swap:
    original: type
    replaced: dict[str, Any] = field(default_factory=dict)  # name -> value before the swap
    added: set[str] = field(default_factory=set)  # names that were not there before
    hooks: list[tuple[str, int]] = field(default_factory=list)  # hook dictionary, key in it


@functools.cache
def _joined(adapter: type | None, parallel: type, original: type) -> type:
    name = parallel.__name__
    if original.__name__ not in (name, "Linear"):
        name = f"{name}_{original.__name__}"
    bases = (parallel, original) if adapter is None else (adapter, parallel, original)
    return type(name, bases, {"__module__": parallel.__module__})


def swap_class(
    module: nn.Module, parallel: type, adapter: type | None = None, **attributes: Any
) -> None:
    """Make ``module`` a ``parallel`` in place and set ``attributes`` on it, reversibly.

    ``adapter``: a class before ``parallel`` that takes calls meant for the original's forward.
    """
    if is_swapped(module):
        raise ConfigError(
            f"{type(module).__name__} is already tensor-parallel. "
            "Fix: tpkernels.unparallelize first"
        )
    module.__dict__.setdefault(_RECORD, _Swap(type(module)))
    module.__class__ = _joined(adapter, parallel, type(module))  # type: ignore[arg-type]
    set_attributes(module, **attributes)


def set_attributes(module: nn.Module, **attributes: Any) -> None:
    """Set attributes on a module so that :func:`restore_class` puts the old ones back."""
    record: _Swap = module.__dict__.setdefault(_RECORD, _Swap(type(module)))
    for name, value in attributes.items():
        if name not in module.__dict__:
            record.added.add(name)
        elif name not in record.added:
            record.replaced.setdefault(name, module.__dict__[name])
        module.__dict__[name] = value


@contextlib.contextmanager
def recorded(module: nn.Module) -> Iterator[None]:
    """Hooks and attributes that others give ``module`` and its children inside go with the swap.

    So :func:`restore_class` undoes what ``ParallelStyle``s of others do.
    """
    before = {
        m: (set(m.__dict__), {name: set(m.__dict__[name]) for name in _hook_names(m)})
        for m in module.modules()
    }
    try:
        yield
    finally:
        for m, (names, hooks) in before.items():
            added = set(m.__dict__) - names - {_RECORD}
            new = [(n, key) for n in _hook_names(m) for key in set(m.__dict__[n]) - hooks[n]]
            if added or new:
                record: _Swap = m.__dict__.setdefault(_RECORD, _Swap(type(m)))
                record.added |= added
                record.hooks += new


def _hook_names(module: nn.Module) -> list[str]:
    items = vars(module).items()
    return [name for name, value in items if "_hooks" in name and isinstance(value, dict)]


def is_swapped(module: nn.Module) -> bool:
    """Whether :func:`swap_class` changed this module's class."""
    return original_class(module) is not type(module)


def is_changed(module: nn.Module) -> bool:
    """Whether there is anything for :func:`restore_class` to undo."""
    return _RECORD in module.__dict__


def original_class(module: nn.Module) -> type:
    """The class the module had before it was swapped (its own class if it was not)."""
    record = module.__dict__.get(_RECORD)
    return record.original if record is not None else type(module)


def restore_class(module: nn.Module) -> None:
    """Undo :func:`swap_class`: the original class and the original attributes."""
    record: _Swap = module.__dict__.pop(_RECORD)
    module.__class__ = record.original
    for name in record.added:
        module.__dict__.pop(name, None)
    for name, key in record.hooks:
        module.__dict__[name].pop(key, None)
    module.__dict__.update(record.replaced)
