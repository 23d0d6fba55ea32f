"""A process that ends with the one that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
try:
    _prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec only called
except (AttributeError, OSError, TypeError):  # not Linux
    _prctl = None


def tied_to_us() -> Callable[[], None] | None:
    """A ``preexec_fn``: the child is killed as its parent ends, even by SIGKILL. Linux only."""
    parent = os.getpid()
    return None if _prctl is None else lambda: _tie(parent)


def tie_to_parent() -> None:
    """The same, asked for by the child."""
    if _prctl is not None:
        _tie(os.getppid())


def _tie(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
