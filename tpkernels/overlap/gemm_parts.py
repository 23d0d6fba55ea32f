"""Parts of GEMMs, written where the whole has its place, between which messages can be moved."""

# M rows, K in features, N out features

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tpkernels import instrument
from tpkernels.ops import choice
from tpkernels.ops.gemm_act import gemm_act, gemm_act_aux
from tpkernels.overlap.plan import even_cut


class Moving(Protocol):
    """What has messages on their way."""

    @property
    def driven(self) -> bool:
        """Whether they move only while :meth:`progress` is called."""

    def progress(self) -> None:
        """Move what can be moved without waiting."""


PLAIN = "reference"
"""What serves GEMMs without an epilogue: the library that PyTorch calls."""


def implementation_of(x: Tensor) -> str | None:
    """What serves GEMMs with an epilogue on ``x``, for who records; None while nobody does."""
    return choice.resolve(x.device.type, x.dtype)[0] if instrument.recording() else None


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, aux: bool
) -> tuple[Tensor, ...]:
    """(``act(F.linear(x, weight, bias))``,), and its argument too where ``aux``."""
    return gemm_act_aux(x, weight, bias, act) if aux else (gemm_act(x, weight, bias, act),)


def linear_act_into(
    x_MK: Tensor, weight: Tensor, bias: Tensor | None, act: str, outs: list[Tensor]
) -> None:
    """:func:`linear_act` written to ``outs``: the output, and the pre-activation where two."""
    if act == "none" and len(outs) == 1:
        if bias is None:
            torch.mm(x_MK, weight.t(), out=outs[0])
        else:
            torch.addmm(bias, x_MK, weight.t(), out=outs[0])
        return
    for out, computed in zip(outs, linear_act(x_MK, weight, bias, act, len(outs) > 1), strict=True):
        out.copy_(computed)


def partial_rows(
    out_MK: Tensor, grads: list[Tensor], weights: list[Tensor], extra: Tensor | None = None
) -> None:
    """``out`` filled with ``sum(grad @ weight) + extra``, of rows [M, N_i] and [M, K]."""
    filled = extra is not None
    if extra is not None:
        out_MK.copy_(extra.reshape(out_MK.shape))
    for grad, weight in zip(grads, weights, strict=True):
        if filled:
            out_MK.addmm_(grad, weight)
        else:
            torch.mm(grad, weight, out=out_MK)
        filled = True


def weight_gradient(grad_MN: Tensor, x_MK: Tensor, chunks: int, moving: Moving | None) -> Tensor:
    """``grad.t() @ x`` [N, K]; in parts between which ``moving`` moves messages, if anything."""
    if moving is None or not moving.driven:
        with instrument.computing("dw", x_MK):
            return torch.mm(grad_MN.t(), x_MK)
    out = x_MK.new_empty((grad_MN.shape[1], x_MK.shape[1]))
    for start, end in even_cut(out.shape[0], chunks):
        with instrument.computing("dw", x_MK):
            torch.mm(grad_MN[:, start:end].t(), x_MK, out=out[start:end])
        moving.progress()
    return out
