"""``act_grad`` and ``glu_grad`` in Triton: element-wise, each input read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.epilogue import act_slope, act_value
from tpkernels.kernels.launch import check_dtype, run

_BLOCK = 1024  # elements a program; 4 warps of 8 elements a thread


@triton.jit
def _act_grad(
    dy, pre, d_pre, count, ACT: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy_ = tl.load(dy + at, mask=inside).to(tl.float32)
    pre_ = tl.load(pre + at, mask=inside).to(tl.float32)
    product = dy_ * act_slope(pre_, ACT, PRECISE)
    tl.store(d_pre + at, product.to(d_pre.dtype.element_ty), mask=inside)


@triton.jit
def _glu_grad(
    dy, gate, up, d_gate, d_up, count,
    ACT: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    dy_ = tl.load(dy + at, mask=inside).to(tl.float32)
    gate_ = tl.load(gate + at, mask=inside).to(tl.float32)
    up_ = tl.load(up + at, mask=inside).to(tl.float32)
    from_gate = dy_ * up_ * act_slope(gate_, ACT, PRECISE)
    from_up = dy_ * act_value(gate_, ACT, PRECISE)
    tl.store(d_gate + at, from_gate.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(d_up + at, from_up.to(d_up.dtype.element_ty), mask=inside)


def act_grad(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    """``dy * act'(pre)``: tensors of one shape, any strides -> contiguous, of pre's dtype."""
    check_dtype("act_grad", pre.dtype)
    d_pre = torch.empty_like(pre, memory_format=torch.contiguous_format)
    _over_elements(_act_grad, (dy, pre), (d_pre,), act)
    return d_pre


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) of ``act(gate) * up`` for ``dy``: one shape, any strides -> contiguous."""
    check_dtype("glu_grad", gate.dtype)
    d_gate, d_up = (
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (gate, up)
    )
    _over_elements(_glu_grad, (dy, gate, up), (d_gate, d_up), act)
    return d_gate, d_up


def _over_elements(
    kernel: object, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], act: str
) -> None:
    count = outputs[0].numel()
    precise = outputs[0].dtype is torch.float32
    if count:
        grid = (-(-count // _BLOCK),)
        contiguous = (tensor.contiguous() for tensor in inputs)
        constants = {"ACT": act, "PRECISE": precise, "BLOCK": _BLOCK}
        run(kernel, grid, *contiguous, *outputs, count, **constants, num_warps=4)
