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
from tpkernels.comm.collectives import all_reduce_async
from tpkernels.errors import ConfigError
from tpkernels.library import check_gemm, define, needs_grad, rows
from tpkernels.ops.gemm_act import act_grad, gemm_act, gemm_act_aux
from tpkernels.reference.activation import check_activation

# --- column_backward ------------------------------------------------------------------------


def _backward_run(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool,
    need_dw: list[bool],
    layer: str = "",
) -> list[Tensor]:
    with instrument.operation("column_backward", layer, group_name, x):
        return _gradients([rows(grad) for grad in grads], x, weights, group_name, need_dx, need_dw)


def _gradients(
    grads_MN: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool,
    need_dw: list[bool],
) -> list[Tensor]:
    x_MK = rows(x)
    dx, pending = x.new_empty(0), None
    if need_dx:
        with instrument.computing("dx", x):
            dx = torch.mm(grads_MN[0], weights[0])
            for grad_MN, weight in zip(grads_MN[1:], weights[1:], strict=True):
                dx.addmm_(grad_MN, weight)
        pending = all_reduce_async(dx, group_name)
    try:
        with instrument.computing("dw", x):
            dws = [
                torch.mm(grad_MN.t(), x_MK) if needed else x.new_empty(0)
                for grad_MN, needed in zip(grads_MN, need_dw, strict=True)
            ]
    finally:
        if pending is not None:
            pending.wait()
    return [dx.view(x.shape) if need_dx else dx, *dws]


def _backward_fake(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    need_dx: bool,
    need_dw: list[bool],
    layer: str = "",
) -> list[Tensor]:
    contiguous = torch.contiguous_format
    dx = torch.empty_like(x, memory_format=contiguous) if need_dx else x.new_empty(0)
    return [
        dx,
        *(
            torch.empty_like(weight, memory_format=contiguous) if needed else x.new_empty(0)
            for weight, needed in zip(weights, need_dw, strict=True)
        ),
    ]


_column_backward = define(
    "column_backward",
    "(Tensor[] grads, Tensor x, Tensor[] weights, str group_name, bool need_dx, "
    "bool[] need_dw, "
    "str layer='') -> Tensor[]",
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
    layer: str = "",
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dX, [dW_i]) of ``[F.linear(x, w) for w in weights]`` with dX summed over the group.

    grads_i [..., N_i], x [..., K], weights_i [N_i, K] -> dX [..., K], dW_i [N_i, K]. The
    all-reduce of dX runs beside the dW GEMMs. What is not needed is None.
    ``layer``: the module that is served, for errors and traces.
    """
    needed = [True] * len(weights) if need_dw is None else need_dw
    dx, *dws = _column_backward(grads, x, weights, group_name, need_dx, needed, layer)
    return (
        dx if need_dx else None,
        [dw if need else None for dw, need in zip(dws, needed, strict=True)],
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
        instrument.operation("column_gemm_act", layer, group_name, x),
        instrument.computing("gemm", x),
    ):
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
            instrument.operation("column_gemm_act", layer, group_name, x),
            instrument.computing("gemm", x),
        ):
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
            ctx.layer,
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
