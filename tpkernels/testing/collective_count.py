"""Count the collectives a piece of code starts: how many of each kind, and how many bytes.

    with count_collectives() as counts:
        layer(x)
    assert counts["all_reduce"].calls == 1

Every Python road to a process group is seen, in any thread and inside custom ops (where a
`TorchDispatchMode` sees nothing): methods of `ProcessGroup`, which `torch.distributed` calls,
`torch.ops._c10d_functional`, which functional collectives and compiled graphs call, our own ops
over peer memory, and the messages of overlapped ops. What C++ starts by itself (DDP's reducer) is
not, and then leaving the context raises rather than miscounts (of Gloo's groups, which alone count
one by one).

An overlapped op counts the same whatever carries it: one collective for each chunk, of the kind it
stands for and the bytes of that chunk of the whole tensor. The sends, receives, all-to-alls or
lanes that carry it are not counted again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tpkernels.comm import direct
from tpkernels.comm.messages import Messages

# Method of ProcessGroup, or op of _c10d_functional -> the kind it is counted as.
_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
    "recv_anysource": "receive",
}
# Gloo counts these twice in its sequence number: it does them by another of its collectives.
_TWO_STEPS_IN_GLOO = {"reduce_scatter"}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
# Ops of ours that all-reduce through peer memory -> the place of the group's name in their
# arguments. The tensor that is reduced is their result; what reduces in place, its first argument.
_PEER_OPS = {"all_reduce_peer_": 1, "gemm_all_reduce_fused": 3, "mlp_fused": 8}


@dataclass(frozen=True)
class CollectiveCount:
    """Number of calls of one kind, and the bytes of their whole tensors together.

    A call's bytes are those of the tensor it reduces, broadcasts, exchanges, sends or receives; of
    the gathered tensor for `all_gather`; of the unscattered one for `reduce_scatter`. An all-reduce
    and the reduce-scatter plus all-gather that replace it thus count one tensor once and twice.
    """

    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class CollectiveCall:
    """One collective: its kind, whole bytes, dtype, and the name of its group."""

    kind: str
    bytes: int
    dtype: torch.dtype | None
    group_name: str


class CollectiveCounts(Mapping[str, CollectiveCount]):
    """Counts by kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce,
    gather, scatter, barrier, send, receive. A kind that was not called counts zero.

    Attributes:
        calls: every call, in order.
    """

    KINDS = tuple(dict.fromkeys(_METHODS.values()))

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self._steps: dict[str, int] = {}  # sequence numbers that the calls account for, by group

    def _account(self, group_name: str, steps: int) -> None:
        self._steps[group_name] = self._steps.get(group_name, 0) + steps

    def __getitem__(self, kind: str) -> CollectiveCount:
        if kind not in self.KINDS:
            raise KeyError(f"{kind!r} is not a kind of collective; one of {', '.join(self.KINDS)}")
        calls = [call for call in self.calls if call.kind == kind]
        return CollectiveCount(len(calls), sum(call.bytes for call in calls))

    def __iter__(self) -> Iterator[str]:
        """The kinds that were called."""
        return iter([kind for kind in self.KINDS if self[kind].calls])

    def __len__(self) -> int:
        return len(list(iter(self)))

    @property
    def total(self) -> CollectiveCount:
        """All kinds together."""
        return CollectiveCount(len(self.calls), sum(call.bytes for call in self.calls))

    def __repr__(self) -> str:
        counts = (f"{k}: {self[k].calls} calls, {self[k].bytes} bytes" for k in self)
        return f"CollectiveCounts({'; '.join(counts)})"


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Count the collectives of this process, in all its threads, while the context is open.

    Contexts may nest; each counts for itself.

    Raises:
        RuntimeError: on leaving, if a group ran a collective that was not seen.
    """
    counts = CollectiveCounts()
    before = _started()
    with _lock:
        _open_counts.append(counts)
        if len(_open_counts) == 1:
            _install()
    try:
        yield counts
    finally:
        with _lock:
            _open_counts[:] = [other for other in _open_counts if other is not counts]
            if not _open_counts:
                _remove()
    _check_all_seen(counts, before)


_lock = threading.Lock()
_open_counts: list[CollectiveCounts] = []
_undo: list[Callable[[], None]] = []
_inside = threading.local()  # a functional op that ends in a Python process group counts once
_carrying = threading.local()  # what carries the messages of an overlapped op counts as that


def _record(call: CollectiveCall, steps: int) -> None:
    """Count ``call``, which a Gloo group does in so many steps of its sequence."""
    carried = getattr(_carrying, "flag", False)
    with _lock:
        for counts in _open_counts:
            if not carried:
                counts.calls.append(call)
            counts._account(call.group_name, steps)


def _install() -> None:
    for name, kind in _METHODS.items():
        if method := getattr(dist.ProcessGroup, name, None):
            _replace(dist.ProcessGroup, name, _counting(method, kind, method=name))
    for name, kind in _FUNCTIONAL.items():
        packet = getattr(torch.ops._c10d_functional, name, None)
        if packet is None:
            continue
        for op in [packet, *(getattr(packet, overload) for overload in packet.overloads())]:
            _replace(op, "_op", _counting(op._op, kind, method=None))
    for name, place in _PEER_OPS.items():
        packet = getattr(torch.ops.tpkernels, name, None)
        for op in () if packet is None else (packet, packet.default):
            _replace(op, "_op", _counting_peer_op(op._op, place))
    if direct._at_once is not None:
        _replace(direct, "_at_once", _counting_at_once(direct._at_once))
    _replace(Messages, "start", _counting_messages(Messages.start))


def _remove() -> None:
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, value: Any) -> None:
    # As stored: read through the class, a bound-method descriptor would come back unbound.
    original = vars(owner).get(name, getattr(owner, name))
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, original))


def _counting(call: Callable[..., Any], kind: str, *, method: str | None) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "flag", False):
            return call(*args, **kwargs)
        operands = [*args, *kwargs.values()]
        group_name = args[0].group_name if method else _name_in(operands)
        tensors = _tensors(operands)
        # Fake and functional tensors are a compiler's: nothing is sent.
        if all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            factor = 1 if method else _gathered(kind, operands)
            # Of an output and an input, the larger is the whole.
            size = max(_bytes(operand) for operand in operands) * factor
            dtype = tensors[0].dtype if tensors else None
            record = CollectiveCall(kind, 0 if kind == "barrier" else size, dtype, group_name)
            _record(record, steps=2 if method in _TWO_STEPS_IN_GLOO else 1)
        _inside.flag = True
        try:
            return call(*args, **kwargs)
        finally:
            _inside.flag = False

    return counted


def _counting_at_once(call: Callable[..., bool]) -> Callable[..., bool]:
    def counted(tensor: Any, group: dist.ProcessGroup, op: str) -> bool:
        done = call(tensor, group, op)
        if done:
            record = CollectiveCall("all_reduce", _bytes(tensor), tensor.dtype, group.group_name)
            _record(record, steps=1)
        return done

    return counted


def _counting_peer_op(call: Callable[..., Any], place: int) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        result = call(*args)
        reduced = args[0] if result is None else result
        if type(reduced) is torch.Tensor:
            record = CollectiveCall("all_reduce", _bytes(reduced), reduced.dtype, args[place])
            _record(record, steps=1)
        return result

    return counted


def _counting_messages(start: Callable[..., Any]) -> Callable[..., Any]:
    def counted(
        messages: Messages, sends: Any, receives: Any, like: Any, operation: str, whole: int = 0
    ) -> Any:
        if whole:
            _record(CollectiveCall(operation, whole, like.dtype, messages.group_name), steps=0)
        _carrying.flag = True
        try:
            return start(messages, sends, receives, like, operation, whole)
        finally:
            _carrying.flag = False

    return counted


def _tensors(operand: Any) -> list[torch.Tensor]:
    if isinstance(operand, torch.Tensor):
        return [operand]
    if isinstance(operand, (list, tuple)):
        return [tensor for item in operand for tensor in _tensors(item)]
    return []


def _bytes(operand: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(operand))


def _gathered(kind: str, operands: list[Any]) -> int:
    """A functional all-gather takes only the part; its group size follows the input."""
    return operands[1] if kind == "all_gather" else 1


def _name_in(operands: list[Any]) -> str:
    """A functional op's group name: its last string (before it may come the reduction)."""
    last = [operand for operand in operands if isinstance(operand, (str, dist.ProcessGroup))][-1]
    return last if isinstance(last, str) else last.group_name


def _started() -> dict[str, int]:
    """Collectives started so far by every Gloo group: the only backend that counts one by one."""
    started: dict[str, int] = {}
    for group in distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "gloo":
            started[group.group_name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return started


def _check_all_seen(counts: CollectiveCounts, before: dict[str, int]) -> None:
    after = _started()
    for name in before.keys() & after.keys():
        seen = counts._steps.get(name, 0)
        ran = after[name] - before[name]
        if ran > seen:
            raise RuntimeError(
                f"group {name!r} ran {ran} collectives but {seen} were seen; "
                "C++ code started the others, which cannot be counted"
            )
