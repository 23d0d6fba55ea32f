"""Our modules as PyTorch ``ParallelStyle``s, for ``parallelize_module`` and plan dictionaries."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tpkernels.comm.group import Group, resolve_group
from tpkernels.errors import ConfigError


class SwapStyle(ParallelStyle):
    """Turns the module it is applied to into ``cls`` in place: ``cls.shard_(module, group, ...)``.

    Made by ``ColumnParallelLinear.style(...)`` and its siblings.
    """

    def __init__(self, cls: type, shard: Callable[..., None], options: dict[str, Any]) -> None:
        _check_options(f"{cls.__name__}.style", shard, options)
        self.cls, self._shard, self.options = cls, shard, options

    def apply_to(self, module: nn.Module, group: Group, name: str) -> None:
        """Split ``module`` over ``group``; ``name`` is its path, for messages."""
        self._shard(module, group, name=name, **self.options)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply_to(module, resolve_group(device_mesh), type(module).__name__)
        return module

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.cls.__name__}.style({options})"


def _check_options(style: str, shard: Callable[..., None], options: dict[str, Any]) -> None:
    """Options that ``shard`` does not take, or needs and lacks, are met here and not half-way."""
    parameters = inspect.signature(shard).parameters.values()
    taken = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "name"}
    allowed = ", ".join(taken) or "none"
    unknown = [name for name in options if name not in taken]
    if unknown:
        given = ", ".join(f"{name}={options[name]!r}" for name in unknown)
        raise ConfigError(f"{style}: {given} is not an option of it; allowed: {allowed}")
    missing = [n for n, p in taken.items() if p.default is p.empty and n not in options]
    if missing:
        raise ConfigError(f"{style} needs {', '.join(missing)}; allowed options: {allowed}")
