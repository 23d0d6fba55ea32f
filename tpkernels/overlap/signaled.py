"""The ``signaled`` strategy: one whole GEMM whose finished rows are sent while it goes on.

    compute: [gemm: tiles in order of rows                     ]
    comm:    [wait 0....][all-reduce 0][wait 1][all-reduce 1]...

The GEMM counts its tiles by chunk of rows; a kernel on a stream of its own waits for a chunk's
count, then an ordinary collective sends the chunk. Nothing is cut, so no wave of tiles is lost.
Off CUDA (Triton's interpreter) everything runs in that order, one after another: for tests.
"""

# M tokens, K_r this rank's part of the in features, N out features

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tpkernels.comm.collectives import Pending, all_reduce_async
from tpkernels.comm.group import group_by_name
from tpkernels.errors import ConfigError
from tpkernels.kernels import table
from tpkernels.ops.implementations import Call, Refusal, refusal
from tpkernels.overlap.plan import MOST_SIGNALED, OverlapPlan

# Multiprocessors that the GEMM leaves to the waiting kernel and to NCCL, whose blocks could else
# not start before the persistent GEMM ends. ASSUMPTION: 16 suffice; not measured.
COMMUNICATION_MULTIPROCESSORS = 16
_STREAM_PRIORITY = -1  # the waiting kernel and the collectives start before other work


def gemm_all_reduce_signaled(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_MN: Tensor,
    plan: OverlapPlan,
    group_name: str,
) -> None:
    """Fill ``out_MN`` with ``all_reduce(F.linear(x, weight)) + bias`` over the group.

    Raises:
        ConfigError: the GEMM with tile counts cannot run on these tensors, and why.
    """
    require_signaled(x_MK.device, x_MK.dtype, out_MN.dtype)
    from tpkernels.kernels.gemm_act import gemm_signaled

    chunks = plan.rows(out_MN.shape[0])
    if not chunks or not out_MN.shape[1]:
        return
    pending: list[Pending] = []
    on_device = torch.cuda.device(x_MK.device) if x_MK.device.type == "cuda" else nullcontext()
    with on_device:
        lane = _lane_of(group_name, x_MK.device)
        lane.enter()
        try:
            expected = gemm_signaled(
                x_MK,
                weight_NK,
                out_MN,
                lane.counters,
                chunks[0][1],
                spare_programs=COMMUNICATION_MULTIPROCESSORS,
            )
            with lane.communicating():
                for index, (start, end) in enumerate(chunks):
                    # RAW: the collective reads these rows, which the GEMM may be still writing.
                    lane.counters.wait(index, expected[index])
                    pending.append(all_reduce_async(out_MN[start:end], group_name))
            for (start, end), each in zip(chunks, pending, strict=True):
                each.wait()
                if bias_N is not None:  # once, after the reduction
                    out_MN[start:end] += bias_N
        except BaseException:  # nothing stays pending, and counts that nobody waited for are gone
            for each in pending:
                each.drain()
            lane.join()
            lane.counters.reset()
            raise
        lane.leave()


def require_signaled(
    device: torch.device, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> None:
    """Raise :class:`ConfigError` unless the GEMM with tile counts can run on such tensors."""
    described = table.describe(device) if device.type == "cuda" else None
    refused = refusal("triton", Call("gemm_act", device.type, described, dtype, "none", False))
    if refused is None and reduce_dtype not in (None, dtype):
        refused = Refusal(
            f"its GEMM writes partial sums in the dtype of x, {dtype}, and reduce_dtype is "
            f"{reduce_dtype}"
        )
    if refused is not None:
        raise ConfigError(
            f"TPKERNELS_OVERLAP=signaled was asked for, but cannot serve: {refused.reason}. "
            f"Fix: {refused.fix or 'unset TPKERNELS_OVERLAP'}"
        )


class _Lane:
    """A group's tile counts and communication stream on one device.

    The next GEMM may not count before the last one's chunks were waited for. On one stream the
    collectives see to that; another stream waits for ``_left``.
    """

    def __init__(self, device: torch.device) -> None:
        from tpkernels.kernels.tile_counters import TileCounters

        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "the first call of TPKERNELS_OVERLAP=signaled makes its counters, which a CUDA "
                "graph would own. Fix: call the model once before it is captured"
            )
        self.counters = TileCounters(device, MOST_SIGNALED)
        self._stream: torch.cuda.Stream | None = None
        self._left: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=_STREAM_PRIORITY)

    def enter(self) -> None:
        """Before the GEMM is launched on the current stream."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream()
        capturing = torch.cuda.is_current_stream_capturing()
        if self._left is not None and not capturing:
            current.wait_event(self._left)  # WAR: another stream's call has read its counts
        # RAW: the counters exist. Also, nobody spins while the GEMM waits for its inputs.
        self._stream.wait_stream(current)

    def communicating(self) -> Any:
        """Makes the communication stream the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for the communication stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def leave(self) -> None:
        """After the last chunk was waited for on the current stream."""
        self.join()
        if self._stream is not None and not torch.cuda.is_current_stream_capturing():
            self._left = torch.cuda.current_stream().record_event()


_lanes: WeakKeyDictionary[Any, dict[torch.device, _Lane]] = WeakKeyDictionary()  # by group


def _lane_of(group_name: str, device: torch.device) -> _Lane:
    group = group_by_name(group_name)
    assert group is not None, "a group of one has nothing to signal"
    lanes = _lanes.setdefault(group, {})
    if device not in lanes:
        lanes[device] = _Lane(device)
    return lanes[device]
