"""The all-reduce of a matrix by chunks of rows, each started when the caller has computed it.

    with row_sums(out, group_name) as sums:
        for start, end in chunks:
            torch.mm(x[start:end], w, out=out[start:end])
            sums.push(start, end)                            # is on its way; compute the next one
    # here out is the sum over the ranks

Between hosts on CPU: two ranks send each other their chunk; more send its parts to their owners,
which add and send back, one chunk behind. Sums are in rank order, half types in fp32, rounded once:
every rank holds the same bits. Elsewhere each chunk is an all-reduce of the backend.
"""

# M rows, N columns, R ranks

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from tpkernels import instrument
from tpkernels.comm.collectives import Pending, all_reduce_async
from tpkernels.comm.messages import Messages, Transfer, messages_of

_OPERATION = "all_reduce"


def sum_in_rank_order(parts: list[Tensor], out: Tensor, bias: Tensor | None = None) -> Tensor:
    """``out`` filled with the sum of ``parts``, from the first on, plus ``bias`` [N].

    Half types are added in fp32 and rounded once. ``out`` may be one of ``parts``.
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    with instrument.computing("sum", out):
        if wide is out.dtype and len(parts) == 2:
            torch.add(parts[0], parts[1], out=out)
            return out if bias is None else out.add_(bias)
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        if bias is not None:
            total += bias
        return out.copy_(total)


class RowSums:
    """The sum over the group of ``out`` [M, N], contiguous, pushed chunk by chunk.

    ``driven``: whether chunks move only while one of these methods is called.
    """

    driven = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # an exception between two chunks leaves nothing pending
            self.abandon(error)
            return
        try:
            self.finish()
        except BaseException as failed:
            self.abandon(failed)
            raise

    def push(self, start: int, end: int) -> None:
        """Rows [start, end) hold this rank's partial sums, and are not written until the end."""
        raise NotImplementedError

    def progress(self) -> None:
        """Move what can be moved without waiting; for callers that compute other things."""

    def finish(self) -> None:
        """Wait until all that was pushed is summed."""
        raise NotImplementedError

    def abandon(self, error: BaseException) -> None:
        """Nothing that was pushed stays pending."""
        raise NotImplementedError


class _Collectives(RowSums):
    """An all-reduce of the backend for each chunk."""

    def __init__(self, out_MN: Tensor, group_name: str) -> None:
        self._out, self._group_name = out_MN, group_name
        self._pending: list[Pending] = []

    def push(self, start: int, end: int) -> None:
        # RAW: the collective reads these rows; it is ordered after the GEMM on the stream.
        self._pending.append(all_reduce_async(self._out[start:end], self._group_name))

    def finish(self) -> None:
        for each in self._pending:
            each.wait()

    def abandon(self, error: BaseException) -> None:
        for each in self._pending:
            each.drain()


class _Pair(RowSums):
    """Two ranks: each sends the other its chunk and adds what comes."""

    driven = True

    def __init__(self, out_MN: Tensor, messages: Messages) -> None:
        self._out, self._messages = out_MN, messages
        self._peer = 1 - messages.rank
        self._pushed: list[tuple[int, int, Tensor, Transfer]] = []

    def push(self, start: int, end: int) -> None:
        own = self._out[start:end]
        theirs = torch.empty_like(own)
        transfer = self._messages.start(
            {self._peer: [own]}, {self._peer: [theirs]}, own, _OPERATION, own.nbytes
        )
        self._pushed.append((start, end, theirs, transfer))

    def progress(self) -> None:
        self._messages.progress()

    def finish(self) -> None:
        for start, end, theirs, transfer in self._pushed:
            transfer.wait()  # WAR: own rows are overwritten by the sum, so they must be sent
            own = self._out[start:end]
            parts = [own, theirs] if self._messages.rank == 0 else [theirs, own]
            sum_in_rank_order(parts, own)
        self._pushed.clear()

    def abandon(self, error: BaseException) -> None:
        self._messages.abandon([transfer for *_, transfer in self._pushed], error, _OPERATION)


class _Owners(RowSums):
    """More ranks: chunk i's parts go to their owners while chunk i - 1's sums come back."""

    driven = True

    def __init__(self, out_MN: Tensor, messages: Messages) -> None:
        self._out, self._messages = out_MN, messages
        self._others = [r for r in range(messages.size) if r != messages.rank]
        self._partial: tuple[list[Tensor], dict[int, Tensor], Transfer] | None = None
        self._returns: list[Transfer] = []

    def push(self, start: int, end: int) -> None:
        parts = list(self._out[start:end].tensor_split(self._messages.size))
        own = parts[self._messages.rank]
        received = {peer: torch.empty_like(own) for peer in self._others}
        transfer = self._messages.start(
            {peer: [parts[peer]] for peer in self._others},
            {peer: [received[peer]] for peer in self._others},
            own,
            _OPERATION,
            self._out[start:end].nbytes,
        )
        self._send_back()
        self._partial = (parts, received, transfer)

    def _send_back(self) -> None:
        """Add what the others sent of the chunk before, and send the sum to all."""
        if self._partial is None:
            return
        parts, received, transfer = self._partial
        transfer.wait()  # WAR: the others' parts of our rows are overwritten by their sums
        rank = self._messages.rank
        own = parts[rank]
        ordered = [own if r == rank else received[r] for r in range(self._messages.size)]
        sum_in_rank_order(ordered, own)
        self._returns.append(
            self._messages.start(
                {peer: [own] for peer in self._others},
                {peer: [parts[peer]] for peer in self._others},
                own,
                _OPERATION,
            )
        )
        self._partial = None

    def progress(self) -> None:
        self._messages.progress()

    def finish(self) -> None:
        self._send_back()
        for transfer in self._returns:
            transfer.wait()
        self._returns.clear()

    def abandon(self, error: BaseException) -> None:
        pending = list(self._returns)
        if self._partial is not None:
            pending.append(self._partial[2])
        self._messages.abandon(pending, error, _OPERATION)


def row_sums(out_MN: Tensor, group_name: str) -> RowSums:
    """What sums ``out_MN``, contiguous, over a group of several ranks, chunk by chunk."""
    messages = messages_of(group_name, out_MN.device)
    if messages.carrier != "lanes":
        return _Collectives(out_MN, group_name)
    return _Pair(out_MN, messages) if messages.size == 2 else _Owners(out_MN, messages)
