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

from tpkernels.comm.collectives import (
    Pending,
    all_gather_in_place_async,
    all_reduce,
    all_to_all_async,
)
from tpkernels.comm.group import Group
from tpkernels.zero.flat_buffer import FlatBuffer

Wait = Callable[[], Tensor]


class Transfers(Protocol):
    """Starts a collective of one flat buffer; the result is a function that waits for it."""

    def gather(self, buffer: FlatBuffer) -> Wait:
        """Fill ``buffer.whole``, which is allocated, from every rank's shard."""

    def reduce(self, whole: Tensor) -> Wait:
        """Every rank's copy of this rank's part of ``whole`` [R * S]: [R, S], or its sum [1, S]."""


class HostTransfers:
    """Asynchronous works, for tensors on the CPU.

    Args:
        group: the ranks that share the parameters.
        replicas: further ranks that hold the same shards, or None.
    """

    def __init__(self, group: Group, replicas: Group | None) -> None:
        self._group, self._replicas = group, replicas

    def gather(self, buffer: FlatBuffer) -> Wait:
        """Cast the shard into its place, then all-gather in place."""
        with torch.no_grad():
            buffer.own.copy_(buffer.master)
        return all_gather_in_place_async(buffer.whole.data, self._group.name).wait

    def reduce(self, whole: Tensor) -> Wait:
        """All-to-all: Gloo's reduce-scatter would send twice the bytes."""
        if self._group.size == 1:
            return lambda: self._over_replicas(whole.view(1, -1))
        received = torch.empty_like(whole)
        pending: Pending = all_to_all_async(received, whole, self._group.name)
        return lambda: self._over_replicas(pending.wait().view(self._group.size, -1))

    def _over_replicas(self, parts: Tensor) -> Tensor:
        if self._replicas is None or self._replicas.size == 1:
            return parts
        wide = torch.promote_types(parts.dtype, torch.float32)
        return all_reduce(parts.sum(0, keepdim=True, dtype=wide), self._replicas.name)
