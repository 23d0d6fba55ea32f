"""``gemm_all_reduce``: the row-parallel GEMM with its all-reduce, in overlapping chunks of rows.

Equivalent to: ``y = F.linear(x, weight); dist.all_reduce(y); y + bias``.
"""

# M tokens (any leading dimensions), K_r this rank's part of the in features, N out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.comm.direct import sum_in_place
from tpkernels.comm.row_sums import row_sums
from tpkernels.errors import ConfigError
from tpkernels.library import DTYPES, check_gemm, define, needs_grad, rows
from tpkernels.ops.gemm_act import gemm_act
from tpkernels.overlap import fused
from tpkernels.overlap.gemm_parts import PLAIN
from tpkernels.overlap.plan import OverlapPlan, plan_gemm_all_reduce
from tpkernels.overlap.signaled import gemm_all_reduce_signaled


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, reduce_dtype: torch.dtype | None
) -> None:
    check_gemm("gemm_all_reduce", x, weight, bias)
    if reduce_dtype is not None and reduce_dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise ConfigError(
            f"gemm_all_reduce: reduce_dtype={reduce_dtype} cannot hold the sums; "
            f"allowed: None, {allowed}"
        )


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> Tensor:
    _check(x, weight, bias, reduce_dtype)
    if not group_name:
        return gemm_act(x, weight, bias)
    with instrument.operation("gemm_all_reduce", layer, group_name, x) as op:
        x_MK = rows(x)
        wire_dtype = reduce_dtype or x.dtype
        op.plan = plan = plan_gemm_all_reduce(
            x_MK.shape[0],
            weight.shape[0],
            wire_dtype.itemsize,
            group_name,
            chunks,
            device=x.device,
            fused=fused.refusal(x, [weight], group_name, reduce_dtype),
            fused_rows=fused.most_rows(x.dtype),
        )
        op.implementation = PLAIN
        if plan.strategy == "fused":
            op.implementation = "cpu"
            with instrument.computing("fused", x):
                return fused.gemm_all_reduce_fused(x, weight, bias, group_name)
        out = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=wire_dtype)
        _fill(x_MK, weight, bias, rows(out), plan, group_name)
        return out.to(x.dtype)  # no view: the caller may edit it in place


def _fill(
    x_MK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_MN: Tensor,
    plan: OverlapPlan,
    group_name: str,
) -> None:
    if plan.strategy == "signaled":
        gemm_all_reduce_signaled(x_MK, weight, bias, out_MN, plan, group_name)
        return
    if plan.chunks == 1:
        _partial(x_MK, weight, out_MN)
        sum_in_place(out_MN, group_name)
        if bias is not None:  # once, after the reduction
            out_MN += bias
        return
    bounds = plan.rows(out_MN.shape[0])
    with row_sums(out_MN, group_name) as sums:
        for start, end in bounds:
            _partial(x_MK[start:end], weight, out_MN[start:end])
            sums.push(start, end)
    if bias is not None:  # once, after the reduction
        out_MN += bias


def _partial(x_MK: Tensor, weight: Tensor, out_MN: Tensor) -> None:
    """This rank's partial sums, accumulated in fp32 and rounded once to the wire's dtype."""
    with instrument.computing("gemm", x_MK):
        if out_MN.dtype is x_MK.dtype:
            torch.mm(x_MK, weight.t(), out=out_MN)
        else:
            torch.mm(x_MK.to(out_MN.dtype), weight.t().to(out_MN.dtype), out=out_MN)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> Tensor:
    _check(x, weight, bias, reduce_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class _SaveForBackward(torch.autograd.Function):
    """Holds what backward needs and returns a placeholder of the output's shape, no storage.

    The collective runs in :class:`Communicate`, which saves nothing: when this GEMM ends a
    recomputed region, recomputation stops here and does not repeat the all-reduce (TP-51).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, layer: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group_name, ctx.layer = group_name, layer
        return placeholder(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with instrument.operation("gemm_all_reduce.backward", ctx.layer, ctx.group_name, dy) as op:
            op.implementation = PLAIN
            return (*row_grads(ctx.needs_input_grad, dy, x, weight), None, None)


def placeholder(x: Tensor, weight: Tensor) -> Tensor:
    """A tensor of the output's shape and no storage of its own, to carry the gradient."""
    return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])


def row_grads(
    needed: tuple[bool, ...], dy: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of a row-parallel GEMM: all local, bias gets the whole sum of dy."""
    dy_MN = rows(dy)
    with instrument.computing("gemms", dy):
        dx = dy @ weight if needed[0] else None
        dweight = dy_MN.t() @ rows(x) if needed[1] else None
        dbias = dy_MN.sum(0) if needed[2] else None
    return dx, dweight, dbias


class Communicate(torch.autograd.Function):
    """Runs the op for its value; the gradient goes to the placeholder, nothing is saved."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, *args: Any) -> Tensor:
        ctx.count = len(args)
        return _gemm_all_reduce(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *([None] * ctx.count))


def _autograd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> Tensor:
    if needs_grad(x, weight, bias):
        _check(x, weight, bias, reduce_dtype)
        if not group_name:
            return gemm_act(x, weight, bias)
        held = _SaveForBackward.apply(x, weight, bias, group_name, layer)
        detached = (x.detach(), weight.detach(), None if bias is None else bias.detach())
        return Communicate.apply(held, *detached, group_name, reduce_dtype, chunks, layer)
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_all_reduce(x, weight, bias, group_name, reduce_dtype, chunks, layer)


_gemm_all_reduce = define(
    "gemm_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, str group_name, ScalarType? reduce_dtype=None, "
    "int? chunks=None, str layer='') -> Tensor",
    _run,
    _fake,
    autograd=_autograd,
)


def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    *,
    reduce_dtype: torch.dtype | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> Tensor:
    """``all_reduce(F.linear(x, weight)) + bias`` over the group: the row-parallel linear.

    Args:
        x: [..., K_r], this rank's part of the in features (K_r may be 0 and may differ).
        weight: [N, K_r]; bias: [N], the same on all ranks, added once, after the reduction.
        group_name: ``process_group.group_name``; ``""`` is the group of one.
        reduce_dtype: dtype of the partial sums on the wire; None: x's. ``torch.float32`` with
            bf16 inputs rounds once instead of once a rank (TP-33) and sends twice the bytes.
        chunks: number of row chunks; None: as :func:`plan_gemm_all_reduce` says.
        layer: the module that is served, for errors and traces.

    Returns:
        [..., N] of x's dtype, contiguous, the same bits on every rank.

    Collective over the group. Differentiable once; backward communicates nothing.

    Raises:
        ConfigError: shapes or dtypes that do not fit.
        CommunicationError: a rank is missing or late; names layer, operation, group and rank.
    """
    return _gemm_all_reduce(x, weight, bias, group_name, reduce_dtype, chunks, layer)
