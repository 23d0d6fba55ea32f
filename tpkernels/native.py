"""Loads the compiled extension, or says why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NativeStatus:
    available: bool
    reason: str
    fix: str | None
    build_info: dict[str, Any] = field(default_factory=dict)


def load() -> Any:
    return None


def status() -> NativeStatus:
    return NativeStatus(False, "the extension is not built", "tpkernels build")
