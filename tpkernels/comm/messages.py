"""Messages between ranks beside which the caller computes, whatever carries them.

    transfer = messages_of(group_name, device).start(sends, receives, like, "all_gather")
    ...; messages.progress(); ...        between two GEMMs: what can be moved is moved
    transfer.wait_received()

Between hosts, on CPU, :mod:`tpkernels.comm.lanes` carries them: sockets that the computing thread
drives itself, between its GEMMs. Elsewhere the backend does: sends and receives of Gloo,
all-to-alls of NCCL (on its own stream) and tpshm. Every byte is sent once, straight to who needs
it.
"""

# R ranks of the group

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import instrument
from tpkernels.comm.collectives import _guarded
from tpkernels.comm.group import group_by_name
from tpkernels.comm.lanes import lanes_of

_TAG = 0x54504B02  # beside the tags of comm.exchange

Buffers = Mapping[int, Sequence[Tensor]]
"""Rank of the group -> contiguous tensors, sent or filled one after another."""


class _Exchange(Protocol):
    @property
    def received(self) -> bool: ...

    def wait(self, received_only: bool = False) -> None: ...


class Transfer:
    """Messages on their way; what is sent must not change, and all must live, until they are done.

    Dropped without :meth:`wait`, they still are finished by whatever carries them.
    """

    def __init__(self, exchange: _Exchange, name: str, buffers: list[Tensor], token: Any) -> None:
        self._exchange, self._name = exchange, name
        self._buffers, self._token = buffers, token

    def has_received(self) -> bool:
        """Whether all that this rank receives is there, as far as was noticed."""
        there = self._exchange.received
        if there:
            self._arrived()
        return there

    def wait_received(self) -> None:
        """Wait until all that this rank receives is there. On CUDA the current stream waits."""
        self._wait(received_only=True)

    def wait(self) -> None:
        """Wait until all is sent and received. On CUDA the current stream waits."""
        self._wait(received_only=False)

    def drain(self) -> None:
        """Wait without an error: for cleaning up after another one."""
        with contextlib.suppress(RuntimeError):
            self._exchange.wait()

    def _wait(self, received_only: bool) -> None:
        if self._buffers:
            with instrument.waiting(self._name, self._buffers[0]):
                self._exchange.wait(received_only)
        self._arrived()

    def _arrived(self) -> None:
        if self._token is not None:
            token, self._token = self._token, None
            instrument.arrived(token)


class Messages:
    """What carries a group's messages. Transfers are started in the same order on all ranks.

    Attributes:
        size, rank: of the group.
        carrier: ``lanes``, or the name of the backend.
    """

    def __init__(self, group: dist.ProcessGroup, group_name: str, device: torch.device) -> None:
        self.group_name = group_name
        self.size, self.rank = group.size(), group.rank()
        self._lanes = lanes_of(group_name) if device.type == "cpu" else None
        self._group = group
        self.carrier = "lanes" if self._lanes is not None else _backend_of(group, device)
        self._like: Tensor | None = None  # of what was started; before that nothing moves

    @property
    def driven(self) -> bool:
        """Whether messages move only while :meth:`progress` or a wait is called."""
        return self._lanes is not None

    def start(
        self, sends: Buffers, receives: Buffers, like: Tensor, operation: str, whole: int = 0
    ) -> Transfer:
        """Start to send and to receive; ``like`` has the dtype and device of all of it.

        Args:
            operation: the collective this is a part of: all_gather, reduce_scatter, all_reduce.
            whole: bytes of the whole tensor that it begins to gather or to sum, the same on all
                ranks; 0: another transfer has begun it. For those who count collectives.

        Collective, also of a rank that has nothing to send or to receive.
        """
        self._like = like
        sent = [t for each in sends.values() for t in each]
        buffers = [*sent, *(t for each in receives.values() for t in each)]
        token = None
        if buffers and instrument.recording():
            sent_bytes, total = (sum(t.nbytes for t in each) for each in (sent, buffers))
            token = instrument.communication(operation, self.group_name, like, sent_bytes, total)
        if self._lanes is not None:
            # The thread that moves messages computes nothing meanwhile.
            with instrument.waiting(operation, like):
                exchange: _Exchange = self._lanes.exchange(sends, receives, operation)
        elif self.carrier == "gloo":
            exchange = _PointToPoint(self._group, self.group_name, sends, receives, operation)
        else:
            exchange = _AllToAll(self._group, self.group_name, sends, receives, like, operation)
        return Transfer(exchange, operation, buffers, token)

    def progress(self) -> None:
        """Move what can be moved without waiting; where another thread does that, nothing."""
        if self._lanes is not None and self._like is not None:
            with instrument.waiting("progress", self._like):
                self._lanes.progress()

    def abandon(self, transfers: Sequence[Transfer], error: BaseException, operation: str) -> None:
        """After ``error`` between two transfers of ``operation``: nothing stays pending here.

        Lanes are closed for good: what the others have sent, and this rank never asked for, would
        be taken for what comes next. The other ranks are told, and all that is started over them
        later raises this error. What a backend carries is waited for, and the group can be used
        again where all ranks gave up at the same place.
        """
        if self._lanes is not None:
            self._lanes.abandon(error, operation)
            return
        for transfer in transfers:
            transfer.drain()


def messages_of(group_name: str, device: torch.device) -> Messages:
    """What carries messages between tensors on ``device`` of the ranks of a group of several."""
    group = group_by_name(group_name)
    assert group is not None, "a group of one has nobody to send to"
    return Messages(group, group_name, device)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:  # of a group without a backend for this device: the call itself will say
        return str(group.name())


class _Works:
    """Works of ``torch.distributed``, waited for together."""

    def __init__(self, operation: str, group_name: str) -> None:
        self._operation, self._group_name = operation, group_name
        self._works: list[Any] = []

    @property
    def received(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, received_only: bool = False) -> None:
        error: RuntimeError | None = None
        while self._works:
            try:
                _guarded(self._works[0].wait, self._operation, self._group_name)
            except RuntimeError as failed:
                error = error or failed
            except BaseException:  # a signal's, perhaps just when the work was done
                self._works = [work for work in self._works if not work.is_completed()]
                raise
            del self._works[0]
        if error is not None:
            raise error

    def _add(self, call: Any, *args: Any, **options: Any) -> None:
        self._works.append(_guarded(call, self._operation, self._group_name, *args, **options))


class _PointToPoint(_Works):
    """Sends and receives: each byte straight to who needs it, as bytes."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        group_name: str,
        sends: Buffers,
        receives: Buffers,
        operation: str,
    ) -> None:
        super().__init__(operation, group_name)
        for peers, call, side in (
            (receives, dist.irecv, "group_src"),
            (sends, dist.isend, "group_dst"),
        ):
            for peer, tensors in peers.items():
                for tensor in tensors:
                    if tensor.numel():
                        raw = _flat(tensor).view(torch.uint8)
                        self._add(call, raw, group=group, tag=_TAG, **{side: peer})


class _AllToAll(_Works):
    """One all-to-all: what goes to one rank is one tensor, staged where it is several."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        group_name: str,
        sends: Buffers,
        receives: Buffers,
        like: Tensor,
        operation: str,
    ) -> None:
        super().__init__(operation, group_name)
        outgoing = [_staged(sends.get(peer, ()), like) for peer in range(group.size())]
        incoming = [_staged(receives.get(peer, ()), like) for peer in range(group.size())]
        self._places = [
            (list(receives.get(peer, ())), staged) for peer, staged in enumerate(incoming)
        ]
        self._add(dist.all_to_all, incoming, outgoing, group=group, async_op=True)

    def wait(self, received_only: bool = False) -> None:
        super().wait(received_only)
        places, self._places = self._places, []
        for tensors, staged in places:
            if len(tensors) > 1:
                parts = staged.split([t.numel() for t in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))


def _staged(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """One flat tensor of all elements: the memory of the only one, or a copy."""
    if not tensors:
        return like.new_empty(0)
    flat = [_flat(tensor) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor; not by ``view``: of one element any stride is that."""
    return tensor.as_strided((tensor.numel(),), (1,))
