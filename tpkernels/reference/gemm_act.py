"""GEMM with a fused epilogue: ``act(x @ weight.T + bias)``, and its gradient through a GEMM."""

# M tokens (any leading dimensions), K in features, N out features

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tpkernels.reference.activation import activation, activation_grad


def gemm_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """``act(F.linear(x, weight, bias))``: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    pre = F.linear(x, weight, bias)
    return pre if act == "none" else activation(pre, act)


def gemm_act_aux(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    """``(act(pre), pre)`` with ``pre = F.linear(x, weight, bias)``; two tensors of their own."""
    pre = F.linear(x, weight, bias)
    return activation(pre, act), pre


def gemm_dact(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    """``(dy @ weight) * act'(pre)``: dy [..., N2], weight [N2, N], pre [..., N] -> [..., N].

    The gradient that reaches the first GEMM of ``F.linear(act(pre), weight)``.
    """
    return activation_grad(dy @ weight, pre, act)
