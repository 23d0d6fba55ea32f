"""Gated linear units (SwiGLU, GeGLU; arXiv:2002.05202): ``act(x Wg^T + bg) * (x Wu^T + bu)``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tpkernels.reference.activation import activation, activation_grad


def gemm_glu_aux(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(act(gate) * up, gate, up)``: x [..., K], weights [N, K], biases [N] -> three [..., N]."""
    gate = F.linear(x, w_gate, b_gate)
    up = F.linear(x, w_up, b_up)
    return activation(gate, act) * up, gate, up


def gemm_glu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> Tensor:
    """The first output of :func:`gemm_glu_aux`."""
    return gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)[0]


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """``(d_gate, d_up)`` of ``act(gate) * up``, all [..., N]."""
    return activation_grad(dy * up, gate, act), dy * activation(gate, act)


def gemm_dglu(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """``glu_grad(dy @ weight, gate, up, act)``: dy [..., N2], weight [N2, N] -> two [..., N]."""
    return glu_grad(dy @ weight, gate, up, act)
