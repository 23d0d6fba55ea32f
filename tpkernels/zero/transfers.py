"""How units travel: the interface of the two back ends, and the one for CPU.

On CPU a collective is a ``Work`` of its own thread: it moves bytes while the compute thread
computes, and ``wait`` blocks that thread. The CUDA one (:mod:`tpkernels.zero.streams`) enqueues on
side streams instead. Both allocate and free on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.comm.collectives import Pending, all_reduce
from tpkernels.comm.exchange import all_gather_in_place_async, all_to_all_async, restart
from tpkernels.comm.group import Group
from tpkernels.zero.buffer_pool import BufferPool
from tpkernels.zero.flat_buffer import FlatBuffer

Wait = Callable[[], Tensor]
_CPU = torch.device("cpu")


class Transfers(Protocol):
    """Starts a collective of one flat buffer; the result is a function that waits for it.

    Gives and takes the memory of wholes and gradients: what that has to wait for is known here.
    """

    pool: BufferPool

    def allocate(self, buffer: FlatBuffer) -> None:
        """Give ``buffer.whole`` its memory, unless it has it."""

    def gather(self, buffer: FlatBuffer) -> Wait:
        """Fill ``buffer.whole``, which is allocated, from every rank's shard."""

    def use(self, buffer: FlatBuffer) -> None:
        """Compute, which may have changed streams, reads ``buffer.whole`` from here on."""

    def free(self, buffer: FlatBuffer) -> None:
        """Take its memory: compute has read it, or will have in the order of its stream."""

    def lose(self, buffer: FlatBuffer) -> None:
        """Its gather will not end, since ranks parted: another gather must not use its memory."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for whole gradients; ends with :meth:`finish`."""

    def write(self, tensor: Tensor) -> None:
        """Compute, which may have changed streams, writes to ``tensor`` of :meth:`empty`."""

    def reduce(self, whole: Tensor) -> Wait:
        """Every rank's copy of this rank's part of ``whole`` [R * S]: [R, S], or its sum [1, S]."""

    def finish(self, whole: Tensor, *, keep: bool = False) -> None:
        """Free what :meth:`reduce` of ``whole`` gave, and, unless ``keep``, ``whole`` itself."""

    def settle(self) -> None:
        """The host may change shards from here on: no gather reads them any more."""

    def restart(self) -> bool:
        """Ignore what ranks that parted have sent so far, if that can be; on all ranks."""


class HostTransfers:
    """Asynchronous works, for tensors on the CPU.

    Args:
        group: the ranks that share the parameters.
        replicas: further ranks that hold the same shards, or None.
        reduce_group: of the ranks of ``group``, with a communicator of its own, or None.
    """

    def __init__(
        self, group: Group, replicas: Group | None, *, reduce_group: Group | None = None
    ) -> None:
        self._group, self._replicas = group, replicas
        self._reduce_group = reduce_group or group
        self._received: dict[int, Tensor] = {}  # by id of the gradients that were sent
        self.pool = BufferPool.of(_CPU)

    def allocate(self, buffer: FlatBuffer) -> None:
        """From the pool."""
        buffer.allocate(self.pool)

    def gather(self, buffer: FlatBuffer) -> Wait:
        """Cast the shard into its place, then all-gather in place."""
        with torch.no_grad():
            buffer.own.copy_(buffer.master)
        return all_gather_in_place_async(buffer.whole.data, self._group.name).wait

    def use(self, buffer: FlatBuffer) -> None:
        """Nothing: there is one order."""

    def free(self, buffer: FlatBuffer) -> None:
        """To the pool."""
        buffer.free(self.pool)

    def lose(self, buffer: FlatBuffer) -> None:
        """Where that can be; else no gather follows."""
        if self.pool.moves:
            buffer.free(self.pool, lost=True)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """From the pool."""
        return self.pool.new(numel, dtype, _CPU)

    def write(self, tensor: Tensor) -> None:
        """Nothing: there is one order."""

    def reduce(self, whole: Tensor) -> Wait:
        """All-to-all: Gloo's reduce-scatter would send twice the bytes."""
        size = self._reduce_group.size
        if size == 1:
            return lambda: self._over_replicas(whole.view(1, -1))
        received = self._received[id(whole)] = self.empty(whole.numel(), whole.dtype)
        pending: Pending = all_to_all_async(received, whole, self._reduce_group.name)
        return lambda: self._over_replicas(pending.wait().view(size, -1))

    def finish(self, whole: Tensor, *, keep: bool = False) -> None:
        """To the pool."""
        received = self._received.pop(id(whole), None)
        for tensor in (received, None if keep else whole):
            if tensor is not None:
                self.pool.give(tensor)

    def settle(self) -> None:
        """Nothing: a gather has read its shard when it returns."""

    def restart(self) -> bool:
        """Unless replicas, too, may have parted, in collectives that cannot be left."""
        if not self.pool.moves or (self._replicas is not None and self._replicas.size > 1):
            return False
        self._received.clear()
        for name in {self._group.name, self._reduce_group.name}:
            restart(name)
        return True

    def _over_replicas(self, parts: Tensor) -> Tensor:
        if self._replicas is None or self._replicas.size == 1:
            return parts
        wide = torch.promote_types(parts.dtype, torch.float32)
        return all_reduce(parts.sum(0, keepdim=True, dtype=wide), self._replicas.name)
