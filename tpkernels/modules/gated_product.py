"""The product in a gated MLP, of which backward needs its two factors and nothing more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels.library import needs_grad
from tpkernels.ops.gemm_glu import glu_grad
from tpkernels.reference.activation import activation


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return activation(gate, act).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = glu_grad(dy, gate, up, ctx.act)
        return d_gate, d_up, None


def gated_product(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """``activation(gate, act) * up``, all [..., F_r]; keeps gate and up for backward.

    (As separate operations it would keep ``activation(gate)`` as well.) Differentiable once.
    """
    if needs_grad(gate, up):
        return _GatedProduct.apply(gate, up, act)
    return activation(gate, act) * up
