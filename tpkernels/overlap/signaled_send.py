"""What a lane of ``signaled`` is given: how to compute rows, and how to send a chunk of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Sent(Protocol):
    """A collective or exchange under way."""

    def wait(self) -> Any:
        """Until it is done. On CUDA the current stream waits."""

    def drain(self) -> None:
        """The same without an error: for cleaning up after another one."""


Send = Callable[[int], Sent]
"""Start to send the chunk of that number; its rows are there."""

Tile = Callable[[int, int], None]
"""Compute rows [start, end)."""
