"""The ``signaled`` strategy: one whole GEMM whose finished rows are sent while it goes on.

    compute: [gemm: tiles in order of rows                     ]
    comm:    [wait 0....][collective 0][wait 1][collective 1]...

The GEMM counts its tiles by chunk of rows; a chunk that is counted is sent by an ordinary
collective or exchange. Nothing is cut, so no wave of tiles is lost. On CUDA a stream waits
(``signaled_cuda``); on CPU tensors a thread does, by the same plan (``signaled_cpu``).
"""

# M tokens, K_r this rank's part of the in features, N out features, s_r rows that rank r keeps

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tpkernels import instrument
from tpkernels.comm.collectives import all_reduce_async
from tpkernels.comm.group import group_by_name
from tpkernels.comm.messages import messages_of
from tpkernels.comm.row_sums import sum_in_rank_order
from tpkernels.errors import ConfigError
from tpkernels.kernels import table
from tpkernels.ops.implementations import Call, Refusal, refusal
from tpkernels.overlap.plan import MOST_SIGNALED, OverlapPlan
from tpkernels.overlap.signal_plan import SignalPlan, by_owners, by_rows, owners_refusal
from tpkernels.overlap.signaled_cpu import CpuLane
from tpkernels.overlap.signaled_send import Send, Sent

_SCATTER = "reduce_scatter"


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
        CommunicationError: a rank is missing or late.
    """
    require_signaled(x_MK.device, x_MK.dtype, out_MN.dtype)
    if out_MN.numel() == 0:
        return
    signals = by_rows(plan.rows(out_MN.shape[0]))

    def send(chunk: int) -> Sent:
        start, end = signals.bounds[chunk]
        return all_reduce_async(out_MN[start:end], group_name)

    def add_bias(chunk: int) -> None:
        if bias_N is not None:  # once, after the reduction
            start, end = signals.bounds[chunk]
            out_MN[start:end] += bias_N

    sent = _run(x_MK, weight_NK, out_MN, signals, send, group_name)
    _wait_for(sent, add_bias)


def gemm_reduce_scatter_signaled(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    out_sN: Tensor,
    sizes: Sequence[int],
    group_name: str,
) -> None:
    """Fill ``out`` [s_r, N] with this rank's rows of the sum of ``F.linear(x, weight)``, plus bias.

    Args:
        x_MK: [M, K_r], all rows; weight_NK: [N, K_r]; bias_N: [N] or None, added once.
        out_sN: contiguous, of the dtype of the partial sums (the wire's).
        sizes: rows that every rank keeps, one list for all, together M.

    Each rank's rows are a chunk, sent to their owner, the next rank's first. Sums are in rank
    order, half types in fp32, rounded once.

    Raises:
        ConfigError: ``scatter_refusal`` gives a reason, or tile counts cannot run there.
        CommunicationError: a rank is missing or late.
    """
    require_signaled(x_MK.device, x_MK.dtype, out_sN.dtype)
    refused = scatter_refusal(sizes)
    if refused is not None:
        raise ConfigError(f"TPKERNELS_OVERLAP=signaled cannot serve: {refused}")
    messages = messages_of(group_name, x_MK.device)
    rank, world, columns = messages.rank, messages.size, weight_NK.shape[0]
    if not columns or not x_MK.shape[0]:
        return
    signals = by_owners(sizes, rank)
    partial_MN = out_sN.new_empty((x_MK.shape[0], columns))
    parts = list(partial_MN.split(list(sizes)))
    come = [parts[r] if r == rank else torch.empty_like(out_sN) for r in range(world)]

    def send(owner: int) -> Sent:
        if owner == rank:
            return _NOTHING
        source = (2 * rank - owner) % world  # as far behind as the owner is ahead
        whole = partial_MN.nbytes if owner == signals.order[0] else 0
        return messages.start(
            {owner: [parts[owner]]}, {source: [come[source]]}, partial_MN, _SCATTER, whole
        )

    try:
        _wait_for(_run(x_MK, weight_NK, partial_MN, signals, send, group_name))
    except BaseException as error:  # what was sent is done; what others sent is not taken for more
        messages.abandon([], error, _SCATTER)
        raise
    if out_sN.numel():
        sum_in_rank_order(come, out_sN, bias_N)


def require_signaled(
    device: torch.device, dtype: torch.dtype, reduce_dtype: torch.dtype | None = None
) -> None:
    """Raise :class:`ConfigError` unless a GEMM with tile counts can run on such tensors."""
    if device.type == "cpu":
        return
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


def scatter_refusal(sizes: Sequence[int]) -> str | None:
    """Why a reduce-scatter of rows (dimension 0) of such sizes cannot be signaled, or None.

    The same on every rank. Another dimension has rows in pieces: not asked here, never served.
    """
    if len(sizes) > MOST_SIGNALED:
        return f"{len(sizes)} ranks are more than the {MOST_SIGNALED} chunks that are counted apart"
    return owners_refusal(sizes)


class _Nothing:
    """A rank's own rows stay where they are."""

    def wait(self) -> None:
        pass

    drain = wait


_NOTHING = _Nothing()


def _wait_for(sent: Sequence[Sent], then: Callable[[int], None] = lambda _: None) -> None:
    """Wait for each, and call ``then`` with its number; an error leaves none pending."""
    try:
        for number, each in enumerate(sent):
            each.wait()
            then(number)
    except BaseException:
        for each in sent:
            each.drain()
        raise


_lanes: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()  # by group


def _lanes_of(group_name: str) -> dict[torch.device, Any]:
    """What a group keeps on each device: a ``CpuLane``, or a ``CudaLane``."""
    group = group_by_name(group_name)
    assert group is not None, "a group of one has nothing to signal"
    return _lanes.setdefault(group, {})


def _run(
    x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, plan: SignalPlan, send: Send, group_name: str
) -> list[Sent]:
    """``out = F.linear(x, weight)`` whose chunks are sent; what is under way."""
    columns, lanes = out_MN.shape[1], _lanes_of(group_name)
    if x_MK.device.type == "cpu":
        if x_MK.device not in lanes:
            lanes[x_MK.device] = CpuLane(MOST_SIGNALED)
        x, weight_KN = x_MK.to(out_MN.dtype), weight_NK.t().to(out_MN.dtype)

        def tile(start: int, end: int) -> None:
            torch.mm(x[start:end], weight_KN, out=out_MN[start:end])

        with instrument.computing("gemm", x_MK):
            sent: list[Sent] = lanes[x_MK.device].run(plan, columns, tile, send)
        return sent

    from tpkernels.kernels.gemm_act import gemm_signaled
    from tpkernels.kernels.tile_counters import TileCounters
    from tpkernels.overlap.signaled_cuda import COMMUNICATION_MULTIPROCESSORS, CudaLane

    def gemm(counters: TileCounters) -> tuple[int, int]:
        with instrument.computing("gemm", x_MK):
            return gemm_signaled(
                x_MK,
                weight_NK,
                out_MN,
                counters,
                plan.chunks,
                first_row=plan.first_row,
                spare_programs=COMMUNICATION_MULTIPROCESSORS,
            )

    with torch.cuda.device(x_MK.device):
        if x_MK.device not in lanes:
            lanes[x_MK.device] = CudaLane(x_MK.device, MOST_SIGNALED)
        sent = lanes[x_MK.device].run(plan, columns, gemm, send)
        return sent
