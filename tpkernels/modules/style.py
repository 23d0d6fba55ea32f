"""Our modules as PyTorch ``ParallelStyle``s, for ``parallelize_module`` and plan dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tpkernels.comm.group import Group, resolve_group


class SwapStyle(ParallelStyle):
    """Turns the module it is applied to into ``cls`` in place: ``cls.shard_(module, group, ...)``.

    Made by ``ColumnParallelLinear.style(...)`` and its siblings.
    """

    def __init__(self, cls: type, shard: Callable[..., None], options: dict[str, Any]) -> None:
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
