"""Calls of a replaced module, in the words of the forward it had before."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tpkernels.errors import ConfigError


@dataclass(frozen=True)
class ReplacedForward:
    """Names of the arguments that may come by position, and the defaults, of a forward."""

    names: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module) -> ReplacedForward:
        """The forward that ``module`` has now."""
        parameters = list(inspect.signature(module.forward).parameters.values())
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return ReplacedForward(
            tuple(p.name for p in parameters if p.kind in by_position),
            {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty},
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> dict[str, Any]:
        """The arguments of a call by name; those that have their defaults are left out."""
        if len(args) > len(self.names):
            raise ConfigError(
                f"{what}: forward takes {len(self.names)} arguments ({', '.join(self.names)}), "
                f"got {len(args)}"
            )
        named = dict(zip(self.names, args, strict=False)) | kwargs
        return {
            name: value
            for name, value in named.items()
            if name not in self.defaults or value is not self.defaults[name]
        }

    def first(self, named: dict[str, Any], what: str) -> Any:
        """Take the forward's first argument out of ``named``."""
        if not self.names or self.names[0] not in named:
            raise ConfigError(f"{what}: forward needs its first argument, got {list(named)}")
        return named.pop(self.names[0])


OWN_FORWARD = ReplacedForward(("x",))  # of a module that replaced none
