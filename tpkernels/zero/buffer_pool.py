"""``BufferPool``: the memory of gathered units and of gradients between two uses.

Without it each gather asks the allocator. glibc maps what is larger than 32 MiB anew each time, and
the system zeroes every page as it is first written: 40 MB took 28 ms instead of 4 on the machine
it was tried on, while 31 MB and less took the same. On CUDA it keeps blocks of one size whole.

A unit's storage gets its memory by exchange with an idle one, so that all views of it that
autograd saved see it; without the extension it is allocated and freed each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels import native

# DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc, 64 bit: what is larger is never kept by it.
LARGEST_KEPT_BY_MALLOC = 32 * 2**20


_LOST: list[Tensor] = []


class _Idle(NamedTuple):
    raw: Tensor  # bytes
    owner: Any  # the stream in whose order it is free; None on CPU


class BufferPool:
    """Idle memory, found again by device, size and owner; at most as much as :meth:`keep` says.

    Args:
        smallest: bytes; what has fewer is left to the allocator.
    """

    def __init__(self, smallest: int = 0) -> None:
        self._smallest = smallest
        self._idle: list[_Idle] = []  # the longest idle first
        self._exchange = _exchange_op()
        self.idle_bytes = 0

    @classmethod
    def of(cls, device: torch.device) -> BufferPool:
        """The pool that pays on ``device``."""
        return cls(LARGEST_KEPT_BY_MALLOC if device.type == "cpu" else 0)

    def fill(self, tensor: Tensor, nbytes: int, owner: Any = None) -> None:
        """Give the storage of ``tensor``, which has no memory, ``nbytes`` (contents undefined)."""
        idle = self._take(tensor.device, nbytes, owner) if self._exchange is not None else None
        if idle is None:
            tensor.untyped_storage().resize_(nbytes)
        else:
            self._exchange(tensor, idle)

    def empty(self, tensor: Tensor, owner: Any = None) -> None:
        """Take the memory of the storage of ``tensor``, of which nothing is read any more."""
        nbytes = tensor.untyped_storage().nbytes()
        if self._exchange is None or nbytes < max(self._smallest, 1):
            tensor.untyped_storage().resize_(0)
            return
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._exchange(tensor, raw)
        self._put(raw.set_(raw.untyped_storage(), 0, (nbytes,)), owner)  # type: ignore[call-overload]

    @property
    def moves(self) -> bool:
        """Whether memory can be taken from a storage and be kept."""
        return self._exchange is not None

    def lose(self, tensor: Tensor) -> None:
        """Take the memory of the storage of ``tensor``, to which a backend may write at any time.

        It is kept for good, and used for nothing; needs :attr:`moves`.
        """
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._exchange(tensor, raw)
        _LOST.append(raw)

    def new(
        self, numel: int, dtype: torch.dtype, device: torch.device, owner: Any = None
    ) -> Tensor:
        """``torch.empty(numel, dtype=dtype, device=device)``; give it back with :meth:`give`."""
        idle = self._take(device, numel * dtype.itemsize, owner)
        if idle is None:
            return torch.empty(numel, dtype=dtype, device=device)
        return idle.view(dtype)

    def give(self, tensor: Tensor, owner: Any = None) -> None:
        """Take ``tensor``, of :meth:`new`, which nobody uses any more."""
        if tensor.untyped_storage().nbytes() >= max(self._smallest, 1):
            self._put(tensor.view(torch.uint8), owner)

    def keep(self, nbytes: int) -> None:
        """Give to the allocator what is over ``nbytes``, the longest idle first."""
        while self.idle_bytes > nbytes:
            self.idle_bytes -= self._idle.pop(0).raw.numel()

    def _put(self, raw: Tensor, owner: Any) -> None:
        self._idle.append(_Idle(raw, owner))
        self.idle_bytes += raw.numel()

    def _take(self, device: torch.device, nbytes: int, owner: Any) -> Tensor | None:
        for place in reversed(range(len(self._idle))):
            raw, free_in = self._idle[place]
            if raw.numel() == nbytes and raw.device == device and free_in == owner:
                del self._idle[place]
                self.idle_bytes -= nbytes
                return raw
        return None


def _exchange_op() -> Any:
    if native.load() is None:
        return None
    return torch.ops.tpkernels.exchange_storage_.default
