"""``gemm_act``: a GEMM whose bias and activation are applied in the epilogue."""

# M tokens (any leading dimensions), K in features, N out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.errors import ConfigError
from tpkernels.library import define, needs_grad, rows, vector_jacobian
from tpkernels.ops import choice
from tpkernels.ops.checks import check_act_grad, check_gemm_act, check_gemm_dact

# --- gemm_act -------------------------------------------------------------------------------


def _gemm_act_reference(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    choice.require_servable(x.device.type)
    check_gemm_act("gemm_act", x, weight, bias, act)
    return reference.gemm_act(x, weight, bias, act)


def _gemm_act_fake(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_gemm_act("gemm_act", x, weight, bias, act)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _gemm_act_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    if needs_grad(x, weight, bias):  # only then is the pre-activation written
        return _gemm_act_aux(x, weight, bias, act)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_act(x, weight, bias, act)


_gemm_act = define(
    "gemm_act",
    "(Tensor x, Tensor weight, Tensor? bias, str act) -> Tensor",
    _gemm_act_reference,
    _gemm_act_fake,
    autograd=_gemm_act_autograd,
)


# --- gemm_act_aux ---------------------------------------------------------------------------


def _gemm_act_aux_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str
) -> tuple[Tensor, Tensor]:
    choice.require_servable(x.device.type)
    check_gemm_act("gemm_act_aux", x, weight, bias, act)
    return reference.gemm_act_aux(x, weight, bias, act)


def _gemm_act_aux_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str
) -> tuple[Tensor, Tensor]:
    y = _gemm_act_fake(x, weight, bias, act)
    return y, torch.empty_like(y)


def _gemm_act_aux_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.act = inputs
    ctx.save_for_backward(x, weight, None if ctx.act == "none" else output[1])
    ctx.set_materialize_grads(False)


def _gemm_act_aux_backward(ctx: Any, dy: Tensor | None, dpre: Tensor | None) -> tuple[Any, ...]:
    x, weight, pre = ctx.saved_tensors
    if dy is not None:
        through_act = dy if ctx.act == "none" else act_grad(dy, pre, ctx.act)
        dpre = through_act if dpre is None else dpre + through_act
    return (*gemm_grads(ctx.needs_input_grad[:3], dpre, x, weight), None)


_gemm_act_aux = define(
    "gemm_act_aux",
    "(Tensor x, Tensor weight, Tensor? bias, str act) -> (Tensor, Tensor)",
    _gemm_act_aux_reference,
    _gemm_act_aux_fake,
    backward=_gemm_act_aux_backward,
    setup_context=_gemm_act_aux_setup,
)


def gemm_grads(
    needed: tuple[bool, ...], dpre: Tensor | None, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of ``pre = F.linear(x, weight, bias)``; None where not needed."""
    if dpre is None:
        return None, None, None
    dx = dpre @ weight if needed[0] else None
    dpre_MN = rows(dpre) if needed[1] or needed[2] else dpre
    dweight = dpre_MN.t() @ rows(x) if needed[1] else None
    dbias = dpre_MN.sum(0) if needed[2] else None
    return dx, dweight, dbias


# --- act_grad -------------------------------------------------------------------------------


def _act_grad_reference(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    choice.require_servable(pre.device.type)
    check_act_grad(dy, pre, act)
    return reference.activation_grad(dy, pre, act)


def _act_grad_fake(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    check_act_grad(dy, pre, act)
    return torch.empty_like(pre, memory_format=torch.contiguous_format)


def _act_grad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, pre, ctx.act = inputs
    ctx.save_for_backward(dy, pre)


def _act_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    d_dy, d_pre = vector_jacobian(
        lambda dy, pre: reference.activation_grad(dy, pre, ctx.act), ctx.saved_tensors, grad
    )
    return d_dy, d_pre, None


_act_grad = define(
    "act_grad",
    "(Tensor dy, Tensor pre, str act) -> Tensor",
    _act_grad_reference,
    _act_grad_fake,
    backward=_act_grad_backward,
    setup_context=_act_grad_setup,
)


# --- gemm_dact ------------------------------------------------------------------------------


def _gemm_dact_reference(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    choice.require_servable(dy.device.type)
    check_gemm_dact("gemm_dact", dy, weight, pre, act)
    return reference.gemm_dact(dy, weight, pre, act)


def _gemm_dact_fake(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    check_gemm_dact("gemm_dact", dy, weight, pre, act)
    return torch.empty_like(pre, memory_format=torch.contiguous_format)


def _gemm_dact_autograd(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    if needs_grad(dy, weight, pre):  # a second derivative: the unfused form differentiates
        check_gemm_dact("gemm_dact", dy, weight, pre, act)
        return act_grad(dy @ weight, pre, act)
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_dact(dy, weight, pre, act)


_gemm_dact = define(
    "gemm_dact",
    "(Tensor dy, Tensor weight, Tensor pre, str act) -> Tensor",
    _gemm_dact_reference,
    _gemm_dact_fake,
    autograd=_gemm_dact_autograd,
)


# --- gemm_dact_dbias ------------------------------------------------------------------------


def _gemm_dact_dbias_composed(
    dy: Tensor, weight: Tensor, pre: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    check_gemm_dact("gemm_dact_dbias", dy, weight, pre, act)
    dh = _gemm_dact(dy, weight, pre, act)  # by whatever implementation serves that
    return dh, rows(dh).sum(0)


def _gemm_dact_dbias_fake(
    dy: Tensor, weight: Tensor, pre: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    check_gemm_dact("gemm_dact_dbias", dy, weight, pre, act)
    dh = torch.empty_like(pre, memory_format=torch.contiguous_format)
    return dh, pre.new_empty(weight.shape[1])


def _gemm_dact_dbias_autograd(
    dy: Tensor, weight: Tensor, pre: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    if needs_grad(dy, weight, pre):  # a second derivative: the unfused form differentiates
        check_gemm_dact("gemm_dact_dbias", dy, weight, pre, act)
        dh = act_grad(dy @ weight, pre, act)
        return dh, rows(dh).sum(0)
    with torch._C._AutoDispatchBelowAutograd():
        return _gemm_dact_dbias(dy, weight, pre, act)


_gemm_dact_dbias = define(
    "gemm_dact_dbias",
    "(Tensor dy, Tensor weight, Tensor pre, str act) -> (Tensor, Tensor)",
    _gemm_dact_dbias_composed,
    _gemm_dact_dbias_fake,
    autograd=_gemm_dact_dbias_autograd,
)


# --- public faces ---------------------------------------------------------------------------


def gemm_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, act: str = "none") -> Tensor:
    """``y = act(F.linear(x, weight, bias))`` in one op.

    Args:
        x: [..., K], any strides.
        weight: [N, K] as in ``nn.Linear``; a transposed view is used as it is.
        bias: [N] or None.
        act: none, gelu, gelu_tanh, silu, relu or relu2.

    Returns:
        [..., N] of x's dtype (float64, float32, bfloat16 or float16), contiguous.

    Differentiable; the pre-activation is written only when a gradient will need it.

    Raises:
        ConfigError: shapes or dtypes that do not fit, or an unknown ``act``.
    """
    return _gemm_act(x, weight, bias, act)


def gemm_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none"
) -> Tensor:
    """``F.gelu(F.linear(x, weight, bias), approximate=approximate)``: see :func:`gemm_act`."""
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"approximate={approximate!r} is not known; allowed: none, tanh")
    return _gemm_act(x, weight, bias, "gelu" if approximate == "none" else "gelu_tanh")


def gemm_act_aux(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, act: str = "none"
) -> tuple[Tensor, Tensor]:
    """``(act(pre), pre)`` with ``pre = F.linear(x, weight, bias)``: see :func:`gemm_act`."""
    return _gemm_act_aux(x, weight, bias, act)


def act_grad(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    """``dy * act'(pre)``, all of one shape: the gradient of an epilogue's activation."""
    return _act_grad(dy, pre, act)


def gemm_dact(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    """``act_grad(dy @ weight, pre, act)``: dy [..., N2], weight [N2, N], pre [..., N].

    The gradient that reaches the first GEMM of an MLP, its second GEMM's weight being ``weight``.
    """
    return _gemm_dact(dy, weight, pre, act)


def gemm_dact_dbias(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """``(dh, dh summed over its rows)`` with ``dh = gemm_dact(dy, weight, pre, act)``.

    The second is [N], the gradient of the bias that was added to ``pre``.
    """
    return _gemm_dact_dbias(dy, weight, pre, act)
