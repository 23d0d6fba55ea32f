"""The kernels behind the local ops on CUDA: check, choose, and run what was chosen.

One function an op, in the dispatcher under CUDA, and under CPU while Triton's interpreter was
asked for. Nothing here is imported by, or imports, Triton before a kernel of its is called.
"""

# M tokens (any leading dimensions), K in features, N out features

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.library import NAMESPACE, rows
from tpkernels.ops import cublaslt
from tpkernels.ops.checks import (
    check_act_grad,
    check_gemm_act,
    check_gemm_dact,
    check_gemm_dglu,
    check_gemm_glu,
    check_glu_grad,
)
from tpkernels.ops.choice import choose

_HERE = nullcontext()


@lru_cache(maxsize=1)
def _triton() -> SimpleNamespace:
    """The launchers; imports Triton."""
    from tpkernels.kernels.act_grad import act_grad, glu_grad
    from tpkernels.kernels.gemm_act import gemm_act
    from tpkernels.kernels.gemm_dact import gemm_dact
    from tpkernels.kernels.gemm_dglu import gemm_dglu
    from tpkernels.kernels.gemm_glu import gemm_glu

    return SimpleNamespace(
        act_grad=act_grad,
        glu_grad=glu_grad,
        gemm_act=gemm_act,
        gemm_dact=gemm_dact,
        gemm_glu=gemm_glu,
        gemm_dglu=gemm_dglu,
    )


def _on_device_of(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensors'."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def _shaped(results: Sequence[Tensor], lead: Sequence[int]) -> tuple[Tensor, ...]:
    """[M, N] results with the leading dimensions ``lead`` in place of M."""
    if len(lead) == 1:
        return tuple(results)
    # Not a view to autograd: an op's output that is one may not be edited in place.
    return tuple(torch.ops.aten._unsafe_view(y, (*lead, y.shape[-1])) for y in results)


def gemm_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_gemm_act("gemm_act", x, weight, bias, act)
    x_MK = rows(x)
    (m, k), n = x_MK.shape, weight.shape[0]
    has_bias = bias is not None
    chosen = choose("gemm_act", x.device, x.dtype, m, n, k, act=act, bias=has_bias)
    if chosen.implementation == "triton":
        with _on_device_of(x):
            y = _triton().gemm_act(x_MK, weight, bias, act, config=chosen.config)
    elif chosen.implementation == "cublaslt":
        assert bias is not None
        y = cublaslt.gemm_act(x_MK, weight, bias, act)
    else:
        return reference.gemm_act(x, weight, bias, act)
    return _shaped((y,), x.shape[:-1])[0]


def gemm_act_aux(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    check_gemm_act("gemm_act_aux", x, weight, bias, act)
    x_MK = rows(x)
    (m, k), n = x_MK.shape, weight.shape[0]
    has_bias = bias is not None
    chosen = choose("gemm_act_aux", x.device, x.dtype, m, n, k, act=act, bias=has_bias)
    if chosen.implementation != "triton":
        return reference.gemm_act_aux(x, weight, bias, act)
    with _on_device_of(x):
        found = _triton().gemm_act(x_MK, weight, bias, act, aux=True, config=chosen.config)
    y, pre = _shaped(found, x.shape[:-1])
    return y, pre


def act_grad(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    check_act_grad(dy, pre, act)
    m, n = _as_rows(pre)
    if choose("act_grad", pre.device, pre.dtype, m, n, 0, act=act).implementation != "triton":
        return reference.activation_grad(dy, pre, act)
    with _on_device_of(pre):
        return _triton().act_grad(dy, pre, act)


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    check_glu_grad(dy, gate, up, act)
    m, n = _as_rows(gate)
    if choose("glu_grad", dy.device, dy.dtype, m, n, 0, act=act).implementation != "triton":
        return reference.glu_grad(dy, gate, up, act)
    with _on_device_of(dy):
        return _triton().glu_grad(dy, gate, up, act)


def _as_rows(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor of any number of dimensions, none included."""
    if tensor.dim() < 2:
        return 1, tensor.numel()
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def gemm_dact(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    check_gemm_dact("gemm_dact", dy, weight, pre, act)
    dy_MK = rows(dy)
    (m, k), n = dy_MK.shape, weight.shape[1]
    chosen = choose("gemm_dact", dy.device, dy.dtype, m, n, k, act=act)
    if chosen.implementation != "triton":
        return reference.gemm_dact(dy, weight, pre, act)
    with _on_device_of(dy):
        dh = _triton().gemm_dact(dy_MK, weight, rows(pre), act, config=chosen.config)
    return _shaped((dh,), dy.shape[:-1])[0]


def gemm_dact_dbias(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> tuple[Tensor, Tensor]:
    check_gemm_dact("gemm_dact_dbias", dy, weight, pre, act)
    dy_MK = rows(dy)
    (m, k), n = dy_MK.shape, weight.shape[1]
    chosen = choose("gemm_dact_dbias", dy.device, dy.dtype, m, n, k, act=act)
    if chosen.implementation != "triton":
        dh = gemm_dact(dy, weight, pre, act)  # by whatever is fastest for that
        return dh, rows(dh).sum(0)
    with _on_device_of(dy):
        dh, dbias = _triton().gemm_dact(
            dy_MK, weight, rows(pre), act, dbias=True, config=chosen.config
        )
    return _shaped((dh,), dy.shape[:-1])[0], dbias


def gemm_glu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> Tensor:
    found = _glu("gemm_glu", False, x, w_gate, w_up, b_gate, b_up, act)
    return found[0] if found else reference.gemm_glu(x, w_gate, w_up, b_gate, b_up, act)


def gemm_glu_aux(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> tuple[Tensor, ...]:
    found = _glu("gemm_glu_aux", True, x, w_gate, w_up, b_gate, b_up, act)
    return found or reference.gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act)


def _glu(
    op: str,
    aux: bool,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    act: str,
) -> tuple[Tensor, ...] | None:
    """Triton's outputs, or None where plain PyTorch is to serve."""
    check_gemm_glu(op, x, w_gate, w_up, b_gate, b_up, act)
    x_MK = rows(x)
    (m, k), n = x_MK.shape, w_gate.shape[0]
    has_bias = b_gate is not None or b_up is not None
    chosen = choose(op, x.device, x.dtype, m, n, k, act=act, bias=has_bias)
    if chosen.implementation != "triton":
        return None
    with _on_device_of(x):
        found = _triton().gemm_glu(
            x_MK, w_gate, w_up, b_gate, b_up, act, aux=aux, config=chosen.config
        )
    return _shaped(found if aux else (found,), x.shape[:-1])


def gemm_dglu(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    check_gemm_dglu(dy, weight, gate, up, act)
    dy_MK = rows(dy)
    (m, k), n = dy_MK.shape, weight.shape[1]
    chosen = choose("gemm_dglu", dy.device, dy.dtype, m, n, k, act=act)
    if chosen.implementation != "triton":
        return reference.gemm_dglu(dy, weight, gate, up, act)
    with _on_device_of(dy):
        found = _triton().gemm_dglu(dy_MK, weight, rows(gate), rows(up), act, config=chosen.config)
    d_gate, d_up = _shaped(found, dy.shape[:-1])
    return d_gate, d_up


KERNELS: dict[str, Callable[..., Any]] = {
    "gemm_act": gemm_act,
    "gemm_act_aux": gemm_act_aux,
    "act_grad": act_grad,
    "gemm_dact": gemm_dact,
    "gemm_dact_dbias": gemm_dact_dbias,
    "gemm_glu": gemm_glu,
    "gemm_glu_aux": gemm_glu_aux,
    "glu_grad": glu_grad,
    "gemm_dglu": gemm_dglu,
}


def register(dispatch_key: str) -> torch.library.Library:
    """Put :data:`KERNELS` into the dispatcher for as long as the returned library lives."""
    library = torch.library.Library(NAMESPACE, "IMPL", dispatch_key)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    return library
