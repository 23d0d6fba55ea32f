"""``all_gather_gemm``: rows are gathered while the GEMMs that read them begin with one's own.

    compute: [own rows][rows of rank+1][rows of rank+2]
    comm:    [from rank+1][from rank+2]

Equivalent to: ``x = all_gather(x, dim); [act(F.linear(x, w, b)) for w, b in pairs]``.
Backward re-gathers x beside the dX GEMMs, and reduce-scatters dX beside the dW GEMMs.
"""

# S rows of the gathered dimension, s_r of them on rank r, K in features, N_i out features

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.comm.collectives import all_gather, reduce_scatter
from tpkernels.errors import ConfigError
from tpkernels.library import check_gemm, define, needs_grad, rows
from tpkernels.ops.gemm_act import act_grad
from tpkernels.overlap.blocks import Cut, spread, together
from tpkernels.overlap.gathering import Gathering
from tpkernels.overlap.gemm_parts import (
    PLAIN,
    implementation_of,
    linear_act,
    linear_act_into,
    partial_rows,
    weight_gradient,
)
from tpkernels.overlap.plan import OverlapPlan, plan_sequence
from tpkernels.overlap.scattering import Scattering
from tpkernels.overlap.sequence_parts import part_sizes, with_size
from tpkernels.reference.activation import check_activation

_NAME = "all_gather_gemm"


def _checked(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
) -> list[int]:
    """The rows of every rank, of arguments that fit each other."""
    check_activation(act)
    if not weights or len(weights) != len(biases):
        raise ConfigError(
            f"{_NAME}: needs one bias (or None) for each weight and at least one weight, got "
            f"{len(weights)} weights and {len(biases)} biases"
        )
    held = part_sizes(_NAME, x, dim, sizes, group_name)
    gathered = x.new_empty(with_size(x, dim, sum(held)), device="meta")
    for weight, bias in zip(weights, biases, strict=True):
        shape = x if dim % x.dim() != x.dim() - 1 else gathered.new_empty(gathered.shape)
        if shape is x:
            check_gemm(_NAME, x, weight, bias)
        elif weight.dim() != 2 or weight.shape[1] != gathered.shape[-1]:
            raise ConfigError(
                f"{_NAME}: weight must be [N, K] with K={gathered.shape[-1]}, the gathered "
                f"features, got {tuple(weight.shape)}"
            )
    return held


def _plan(x: Tensor, held: list[int], dim: int, group_name: str, chunks: int | None) -> OverlapPlan:
    """How x [..., s_r, ..., K] is gathered; along the features, whole."""
    if group_name and dim % x.dim() == x.dim() - 1:
        return OverlapPlan("off", 1, "features are gathered whole")
    count = prod(with_size(x, dim, sum(held))[:-1])  # also of a rank that holds none of them
    row_bytes = x.shape[-1] * x.element_size()
    return plan_sequence(count, row_bytes, group_name, x.device, chunks)


def _run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = _checked(x, weights, biases, act, group_name, dim, sizes)
    pairs = list(zip(weights, biases, strict=True))
    with instrument.operation(_NAME, layer, group_name, x) as op:
        op.plan = plan = _plan(x, held, dim, group_name, chunks)
        op.implementation = implementation_of(x)
        if plan.strategy == "off":
            gathered = all_gather(x, held, dim, group_name)
            with instrument.computing("gemm", x):
                results = [list(linear_act(gathered, w, b, act, aux)) for w, b in pairs]
        else:
            gathering = Gathering(x, dim, held, group_name, plan.chunks)
            gathered = gathering.whole
            results = _empty_results(gathered, weights, aux)
            with gathering:
                for cut in gathering.cuts():
                    with instrument.computing("gemm", x):
                        _fill(gathering, cut, pairs, act, results)
    return [gathered, *(r[0] for r in results), *(r[1] for r in results if aux)]


def _empty_results(gathered: Tensor, weights: list[Tensor], aux: bool) -> list[list[Tensor]]:
    """For each weight the output [..., S, ..., N], and where ``aux`` the pre-activation."""
    return [
        [gathered.new_empty((*gathered.shape[:-1], w.shape[0])) for _ in range(1 + aux)]
        for w in weights
    ]


def _fill(
    gathering: Gathering,
    cut: Cut,
    pairs: list[tuple[Tensor, Tensor | None]],
    act: str,
    results: list[list[Tensor]],
) -> None:
    """The rows of ``cut`` in every result."""
    inputs = gathering.blocks.views(gathering.whole, cut)
    merged = together(inputs)
    for (weight, bias), result in zip(pairs, results, strict=True):
        places = [gathering.blocks.views(each, cut) for each in result]
        if len(merged) == len(inputs):
            for x_rows, *outs in zip(inputs, *places, strict=True):
                linear_act_into(x_rows, weight, bias, act, outs)
            continue
        for computed, views in zip(
            linear_act(merged[0], weight, bias, act, len(places) > 1), places, strict=True
        ):
            spread(computed, views)


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = _checked(x, weights, biases, act, group_name, dim, sizes)
    gathered = x.new_empty(with_size(x, dim, sum(held)))
    outputs = [gathered.new_empty((*gathered.shape[:-1], w.shape[0])) for w in weights]
    return [gathered, *outputs, *(torch.empty_like(y) for y in outputs if aux)]


# --- backward -------------------------------------------------------------------------------


def _backward_run(
    grads: list[Tensor],
    d_gathered: Tensor | None,
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    need_dx: bool,
    need_dw: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = part_sizes(_NAME, x, dim, sizes, group_name)
    with instrument.operation(f"{_NAME}.backward", layer, group_name, x) as op:
        op.implementation = PLAIN
        op.plan = plan = _plan(x, held, dim, group_name, chunks)
        dx, dws = x.new_empty(0), [x.new_empty(0) for _ in need_dw]
        if plan.strategy == "off":
            if need_dx:
                with instrument.computing("dx", x):
                    partial = _partial_dx(grads, d_gathered, weights)
                dx = reduce_scatter(partial, held, dim, group_name)
            if any(need_dw):
                gathered = rows(all_gather(x, held, dim, group_name))
                with instrument.computing("dw", x):
                    dws = [
                        torch.mm(rows(grad).t(), gathered) if needed else dw
                        for grad, dw, needed in zip(grads, dws, need_dw, strict=True)
                    ]
            return [dx, *dws]
        return _overlapped_backward(
            grads, d_gathered, x, weights, group_name, dim, held, need_dx, need_dw, plan.chunks
        )


def _partial_dx(grads: list[Tensor], d_gathered: Tensor | None, weights: list[Tensor]) -> Tensor:
    """[..., S, ..., K]: this rank's part of the gradient of the gathered x."""
    if d_gathered is not None:
        out = torch.empty_like(d_gathered, memory_format=torch.contiguous_format)
    else:
        out = grads[0].new_empty((*grads[0].shape[:-1], weights[0].shape[1]))
    partial_rows(rows(out), [rows(grad) for grad in grads], weights, d_gathered)
    return out


def _overlapped_backward(
    grads: list[Tensor],
    d_gathered: Tensor | None,
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    dim: int,
    held: list[int],
    need_dx: bool,
    need_dw: list[bool],
    chunks: int,
) -> list[Tensor]:
    """x is re-gathered while dX is computed; dX is scattered while dW is."""
    grads = [grad.contiguous() for grad in grads]
    d_gathered = None if d_gathered is None else d_gathered.contiguous()
    shape = with_size(x, dim, sum(held))
    dx, dws = x.new_empty(0), [x.new_empty(0) for _ in need_dw]
    with ExitStack() as stack:
        gathering = scattering = None
        if any(need_dw):
            gathering = stack.enter_context(Gathering(x, dim, held, group_name, chunks))
        if need_dx:
            scattering = stack.enter_context(Scattering(shape, dim, held, x, group_name, chunks))
            for cut, place in scattering.cuts():
                with instrument.computing("dx", x):
                    _fill_dx(scattering, cut, place, grads, d_gathered, weights)
        if gathering is not None:
            gathered = rows(gathering.wait_received())
            for index, (grad, needed) in enumerate(zip(grads, need_dw, strict=True)):
                if needed:
                    dws[index] = weight_gradient(rows(grad), gathered, chunks, scattering)
        if scattering is not None:
            dx = scattering.finish(torch.empty_like(x, memory_format=torch.contiguous_format))
    return [dx, *dws]


def _fill_dx(
    scattering: Scattering,
    cut: Cut,
    place: Tensor,
    grads: list[Tensor],
    d_gathered: Tensor | None,
    weights: list[Tensor],
) -> None:
    """The partial sums of ``cut`` in ``place`` [size, K]."""
    sources = [*grads, *([] if d_gathered is None else [d_gathered])]
    views = [together(scattering.blocks.views(each, cut)) for each in sources]
    start = 0
    for pieces in zip(*views, strict=True):
        end = start + pieces[0].shape[0]
        extra = None if d_gathered is None else pieces[-1]
        partial_rows(place[start:end], list(pieces[: len(grads)]), weights, extra)
        start = end


def _backward_fake(
    grads: list[Tensor],
    d_gathered: Tensor | None,
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    need_dx: bool,
    need_dw: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    contiguous = torch.contiguous_format
    return [
        torch.empty_like(x, memory_format=contiguous) if need_dx else x.new_empty(0),
        *(
            torch.empty_like(weight, memory_format=contiguous) if needed else x.new_empty(0)
            for weight, needed in zip(weights, need_dw, strict=True)
        ),
    ]


_all_gather_gemm_backward = define(
    "all_gather_gemm_backward",
    "(Tensor[] grads, Tensor? d_gathered, Tensor x, Tensor[] weights, str group_name, int dim, "
    "SymInt[]? sizes, bool need_dx, bool[] need_dw, int? chunks, str layer) -> Tensor[]",
    _backward_run,
    _backward_fake,
    autocast=False,
)


class _AllGatherGemm(torch.autograd.Function):
    """Saves this rank's rows of x, not the gathered ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        act: str,
        group_name: str,
        dim: int,
        sizes: list[int] | None,
        chunks: int | None,
        layer: str,
        *params: Tensor | None,
    ) -> Any:
        weights, biases = list(params[: len(params) // 2]), list(params[len(params) // 2 :])
        ctx.act, ctx.count = act, len(weights)
        ctx.where = (group_name, dim, sizes)
        ctx.options = (chunks, layer)
        ctx.set_materialize_grads(False)
        aux = act != "none"
        gathered, *results = _all_gather_gemm(
            x, weights, biases, act, aux, group_name, dim, sizes, chunks, layer
        )
        ctx.save_for_backward(x, *weights, *results[len(weights) :])  # type: ignore[arg-type]
        return (gathered, *results[: len(weights)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        count = ctx.count
        x, *rest = ctx.saved_tensors
        weights, pres = rest[:count], rest[count:]
        need_w = ctx.needs_input_grad[7 : 7 + count]
        need_b = ctx.needs_input_grad[7 + count :]
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        used = [i for i, dy in enumerate(dys) if dy is not None]
        if not used and d_gathered is None:  # the same on every rank: nothing downstream asked
            return (None, None, None, None, None, None, None, *dws, *dbs)
        dpres = [
            dy if ctx.act == "none" else act_grad(dy, pres[i], ctx.act)
            for i, dy in enumerate(dys)
            if dy is not None
        ]
        dx, *dw_used = _all_gather_gemm_backward(
            dpres,
            d_gathered,
            x,
            [weights[i] for i in used],
            *ctx.where,
            ctx.needs_input_grad[0],
            [need_w[i] for i in used],
            *ctx.options,
        )
        for i, dw, dpre in zip(used, dw_used, dpres, strict=True):
            dws[i] = dw if need_w[i] else None
            dbs[i] = rows(dpre).sum(0) if need_b[i] else None
        dx = dx if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, None, None, *dws, *dbs)


def _autograd(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    if needs_grad(x, *weights, *biases):
        _checked(x, weights, biases, act, group_name, dim, sizes)
        return list(
            _AllGatherGemm.apply(x, act, group_name, dim, sizes, chunks, layer, *weights, *biases)
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _all_gather_gemm(x, weights, biases, act, aux, group_name, dim, sizes, chunks, layer)


_all_gather_gemm = define(
    "all_gather_gemm",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, str act, bool aux, str group_name, int dim, "
    "SymInt[]? sizes, int? chunks, str layer) -> Tensor[]",
    _run,
    _fake,
    autograd=_autograd,
)


def all_gather_gemm(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    act: str = "none",
    group_name: str = "",
    *,
    dim: int = -2,
    sizes: list[int] | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> tuple[Tensor, list[Tensor]]:
    """(x gathered along ``dim``, ``[act(F.linear(x, w, b)) for w, b in zip(weights, biases)]``).

    Args:
        x: [..., s_r, ..., K], this rank's part of ``dim``.
        weights: [N_i, K] each, this rank's; biases: [N_i] or None each.
        act: as for ``gemm_act``.
        group_name: ``process_group.group_name``; ``""`` is the group of one.
        dim: the dimension that is gathered.
        sizes: s_r of every rank, the same list on all; None: all hold as many as this one.
        chunks: number of pieces each rank's rows are sent in; None: as the plan says.
        layer: the module that is served, for errors and traces.

    Returns:
        The gathered x [..., S, ..., K] and one [..., S, ..., N_i] a weight, contiguous.
        Differentiable once, both: backward reduce-scatters dX once, however many weights.

    Collective over the group, forward and backward.

    Raises:
        ConfigError: shapes, dtypes or sizes that do not fit.
        CommunicationError: a rank is missing or late; names layer, operation, group and rank.
    """
    biases = [None] * len(weights) if biases is None else biases
    gathered, *results = _all_gather_gemm(
        x, weights, biases, act, False, group_name, dim, sizes, chunks, layer
    )
    return gathered, results[: len(weights)]
