"""``gemm_glu``: the two GEMMs of a gated MLP with ``act(gate) * up`` in the epilogue."""

# M tokens (any leading dimensions), K in features, N out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.library import define, needs_grad, vector_jacobian
from tpkernels.ops import choice
from tpkernels.ops.checks import check_gemm_dglu, check_gemm_glu, check_glu_grad
from tpkernels.ops.gemm_act import gemm_grads

_SIGNATURE = "(Tensor x, Tensor w_gate, Tensor w_up, Tensor? b_gate, Tensor? b_up, str act) -> "


# --- gemm_glu -------------------------------------------------------------------------------


def _gemm_glu_reference(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> Tensor:
    choice.require_servable(x.device.type)
    check_gemm_glu("gemm_glu", x, w_gate, w_up, b_gate, b_up, act)
    return reference.gemm_glu(x, w_gate, w_up, b_gate, b_up, act)


def _gemm_glu_fake(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> Tensor:
    check_gemm_glu("gemm_glu", x, w_gate, w_up, b_gate, b_up, act)
    return x.new_empty((*x.shape[:-1], w_gate.shape[0]))


def _gemm_glu_autograd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> Tensor:
    if needs_grad(x, w_gate, w_up, b_gate, b_up):  # only then are gate and up written
        return _gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_glu(x, w_gate, w_up, b_gate, b_up, act)


_gemm_glu = define(
    "gemm_glu",
    _SIGNATURE + "Tensor",
    _gemm_glu_reference,
    _gemm_glu_fake,
    autograd=_gemm_glu_autograd,
)


# --- gemm_glu_aux ---------------------------------------------------------------------------


def _gemm_glu_aux_reference(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    choice.require_servable(x.device.type)
    check_gemm_glu("gemm_glu_aux", x, w_gate, w_up, b_gate, b_up, act)
    return reference.gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)


def _gemm_glu_aux_fake(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    y = _gemm_glu_fake(x, w_gate, w_up, b_gate, b_up, act)
    return y, torch.empty_like(y), torch.empty_like(y)


def _gemm_glu_aux_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_gate, w_up, _, _, ctx.act = inputs
    ctx.save_for_backward(x, w_gate, w_up, output[1], output[2])
    ctx.set_materialize_grads(False)


def _gemm_glu_aux_backward(
    ctx: Any, dy: Tensor | None, d_gate: Tensor | None, d_up: Tensor | None
) -> tuple[Any, ...]:
    x, w_gate, w_up, gate, up = ctx.saved_tensors
    if dy is not None:
        from_y = glu_grad(dy, gate, up, ctx.act)
        d_gate = from_y[0] if d_gate is None else d_gate + from_y[0]
        d_up = from_y[1] if d_up is None else d_up + from_y[1]
    need_x, need_wg, need_wu, need_bg, need_bu, _ = ctx.needs_input_grad
    dx_gate, dw_gate, db_gate = gemm_grads((need_x, need_wg, need_bg), d_gate, x, w_gate)
    dx_up, dw_up, db_up = gemm_grads((need_x, need_wu, need_bu), d_up, x, w_up)
    dx = dx_up if dx_gate is None else dx_gate if dx_up is None else dx_gate + dx_up
    return dx, dw_gate, dw_up, db_gate, db_up, None


_gemm_glu_aux = define(
    "gemm_glu_aux",
    _SIGNATURE + "(Tensor, Tensor, Tensor)",
    _gemm_glu_aux_reference,
    _gemm_glu_aux_fake,
    backward=_gemm_glu_aux_backward,
    setup_context=_gemm_glu_aux_setup,
)


# --- glu_grad -------------------------------------------------------------------------------


def _glu_grad_reference(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    choice.require_servable(dy.device.type)
    check_glu_grad(dy, gate, up, act)
    return reference.glu_grad(dy, gate, up, act)


def _glu_grad_fake(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    check_glu_grad(dy, gate, up, act)
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(gate, memory_format=contiguous),
        torch.empty_like(up, memory_format=contiguous),
    )


def _glu_grad_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dy, gate, up, ctx.act = inputs
    ctx.save_for_backward(dy, gate, up)


def _glu_grad_backward(ctx: Any, grad_gate: Tensor, grad_up: Tensor) -> tuple[Any, ...]:
    grads = vector_jacobian(
        lambda dy, gate, up: reference.glu_grad(dy, gate, up, ctx.act),
        ctx.saved_tensors,
        (grad_gate, grad_up),
    )
    return (*grads, None)


_glu_grad = define(
    "glu_grad",
    "(Tensor dy, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)",
    _glu_grad_reference,
    _glu_grad_fake,
    backward=_glu_grad_backward,
    setup_context=_glu_grad_setup,
)


# --- gemm_dglu ------------------------------------------------------------------------------


def _gemm_dglu_reference(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    choice.require_servable(dy.device.type)
    check_gemm_dglu(dy, weight, gate, up, act)
    return reference.gemm_dglu(dy, weight, gate, up, act)


def _gemm_dglu_fake(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    check_gemm_dglu(dy, weight, gate, up, act)
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(gate, memory_format=contiguous),
        torch.empty_like(up, memory_format=contiguous),
    )


def _gemm_dglu_autograd(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    if needs_grad(dy, weight, gate, up):  # a second derivative: the unfused form differentiates
        check_gemm_dglu(dy, weight, gate, up, act)
        return glu_grad(dy @ weight, gate, up, act)
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_dglu(dy, weight, gate, up, act)


_gemm_dglu = define(
    "gemm_dglu",
    "(Tensor dy, Tensor weight, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)",
    _gemm_dglu_reference,
    _gemm_dglu_fake,
    autograd=_gemm_dglu_autograd,
)


# --- public faces ---------------------------------------------------------------------------


def gemm_glu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    act: str = "silu",
) -> Tensor:
    """``act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)`` in one op.

    x [..., K], weights [N, K], biases [N] or None -> [..., N] of x's dtype. SwiGLU is
    ``act="silu"``, GeGLU ``act="gelu"`` (arXiv:2002.05202). Differentiable.

    Raises:
        ConfigError: shapes or dtypes that do not fit, or an unknown ``act``.
    """
    return _gemm_glu(x, w_gate, w_up, b_gate, b_up, act)


def gemm_glu_aux(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    act: str = "silu",
) -> tuple[Tensor, Tensor, Tensor]:
    """``(act(gate) * up, gate, up)`` with the two projections kept: see :func:`gemm_glu`."""
    return _gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """``(dy * up * act'(gate), dy * act(gate))``, all of one shape."""
    return _glu_grad(dy, gate, up, act)


def gemm_dglu(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """``glu_grad(dy @ weight, gate, up, act)``: dy [..., N2], weight [N2, N], gate, up [..., N]."""
    return _gemm_dglu(dy, weight, gate, up, act)
