"""Collectives on a group by name, safe for any layout, with errors that say who is missing.

Every tensor is made contiguous before it is sent and the caller's tensor is never written, so a
transposed or expanded input gives the same result as its ``.contiguous()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import tpshm
from tpkernels.comm.group import group_by_name
from tpkernels.comm.liveness import missing_ranks
from tpkernels.errors import CommunicationError
from tpkernels.instrument import arrived, communication, exchanging, waiting

tpshm.register()

# torch 2.13 renamed both and warns on the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending:
    """A collective that has been issued; :meth:`wait` gives its result or raises by name."""

    def __init__(self, work: Any, result: Tensor, operation: str, group_name: str) -> None:
        self._work, self._result = work, result
        self._operation, self._group_name = operation, group_name
        self._sent = None if work is None else communication(operation, group_name, result)

    def wait(self) -> Tensor:
        """The result. On CUDA the current stream waits, not the host."""
        if self._work is not None:
            work, self._work = self._work, None
            try:
                with waiting(self._operation, self._result):
                    _guarded(work.wait, self._operation, self._group_name)
            finally:
                arrived(self._sent)
        return self._result

    def drain(self) -> None:
        """Wait without a result or an error: for cleaning up after another error."""
        with contextlib.suppress(RuntimeError):
            self.wait()


def _guarded(
    call: Callable[..., Any], operation: str, group_name: str, *args: Any, **kw: Any
) -> Any:
    try:
        return call(*args, **kw)
    except RuntimeError as error:  # DistBackendError, Gloo's and NCCL's own errors
        if str(error).startswith(f"{tpshm.NAME}: "):  # says group, operation and ranks itself
            raise CommunicationError(str(error)) from error
        group = group_by_name(group_name)
        assert group is not None
        members = dist.get_process_group_ranks(group)
        missing = missing_ranks(group)
        blame = (
            f"no sign of life from rank {', '.join(map(str, missing))} (global rank)"
            if missing
            else "all ranks are alive: they called different operations, shapes or dtypes, or "
            "one was late (TPKERNELS_TIMEOUT)"
        )
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CommunicationError(
            f"{operation} on group {group_name} (global ranks {members}) failed on rank "
            f"{dist.get_rank()}: {blame}. Backend said: {first_line}"
        ) from error


def _blocking(
    call: Callable[..., Any], operation: str, group_name: str, tensor: Tensor, *args: Any, **kw: Any
) -> None:
    """``call(tensor, *args)`` and its result: communication that this rank waits for at once."""
    with exchanging(operation, group_name, tensor):
        _guarded(call, operation, group_name, tensor, *args, **kw)


def all_reduce_async(tensor: Tensor, group_name: str) -> Pending:
    """Start a sum over the group into ``tensor`` itself, which must be contiguous and ours."""
    group = group_by_name(group_name)
    if group is None or tensor.numel() == 0:
        return Pending(None, tensor, "all_reduce", group_name)
    work = _guarded(dist.all_reduce, "all_reduce", group_name, tensor, group=group, async_op=True)
    return Pending(work, tensor, "all_reduce", group_name)


def all_reduce(tensor: Tensor, group_name: str) -> Tensor:
    """The sum of every rank's ``tensor``, a new contiguous tensor of the same shape."""
    return all_reduce_async(tensor.clone(memory_format=torch.contiguous_format), group_name).wait()


def all_reduce_max(tensor: Tensor, group_name: str) -> Tensor:
    """The element-wise maximum over the group, a new contiguous tensor."""
    group = group_by_name(group_name)
    result = tensor.clone(memory_format=torch.contiguous_format)
    if group is not None and result.numel():
        _blocking(
            dist.all_reduce, "all_reduce", group_name, result, op=dist.ReduceOp.MAX, group=group
        )
    return result


def all_gather(tensor: Tensor, sizes: list[int], dim: int, group_name: str) -> Tensor:
    """Every rank's ``tensor`` one after another along ``dim``; rank r brings ``sizes[r]`` of it.

    Uneven sizes are padded to the largest for the wire and cut afterwards.
    """
    group = group_by_name(group_name)
    if group is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    most = max(sizes)
    rows = tensor.movedim(dim, 0)
    padded = rows.contiguous()
    if rows.shape[0] != most:
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
    gathered = padded.new_empty((len(sizes) * most, *padded.shape[1:]))
    if gathered.numel():
        _blocking(_all_gather_single, "all_gather", group_name, gathered, padded, group=group)
    if any(size != most for size in sizes):
        pieces = [gathered[r * most : r * most + size] for r, size in enumerate(sizes)]
        gathered = torch.cat(pieces)
    return _moved_to(dim, gathered)


def reduce_scatter(tensor: Tensor, sizes: list[int], dim: int, group_name: str) -> Tensor:
    """The sum over the group, of which rank r keeps ``sizes[r]`` rows along ``dim``."""
    group = group_by_name(group_name)
    if group is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    most, rank = max(sizes), group.rank()
    rows = tensor.movedim(dim, 0)
    if all(size == most for size in sizes):
        padded = rows.contiguous()
    else:
        padded = rows.new_zeros((len(sizes) * most, *rows.shape[1:]))
        start = 0
        for r, size in enumerate(sizes):
            padded[r * most : r * most + size] = rows[start : start + size]
            start += size
    kept = padded.new_empty((most, *padded.shape[1:]))
    if padded.numel():
        _blocking(_reduce_scatter_single, "reduce_scatter", group_name, kept, padded, group=group)
    return _moved_to(dim, kept if sizes[rank] == most else kept[: sizes[rank]])


def _moved_to(dim: int, tensor: Tensor) -> Tensor:
    """``tensor`` with its first dimension at ``dim``; no view: it may be edited in place."""
    if dim % tensor.dim() == 0 and not tensor._is_view():
        return tensor
    return tensor.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def all_gather_bytes(row: Tensor, group_name: str) -> Tensor:
    """One fixed-size row of every rank, stacked [R, ...]: for small control data."""
    group = group_by_name(group_name)
    if group is None:
        return row[None]
    out = row.new_empty((group.size() * row.numel(),))
    flat = row.contiguous().view(-1)
    _blocking(_all_gather_single, "all_gather", group_name, out, flat, group=group)
    return out.view(group.size(), *row.shape)


def all_gather_in_place(whole: Tensor, group_name: str) -> Tensor:
    """Fill ``whole`` [R * S], of which rank r has written its part, elements r * S on.

    Sent as bytes, so that any dtype travels on any backend. On CUDA enqueued on the current stream,
    one of communication: not recorded as waited for.
    """
    group = group_by_name(group_name)
    if group is not None and whole.numel():
        raw, own = _whole_and_own(whole, group)
        sent = communication("all_gather", group_name, raw)
        _guarded(_all_gather_single, "all_gather", group_name, raw, own, group=group)
        arrived(sent)
    return whole


def _whole_and_own(whole: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """``whole`` and this rank's part of it, as bytes."""
    raw = whole.view(torch.uint8)
    size = raw.numel() // group.size()
    return raw, raw[group.rank() * size : (group.rank() + 1) * size]


def reduce_scatter_into(kept: Tensor, whole: Tensor, group_name: str) -> Tensor:
    """The sum over the group of ``whole`` [R * S], of which rank r gets part r in ``kept``.

    On CUDA enqueued on the current stream, one of communication: not recorded as waited for.
    """
    group = group_by_name(group_name)
    if group is None or whole.numel() == 0:
        return kept.copy_(whole)
    sent = communication("reduce_scatter", group_name, whole)
    _guarded(_reduce_scatter_single, "reduce_scatter", group_name, kept, whole, group=group)
    arrived(sent)
    return kept


def all_reduce_in_place(tensor: Tensor, group_name: str) -> Tensor:
    """The sum over the group into ``tensor`` itself; on CUDA enqueued on the current stream."""
    group = group_by_name(group_name)
    if group is not None and tensor.numel():
        _blocking(dist.all_reduce, "all_reduce", group_name, tensor, group=group)
    return tensor
