"""The checks of the local ops' arguments, the same whatever implementation serves them."""

from __future__ import annotations

from torch import Tensor

from tpkernels.errors import ConfigError
from tpkernels.library import check_dtypes, check_gemm, check_same_shape
from tpkernels.reference.activation import check_activation


def check_gemm_act(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> None:
    """Raise :class:`ConfigError` unless x [..., K], weight [N, K] and bias [N] fit."""
    check_activation(act)
    check_gemm(op, x, weight, bias)


def check_act_grad(dy: Tensor, pre: Tensor, act: str) -> None:
    """Raise :class:`ConfigError` unless dy and pre have one shape."""
    check_activation(act)
    check_same_shape("act_grad", dy=dy, pre=pre)
    check_dtypes("act_grad", dy=dy, pre=pre)


def check_gemm_dact(op: str, dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> None:
    """Raise :class:`ConfigError` unless dy [..., N2], weight [N2, N] and pre [..., N] fit."""
    check_activation(act)
    if weight.dim() != 2 or dy.dim() < 1 or dy.shape[-1] != weight.shape[0]:
        raise ConfigError(
            f"{op}: dy must be [..., N2] and weight [N2, N], got {tuple(dy.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if pre.shape != (*dy.shape[:-1], weight.shape[1]):
        raise ConfigError(
            f"{op}: pre must be {(*dy.shape[:-1], weight.shape[1])} (dy's leading dimensions "
            f"and weight's N), got {tuple(pre.shape)}"
        )
    check_dtypes(op, dy=dy, weight=weight, pre=pre)


def check_gemm_glu(
    op: str,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> None:
    """Raise :class:`ConfigError` unless x [..., K], the weights [N, K] and biases [N] fit."""
    check_activation(act)
    check_same_shape(op, w_gate=w_gate, w_up=w_up)
    check_gemm(op, x, w_gate, b_gate, weight_name="w_gate", bias_name="b_gate")
    check_gemm(op, x, w_up, b_up, weight_name="w_up", bias_name="b_up")


def check_glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> None:
    """Raise :class:`ConfigError` unless dy, gate and up have one shape."""
    check_activation(act)
    check_same_shape("glu_grad", dy=dy, gate=gate, up=up)
    check_dtypes("glu_grad", dy=dy, gate=gate, up=up)


def check_gemm_dglu(dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str) -> None:
    """Raise :class:`ConfigError` unless dy [..., N2], weight [N2, N], gate, up [..., N] fit."""
    check_activation(act)
    check_same_shape("gemm_dglu", gate=gate, up=up)
    if (
        weight.dim() != 2
        or dy.dim() < 1
        or dy.shape[-1] != weight.shape[0]
        or gate.shape != (*dy.shape[:-1], weight.shape[1])
    ):
        raise ConfigError(
            "gemm_dglu: dy must be [..., N2], weight [N2, N], gate and up [..., N], got "
            f"{tuple(dy.shape)}, {tuple(weight.shape)} and {tuple(gate.shape)}"
        )
    check_dtypes("gemm_dglu", dy=dy, weight=weight, gate=gate, up=up)
