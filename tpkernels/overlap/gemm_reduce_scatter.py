"""``gemm_reduce_scatter``: partial sums leave for their owners while the GEMM goes on.

    compute: [rows of rank+1][rows of rank+2][own rows][+ what came]
    comm:                    [to rank+1     ][to rank+2]

Equivalent to: ``reduce_scatter(F.linear(x, weight), dim) + bias``. Backward gathers dY beside the
dX GEMMs, one's own rows first.
"""

# S rows of the scattered dimension, s_r of them for rank r, K_r in features here, N out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.comm.collectives import all_gather, reduce_scatter
from tpkernels.errors import ConfigError
from tpkernels.library import DTYPES, check_gemm, define, needs_grad, rows
from tpkernels.overlap.blocks import Cut, spread, together
from tpkernels.overlap.gathering import Gathering
from tpkernels.overlap.gemm_parts import PLAIN
from tpkernels.overlap.plan import OverlapPlan, plan_sequence
from tpkernels.overlap.scattering import Scattering
from tpkernels.overlap.sequence_parts import place_in, whole_sizes, with_size
from tpkernels.overlap.signaled import gemm_reduce_scatter_signaled, scatter_refusal

_NAME = "gemm_reduce_scatter"


def _checked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    reduce_dtype: torch.dtype | None,
) -> list[int]:
    """The rows of every rank, of arguments that fit each other."""
    check_gemm(_NAME, x, weight, bias)
    if reduce_dtype is not None and reduce_dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise ConfigError(
            f"{_NAME}: reduce_dtype={reduce_dtype} cannot hold the sums; allowed: None, {allowed}"
        )
    whole = x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")
    return whole_sizes(_NAME, whole, dim, sizes, group_name)


def _is_last(x: Tensor, dim: int) -> bool:
    return dim % x.dim() == x.dim() - 1


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    reduce_dtype: torch.dtype | None,
    chunks: int | None,
    layer: str,
) -> Tensor:
    held = _checked(x, weight, bias, group_name, dim, sizes, reduce_dtype)
    own = held[place_in(group_name)[1]]
    dtype, wire = x.dtype, reduce_dtype or x.dtype
    shape = [*x.shape[:-1], weight.shape[0]]
    with instrument.operation(_NAME, layer, group_name, x) as op:
        op.implementation = PLAIN
        refused = _signaled_refusal(x, dim, held)
        op.plan = plan = _plan(x, weight.shape[0], dim, wire, group_name, chunks, refused)
        if plan.strategy == "off":
            return _one_after_the_other(x, weight, bias, group_name, dim, held, wire)
        whole = x.new_empty(shape, device="meta")
        out = x.new_empty(with_size(whole, dim, own), dtype=wire)
        if plan.strategy == "signaled":
            gemm_reduce_scatter_signaled(rows(x), weight, bias, rows(out), held, group_name)
            return out.to(dtype)
        x = x.to(wire).contiguous()
        weight = weight.to(wire)
        scattering = Scattering(shape, dim, held, x, group_name, plan.chunks)
        with scattering:
            for cut, place in scattering.cuts():
                with instrument.computing("gemm", x):
                    _fill(scattering, cut, place, x, weight)
            return scattering.finish(out, bias).to(dtype)


def _signaled_refusal(x: Tensor, dim: int, held: list[int]) -> str | None:
    """Why tiles cannot be counted for each rank's rows, or None."""
    if dim % x.dim() or x.dim() != 2:
        return f"it scatters rows of a matrix, not dimension {dim} of {tuple(x.shape)}"
    return scatter_refusal(held)


def _plan(
    x: Tensor,
    columns: int,
    dim: int,
    wire: torch.dtype,
    group_name: str,
    chunks: int | None,
    signaled: str | None = "its gradient gathers",
) -> OverlapPlan:
    if group_name and _is_last(x, dim):
        return OverlapPlan("off", 1, "features are scattered whole")
    row_bytes = columns * wire.itemsize
    count = rows(x).shape[0]
    return plan_sequence(count, row_bytes, group_name, x.device, chunks, signaled=signaled)


def _one_after_the_other(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    dim: int,
    held: list[int],
    wire: torch.dtype,
) -> Tensor:
    with instrument.computing("gemm", x):
        partial = x.to(wire) @ weight.t().to(wire)
    out = reduce_scatter(partial, held, dim, group_name)
    if bias is not None:  # once, after the reduction
        out += bias.split(held)[place_in(group_name)[1]] if _is_last(x, dim) else bias
    return out.to(x.dtype)


def _fill(scattering: Scattering, cut: Cut, place: Tensor, x: Tensor, weight: Tensor) -> None:
    """The partial sums of ``cut`` in ``place`` [size, N]."""
    start = 0
    for x_rows in together(scattering.blocks.views(x, cut)):
        end = start + x_rows.shape[0]
        torch.mm(x_rows, weight.t(), out=place[start:end])
        start = end


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    reduce_dtype: torch.dtype | None,
    chunks: int | None,
    layer: str,
) -> Tensor:
    held = _checked(x, weight, bias, group_name, dim, sizes, reduce_dtype)
    whole = x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")
    return x.new_empty(with_size(whole, dim, held[place_in(group_name)[1]]))


# --- backward -------------------------------------------------------------------------------


def _backward_run(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    group_name: str,
    dim: int,
    sizes: list[int],
    needed: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    with instrument.operation(f"{_NAME}.backward", layer, group_name, x) as op:
        op.implementation = PLAIN
        op.plan = plan = _plan(x, weight.shape[0], dim, dy.dtype, group_name, chunks)
        if plan.strategy != "chunked":
            whole = all_gather(dy, sizes, dim, group_name)
            with instrument.computing("dx", x):
                dx = whole @ weight if needed[0] else x.new_empty(0)
        else:
            gathering = Gathering(dy, dim, sizes, group_name, plan.chunks)
            whole, dx = gathering.whole, x.new_empty(x.shape if needed[0] else (0,))
            with gathering:
                for cut in gathering.cuts() if needed[0] else ():
                    with instrument.computing("dx", x):
                        _fill_dx(gathering, cut, weight, dx)
        with instrument.computing("dw", x):
            dweight = rows(whole).t() @ rows(x) if needed[1] else x.new_empty(0)
            dbias = rows(whole).sum(0) if needed[2] else x.new_empty(0)
    return [dx, dweight, dbias]


def _fill_dx(gathering: Gathering, cut: Cut, weight: Tensor, dx: Tensor) -> None:
    """The rows of ``cut`` in dX."""
    inputs = gathering.blocks.views(gathering.whole, cut)
    places = gathering.blocks.views(dx, cut)
    merged = together(inputs)
    if len(merged) == len(inputs):
        for dy_rows, place in zip(inputs, places, strict=True):
            torch.mm(dy_rows, weight, out=place)
    else:
        spread(merged[0] @ weight, places)


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    group_name: str,
    dim: int,
    sizes: list[int],
    needed: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return [x.new_empty(s if need else (0,)) for s, need in zip(shapes, needed, strict=True)]


_gemm_reduce_scatter_backward = define(
    "gemm_reduce_scatter_backward",
    "(Tensor dy, Tensor x, Tensor weight, str group_name, int dim, SymInt[] sizes, bool[] needed, "
    "int? chunks, str layer) -> Tensor[]",
    _backward_run,
    _backward_fake,
    autocast=False,
)


class _SaveForBackward(torch.autograd.Function):
    """Holds what backward needs; returns a placeholder of the output's shape (TP-51)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], *where: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.where = where
        return x.new_empty(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        group_name, dim, sizes, chunks, layer = ctx.where
        needed = list(ctx.needs_input_grad[:3])
        grads = _gemm_reduce_scatter_backward(
            dy, x, weight, group_name, dim, sizes, needed, chunks, layer
        )
        given = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
        return (*given, *([None] * (1 + len(ctx.where))))


class _Communicate(torch.autograd.Function):
    """Runs the op for its value; the gradient goes to the placeholder, nothing is saved."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, *args: Any) -> Tensor:
        ctx.count = len(args)
        return _gemm_reduce_scatter(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *([None] * ctx.count))


def _autograd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    reduce_dtype: torch.dtype | None,
    chunks: int | None,
    layer: str,
) -> Tensor:
    options = (reduce_dtype, chunks, layer)
    if needs_grad(x, weight, bias):
        held = _checked(x, weight, bias, group_name, dim, sizes, reduce_dtype)
        whole = x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")
        shape = with_size(whole, dim, held[place_in(group_name)[1]])
        kept = _SaveForBackward.apply(x, weight, bias, shape, group_name, dim, held, chunks, layer)
        detached = (x.detach(), weight.detach(), None if bias is None else bias.detach())
        return _Communicate.apply(kept, *detached, group_name, dim, held, *options)
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_reduce_scatter(x, weight, bias, group_name, dim, sizes, *options)


_gemm_reduce_scatter = define(
    "gemm_reduce_scatter",
    "(Tensor x, Tensor weight, Tensor? bias, str group_name, int dim, SymInt[]? sizes, "
    "ScalarType? reduce_dtype, int? chunks, str layer) -> Tensor",
    _run,
    _fake,
    autograd=_autograd,
)


def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group_name: str = "",
    *,
    dim: int = -2,
    sizes: list[int] | None = None,
    reduce_dtype: torch.dtype | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> Tensor:
    """``reduce_scatter(F.linear(x, weight), dim) + bias``: the row-parallel linear onto shards.

    Args:
        x: [..., S, ..., K_r], all rows, this rank's part of the in features.
        weight: [N, K_r]; bias: [N], the same on all ranks, added once, after the reduction.
        group_name: ``process_group.group_name``; ``""`` is the group of one.
        dim: the dimension of the output that is scattered.
        sizes: rows that every rank keeps, the same list on all; None: as even as can be
            (``sequence_sizes``).
        reduce_dtype: dtype of the partial sums on the wire; None: x's. In chunks, sums are added
            in fp32 at least, in rank order, and rounded once; whole, as the backend adds them.
        chunks: number of pieces each rank's rows are sent in; None: as the plan says.
        layer: the module that is served, for errors and traces.

    Returns:
        [..., s_r, ..., N] of x's dtype, contiguous. Differentiable once: backward gathers dY; the
        bias's gradient is whole on every rank.

    Collective over the group, forward and backward.

    Raises:
        ConfigError: shapes, dtypes or sizes that do not fit.
        CommunicationError: a rank is missing or late; names layer, operation, group and rank.
    """
    return _gemm_reduce_scatter(
        x, weight, bias, group_name, dim, sizes, reduce_dtype, chunks, layer
    )
