"""``mlp``: the whole tensor-parallel MLP as one op, so that its backward is fused too.

Equivalent to (R ranks, column-split up and gate, row-split down):

    h = act(F.linear(x, w_up, b_up))                          # plain
    h = act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)   # gated
    y = all_reduce(F.linear(h, w_down)) + b_down

Backward: ``gemm_dact_dbias`` (or ``gemm_dglu``) gives the gradient at the first GEMM in one op, and
dX's all-reduce runs beside all dW GEMMs, the down projection's too.
"""

# M tokens, K d_model, F_r this rank's part of d_ff

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.errors import ConfigError
from tpkernels.library import (
    check_dtypes,
    check_gemm,
    check_same_shape,
    define,
    needs_grad,
    rows,
)
from tpkernels.ops.gemm_act import gemm_act, gemm_act_aux, gemm_dact, gemm_dact_dbias
from tpkernels.ops.gemm_glu import gemm_dglu, gemm_glu, gemm_glu_aux
from tpkernels.overlap import fused
from tpkernels.overlap.column import column_backward
from tpkernels.overlap.gemm_all_reduce import (
    Communicate,
    gemm_all_reduce,
    placeholder,
)
from tpkernels.overlap.gemm_parts import implementation_of
from tpkernels.reference.activation import check_activation


def _check(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
) -> None:
    check_activation(act)
    check_gemm("mlp", x, w_up, b_up, weight_name="w_up", bias_name="b_up")
    if w_gate is not None:
        check_same_shape("mlp", w_up=w_up, w_gate=w_gate)
        check_gemm("mlp", x, w_gate, b_gate, weight_name="w_gate", bias_name="b_gate")
    elif b_gate is not None:
        raise ConfigError("mlp: b_gate was given without w_gate. Fix: give both or neither")
    if w_down.dim() != 2 or w_down.shape[1] != w_up.shape[0]:
        raise ConfigError(
            f"mlp: w_down must be [N, F] with F={w_up.shape[0]}, the rows of w_up "
            f"{tuple(w_up.shape)}, got {tuple(w_down.shape)}"
        )
    if b_down is not None and tuple(b_down.shape) != (w_down.shape[0],):
        raise ConfigError(
            f"mlp: b_down must be [N] with N={w_down.shape[0]}, got {tuple(b_down.shape)}"
        )
    check_dtypes("mlp", x=x, w_down=w_down, b_down=b_down)


def _run(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    layer: str = "",
) -> Tensor:
    _check(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act)
    if fused.chosen(x, (w_up, w_gate, w_down), group_name, reduce_dtype):
        return _fused(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act, group_name, layer)
    with instrument.operation("mlp", layer, group_name, x) as op, instrument.computing("gemm", x):
        op.implementation = implementation_of(x)
        if w_gate is None:
            h = gemm_act(x, w_up, b_up, act)
        else:
            h = gemm_glu(x, w_gate, w_up, b_gate, b_up, act)
    return gemm_all_reduce(h, w_down, b_down, group_name, reduce_dtype=reduce_dtype, layer=layer)


def _fused(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
    group_name: str,
    layer: str,
) -> Tensor:
    with instrument.operation("mlp", layer, group_name, x) as op:
        op.plan, op.implementation = "fused", "cpu"
        with instrument.computing("fused", x):
            return fused.mlp_fused(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act, group_name)


def _fake(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    layer: str = "",
) -> Tensor:
    _check(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act)
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


def _gradient_at_up(
    dy: Tensor, w_down: Tensor, pre: Tensor, act: str, with_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient at the up GEMM's output, and its bias's where that is wanted."""
    if with_bias:
        return gemm_dact_dbias(dy, w_down, pre, act)
    return gemm_dact(dy, w_down, pre, act), None


class _UpAndSave(torch.autograd.Function):
    """The first half, with everything backward needs; returns (placeholder of y, h).

    The down GEMM and its all-reduce follow in :class:`Communicate`, which saves nothing (TP-51).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_up: Tensor,
        b_up: Tensor | None,
        w_gate: Tensor | None,
        b_gate: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
        act: str,
        group_name: str,
        layer: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.act, ctx.group_name, ctx.layer = act, group_name, layer
        ctx.gated = w_gate is not None
        with (
            instrument.operation("mlp", layer, group_name, x) as op,
            instrument.computing("gemm", x),
        ):
            op.implementation = implementation_of(x)
            if w_gate is None:
                h, pre = gemm_act_aux(x, w_up, b_up, act)
                ctx.save_for_backward(x, w_down, h, w_up, pre)
            else:
                h, gate, up = gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)
                ctx.save_for_backward(x, w_down, h, w_up, up, w_gate, gate)
        ctx.mark_non_differentiable(h)
        return placeholder(h, w_down), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        with instrument.operation("mlp.backward", ctx.layer, ctx.group_name, dy) as op:
            op.implementation = implementation_of(dy)
            return _UpAndSave._gradients(ctx, dy)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, w_down, h, w_up, *rest = ctx.saved_tensors
        need = ctx.needs_input_grad
        db_down = rows(dy).sum(0) if need[6] else None
        with instrument.computing("gemm", dy):
            if ctx.gated:
                up, w_gate, gate = rest
                d_gate, d_up = gemm_dglu(dy, w_down, gate, up, ctx.act)
                dpres, weights = [d_up, d_gate], [w_up, w_gate]
            else:
                d_up, db_up = _gradient_at_up(dy, w_down, rest[0], ctx.act, need[2])
                dpres, weights = [d_up], [w_up]
        # The down weight's gradient needs nothing that is on the wire: more to compute beside it.
        dx, dws = column_backward(
            dpres,
            x,
            weights,
            ctx.group_name,
            need[0],
            [need[1], need[3]][: len(weights)],
            beside=[(dy, h)] if need[5] else [],
            layer=ctx.layer,
        )
        dw_down = dws[-1] if need[5] else None
        if not ctx.gated:
            return dx, dws[0], db_up, None, None, dw_down, db_down, None, None, None
        db_up, db_gate = (
            rows(dpre).sum(0) if needed else None
            for dpre, needed in zip(dpres, (need[2], need[4]), strict=True)
        )
        return dx, dws[0], db_up, dws[1], db_gate, dw_down, db_down, None, None, None


def _autograd(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
    layer: str = "",
) -> Tensor:
    tensors = (x, w_up, b_up, w_gate, b_gate, w_down, b_down)
    if needs_grad(*tensors):
        _check(*tensors, act)
        held, h = _UpAndSave.apply(*tensors, act, group_name, layer)
        bias = None if b_down is None else b_down.detach()
        return Communicate.apply(
            held, h.detach(), w_down.detach(), bias, group_name, reduce_dtype, None, layer
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _mlp(*tensors, act, group_name, reduce_dtype, layer)


_mlp = define(
    "mlp",
    "(Tensor x, Tensor w_up, Tensor? b_up, Tensor? w_gate, Tensor? b_gate, Tensor w_down, "
    "Tensor? b_down, str act, str group_name, ScalarType? reduce_dtype=None, str layer='')"
    " -> Tensor",
    _run,
    _fake,
    autograd=_autograd,
)


def mlp(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    *,
    act: str,
    group_name: str = "",
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    layer: str = "",
) -> Tensor:
    """The tensor-parallel MLP: one all-reduce forward, one backward.

    Args:
        x: [..., K], the same on all ranks.
        w_up, w_gate: [F_r, K]; b_up, b_gate: [F_r] or None. ``w_gate`` makes it gated:
            ``act(gate) * up``.
        w_down: [N, F_r]; b_down: [N] or None, the same on all ranks, added once.
        act, group_name, reduce_dtype, layer: as in ``gemm_act`` and ``gemm_all_reduce``.

    Returns:
        [..., N], the same on all ranks. Differentiable once.
    """
    if _nothing_between(x) and fused.chosen(x, (w_up, w_gate, w_down), group_name, reduce_dtype):
        return _fused(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act, group_name, layer)
    return _mlp(x, w_up, b_up, w_gate, b_gate, w_down, b_down, act, group_name, reduce_dtype, layer)


def _nothing_between(x: Tensor) -> bool:
    """Whether the op would come to its kernel unchanged: then the way through it is saved."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or type(x) is not Tensor
    )
