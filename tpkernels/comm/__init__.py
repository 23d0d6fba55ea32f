"""Groups of ranks, collectives on them, and what must agree between ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time when it is first used: importing this package imports no torch
    from tpkernels.comm.direct import all_reduce_ as all_reduce_

__all__ = ["all_reduce_"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module("tpkernels.comm.direct"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tpkernels.comm' has no attribute {name!r}")
