"""The column-parallel side: local GEMMs forward, one all-reduce of dX beside the dW GEMMs backward.

    compute: [dX GEMMs][dW GEMM][dW GEMM]
    comm:              [all-reduce dX   ]

Several weights that share one input (Q, K and V; gate and up) are one op: their dX are summed
before the wire, so that backward has one all-reduce however many weights there are.
"""

# M tokens, K in features, N_r this rank's out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.comm.direct import sum_in_place
from tpkernels.comm.row_sums import row_sums
from tpkernels.errors import ConfigError
from tpkernels.library import check_gemm, define, needs_grad, rows
from tpkernels.ops.gemm_act import act_grad, gemm_act, gemm_act_aux
from tpkernels.overlap.gemm_parts import (
    PLAIN,
    Moving,
    implementation_of,
    partial_rows,
    weight_gradient,
)
from tpkernels.overlap.plan import plan_column_backward, rising_cut
from tpkernels.reference.activation import check_activation

# --- column_backward ------------------------------------------------------------------------


def _backward_run(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool,
    need_dw: list[bool],
    beside_grads: list[Tensor],
    beside_inputs: list[Tensor],
    layer: str,
) -> list[Tensor]:
    grads_MN, x_MK = [rows(grad) for grad in grads], rows(x)
    pairs = [
        *((grad, x_MK) if need else None for grad, need in zip(grads_MN, need_dw, strict=True)),
        *((rows(g), rows(i)) for g, i in zip(beside_grads, beside_inputs, strict=True)),
    ]
    row_bytes = x.shape[-1] * x.element_size()
    with instrument.operation("column_backward", layer, group_name, x) as op:
        op.implementation = PLAIN
        if not need_dx:
            return [x.new_empty(0), *_weight_gradients(pairs, x, 1, None)]
        op.plan = plan = plan_column_backward(x_MK.shape[0], row_bytes, group_name, x.device)
        dx = x.new_empty(x.shape)
        dx_MK = rows(dx)
        if plan.strategy == "off" or not dx.numel():
            with instrument.computing("dx", x):
                partial_rows(dx_MK, grads_MN, weights)
            sum_in_place(dx_MK, group_name)
            return [dx, *_weight_gradients(pairs, x, 1, None)]
        with row_sums(dx_MK, group_name) as sums:
            for start, end in rising_cut(dx_MK.shape[0], plan.chunks):
                with instrument.computing("dx", x):
                    partial_rows(dx_MK[start:end], [g[start:end] for g in grads_MN], weights)
                sums.push(start, end)
            dws = _weight_gradients(pairs, x, plan.chunks, sums)
        return [dx, *dws]


def _weight_gradients(
    pairs: list[tuple[Tensor, Tensor] | None], like: Tensor, chunks: int, moving: Moving | None
) -> list[Tensor]:
    """``grad.t() @ input`` of each pair; nothing of None."""
    return [
        like.new_empty(0) if pair is None else weight_gradient(*pair, chunks, moving)
        for pair in pairs
    ]


def _backward_fake(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool,
    need_dw: list[bool],
    beside_grads: list[Tensor],
    beside_inputs: list[Tensor],
    layer: str,
) -> list[Tensor]:
    contiguous = torch.contiguous_format
    dx = torch.empty_like(x, memory_format=contiguous) if need_dx else x.new_empty(0)
    return [
        dx,
        *(
            torch.empty_like(weight, memory_format=contiguous) if needed else x.new_empty(0)
            for weight, needed in zip(weights, need_dw, strict=True)
        ),
        *(
            grad.new_empty((grad.shape[-1], given.shape[-1]))
            for grad, given in zip(beside_grads, beside_inputs, strict=True)
        ),
    ]


_column_backward = define(
    "column_backward",
    "(Tensor[] grads, Tensor x, Tensor[] weights, str group_name, bool need_dx, "
    "bool[] need_dw, Tensor[] beside_grads, Tensor[] beside_inputs, str layer) -> Tensor[]",
    _backward_run,
    _backward_fake,
    autocast=False,
)


def column_backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool = True,
    need_dw: list[bool] | None = None,
    *,
    beside: list[tuple[Tensor, Tensor]] | None = None,
    layer: str = "",
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dX, [dW_i]) of ``[F.linear(x, w) for w in weights]`` with dX summed over the group.

    grads_i [..., N_i], x [..., K], weights_i [N_i, K] -> dX [..., K], dW_i [N_i, K]. The
    all-reduce of dX runs beside the dW GEMMs. What is not needed is None.
    ``beside``: more weight gradients to compute meanwhile, of pairs grad [..., N], input [..., F]:
    [N, F] each, after the dW_i. ``layer``: the module that is served, for errors and traces.
    """
    needed = [True] * len(weights) if need_dw is None else need_dw
    more = beside or []
    dx, *dws = _column_backward(
        grads,
        x,
        weights,
        group_name,
        need_dx,
        needed,
        [g for g, _ in more],
        [i for _, i in more],
        layer,
    )
    wanted = [*needed, *([True] * len(more))]
    return (
        dx if need_dx else None,
        [dw if want else None for dw, want in zip(dws, wanted, strict=True)],
    )


# --- column_gemm_act ------------------------------------------------------------------------


def _check(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], act: str) -> None:
    check_activation(act)
    if not weights or len(weights) != len(biases):
        raise ConfigError(
            f"column_gemm_act: needs one bias (or None) for each weight and at least one weight, "
            f"got {len(weights)} weights and {len(biases)} biases"
        )
    for weight, bias in zip(weights, biases, strict=True):
        check_gemm("column_gemm_act", x, weight, bias)


def _run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    group_name: str,
    layer: str = "",
) -> list[Tensor]:
    _check(x, weights, biases, act)
    with (
        instrument.operation("column_gemm_act", layer, group_name, x) as op,
        instrument.computing("gemm", x),
    ):
        op.implementation = implementation_of(x)
        return [gemm_act(x, w, b, act) for w, b in zip(weights, biases, strict=True)]


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    group_name: str,
    layer: str = "",
) -> list[Tensor]:
    _check(x, weights, biases, act)
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, act: str, group_name: str, layer: str, *params: Tensor | None
    ) -> Any:
        weights, biases = params[: len(params) // 2], params[len(params) // 2 :]
        ctx.act, ctx.group_name, ctx.layer, ctx.count = act, group_name, layer, len(weights)
        ctx.set_materialize_grads(False)
        pairs = list(zip(weights, biases, strict=True))
        with (
            instrument.operation("column_gemm_act", layer, group_name, x) as op,
            instrument.computing("gemm", x),
        ):
            op.implementation = implementation_of(x)
            if act == "none":
                ctx.save_for_backward(x, *weights)
                return tuple(gemm_act(x, w, b) for w, b in pairs)  # type: ignore[arg-type]
            outputs = [gemm_act_aux(x, w, b, act) for w, b in pairs]  # type: ignore[arg-type]
        ctx.save_for_backward(x, *weights, *(pre for _, pre in outputs))
        return tuple(y for y, _ in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        count = ctx.count
        x, *rest = ctx.saved_tensors
        weights, pres = rest[:count], rest[count:]
        need_w = ctx.needs_input_grad[4 : 4 + count]
        need_b = ctx.needs_input_grad[4 + count :]
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        used = [i for i, dy in enumerate(dys) if dy is not None]
        if not used:  # the same on every rank: nothing downstream asked
            return None, None, None, None, *dws, *dbs
        dpres = [
            dy if ctx.act == "none" else act_grad(dy, pres[i], ctx.act)
            for i, dy in enumerate(dys)
            if dy is not None
        ]
        dx, dw_used = column_backward(
            dpres,
            x,
            [weights[i] for i in used],
            ctx.group_name,
            ctx.needs_input_grad[0],
            [need_w[i] for i in used],
            layer=ctx.layer,
        )
        for i, dw, dpre in zip(used, dw_used, dpres, strict=True):
            dws[i] = dw
            dbs[i] = rows(dpre).sum(0) if need_b[i] else None
        return dx, None, None, None, *dws, *dbs


def _autograd(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    group_name: str,
    layer: str = "",
) -> list[Tensor]:
    if needs_grad(x, *weights, *biases):
        _check(x, weights, biases, act)
        return list(_Column.apply(x, act, group_name, layer, *weights, *biases))
    with torch._C._AutoDispatchBelowAutograd():
        return _column_gemm_act(x, weights, biases, act, group_name, layer)


_column_gemm_act = define(
    "column_gemm_act",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, str act, str group_name, "
    "str layer='') -> Tensor[]",
    _run,
    _fake,
    autograd=_autograd,
)


def column_gemm_act(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str = "none",
    group_name: str = "",
    *,
    layer: str = "",
) -> list[Tensor]:
    """``[act(F.linear(copy_to_region(x), w, b)) for w, b in zip(weights, biases)]``.

    x [..., K], the same on all ranks; weights [N_i, K] and biases [N_i] or None, this rank's
    parts -> tensors [..., N_i]. Forward communicates nothing; backward all-reduces dX once,
    beside the dW GEMMs. Differentiable once. ``layer``: the module that is served, for errors and
    traces.
    """
    return _column_gemm_act(x, weights, biases, act, group_name, layer)
