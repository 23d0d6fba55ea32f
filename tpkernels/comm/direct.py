"""Collectives straight through peer memory, without ``torch.distributed`` in between.

Ranks of one host whose group runs on ``tpshm`` share memory; an op of ours reads and writes it in
one native call. Where a group has no such memory, the same functions go through its backend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels import instrument, native
from tpkernels.comm.collectives import _blocking, all_reduce_in_place
from tpkernels.comm.group import GroupLike, resolve_group
from tpkernels.errors import ConfigError

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_NATIVE: Any = native.load()
# (tensor, process group, op): True where it was done, False where the op itself must be asked.
_at_once: Any = None if _NATIVE is None else _NATIVE.all_reduce_
_peer_all_reduce_: Any = None if _NATIVE is None else torch.ops.tpkernels.all_reduce_peer_.default


def has_peers(group_name: str) -> bool:
    """Whether the group of that name shares memory, so that native ops can serve it."""
    return _NATIVE is not None and _NATIVE.has_peer_group(group_name)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its elements have a place in memory each."""
    return tensor.is_contiguous() or 0 not in tensor.stride()


def sum_in_place(tensor: Tensor, group_name: str) -> Tensor:
    """The sum over the group into ``tensor`` itself, contiguous and ours; returns it.

    On CUDA enqueued on the current stream.
    """
    if tensor.is_cpu and tensor.numel() and has_peers(group_name):
        with instrument.exchanging("all_reduce", group_name, tensor):
            _peer_all_reduce_._op(tensor, group_name, "sum")
        return tensor
    return all_reduce_in_place(tensor, group_name)


def all_reduce_(tensor: Tensor, group: GroupLike = None, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over the group, in place on every rank; returns it.

    Equivalent to ``dist.all_reduce(tensor, op, group)``, at a fraction of the overhead where the
    group runs on ``tpshm``.

    Args:
        tensor: any shape and layout, the same shape and dtype on every rank; fp64, fp32, bf16, fp16
            and integers. Half types are summed in fp32, in rank order, and rounded once: every rank
            holds the same bits.
        group: a ``ProcessGroup``, a 1-D ``DeviceMesh`` or None for all ranks.
        op: ``"sum"``, ``"avg"``, ``"max"`` or ``"min"``.

    Blocking on CPU. Not differentiable: ``reduce_from_tensor_model_parallel_region`` is.

    Raises:
        ConfigError: ``op`` is not one of these.
        CommunicationError: a rank is missing, late, or calls something else; names it.
    """
    plain = type(group) is dist.ProcessGroup and type(op) is str
    # Not `recording()`: its call would be 4% of the quickest all-reduce.
    quick = plain and _at_once is not None and instrument._recorder is None
    if quick and _at_once(tensor, group, op):
        return tensor
    name = group.group_name if isinstance(group, dist.ProcessGroup) else resolve_group(group).name
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"all_reduce_: tensor must be a Tensor, got {type(tensor).__name__}. "
            "Fix: torch.as_tensor(...)"
        )
    if tensor.is_neg():  # a view whose memory holds other values; PyTorch would lose the result
        return tensor.copy_(all_reduce_(tensor.resolve_neg(), group, op))
    if name and op in _REDUCTIONS and tensor.is_cpu and _is_plain(tensor) and has_peers(name):
        with instrument.exchanging("all_reduce", name, tensor):
            _peer_all_reduce_._op(tensor, name, op)  # its __call__ would only add to the time
        return tensor
    if op not in _REDUCTIONS:
        allowed = ", ".join(_REDUCTIONS)
        raise ConfigError(f"all_reduce_: op={op!r} is not known; allowed: {allowed}. Fix: op='sum'")
    resolved = resolve_group(group)
    if resolved.process_group is not None:
        _blocking(
            dist.all_reduce,
            "all_reduce",
            resolved.name,
            tensor,
            op=_REDUCTIONS[op],
            group=resolved.process_group,
        )
    return tensor
