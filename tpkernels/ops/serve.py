"""The kernels behind the local ops on CUDA: check, choose, and run what was chosen.

One function an op, in the dispatcher under CUDA, and under CPU while Triton's interpreter was
asked for. Nothing here is imported by, or imports, Triton before a kernel of its is called.
"""

# M tokens (any leading dimensions), K in features, N out features

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.kernels import alignment
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
from tpkernels.ops.choice import Choice, asked, choose

_HERE = nullcontext()
_VECTOR_BYTES = 16  # the widest load of a thread


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


def _choose_gemm(
    op: str,
    x: Tensor,
    *weights: Tensor,
    n: int,
    act: str,
    bias: bool = False,
    others: Sequence[Tensor] = (),
) -> Choice:
    """What serves a GEMM; its operands are looked at only where a measured kernel would.

    Args:
        x: [..., K]. weights: 2-D, n columns of the output. others: what the epilogue reads.
    """
    m, k = _as_rows(x)
    chosen = choose(op, x.device, x.dtype, m, n, k, act=act, bias=bias)
    if chosen.implementation == "reference" or _as_measured(x, *weights, others=others):
        return chosen
    return choose(op, x.device, x.dtype, m, n, k, act=act, bias=bias, aligned=False)


def _choose_elementwise(op: str, like: Tensor, *others: Tensor, act: str) -> Choice:
    """What serves an element-wise op of tensors of one shape."""
    m, n = _as_rows(like)
    chosen = choose(op, like.device, like.dtype, m, n, 0, act=act)
    if chosen.implementation == "reference" or _elements_as_measured(like, *others):
        return chosen
    return choose(op, like.device, like.dtype, m, n, 0, act=act, aligned=False)


def _by_table(device: torch.device) -> bool:
    """Whether the measured table decides: otherwise nothing about the operands matters."""
    return device.type == "cuda" and asked() == "auto"


def _as_measured(x: Tensor, *weights: Tensor, others: Sequence[Tensor] = ()) -> bool:
    """Whether a GEMM's operands are as those of the measured table, where that decides.

    Args:
        x: [..., K]. weights: 2-D. others: [..., N], what the epilogue reads.
    """
    if not _by_table(x.device):
        return True
    if not all(map(_rows_are_a_view, (x, *others))):
        return False
    if len({weight.stride(1) == 1 for weight in weights}) > 1:  # brought to one order by copies
        return False
    return alignment.as_measured(rows(x), *weights, others=tuple(map(rows, others)))


def _rows_are_a_view(x: Tensor) -> bool:
    """Whether :func:`rows` copies nothing."""
    if x.dim() < 3 or x.is_contiguous():
        return True
    lead = [each for each in zip(x.shape[:-1], x.stride()[:-1], strict=True) if each[0] != 1]
    return all(outer == size * inner for (_, outer), (size, inner) in pairwise(lead))


def _elements_as_measured(*tensors: Tensor) -> bool:
    """The same of what is read element by element: without a copy, and in vectors."""
    if not _by_table(tensors[0].device):
        return True
    return all(each.is_contiguous() and each.data_ptr() % _VECTOR_BYTES == 0 for each in tensors)


def _as_rows(tensor: Tensor) -> tuple[int, int]:
    """(rows, columns) of a tensor of any number of dimensions, none included."""
    if tensor.dim() < 2:
        return 1, tensor.numel()
    return tensor.shape[:-1].numel(), tensor.shape[-1]


def gemm_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    check_gemm_act("gemm_act", x, weight, bias, act)
    n, has_bias = weight.shape[0], bias is not None
    chosen = _choose_gemm("gemm_act", x, weight, n=n, act=act, bias=has_bias)
    if chosen.implementation == "triton":
        with _on_device_of(x):
            y = _triton().gemm_act(rows(x), weight, bias, act, config=chosen.config)
    elif chosen.implementation == "cublaslt":
        assert bias is not None
        y = cublaslt.gemm_act(rows(x), weight, bias, act)
    else:
        return reference.gemm_act(x, weight, bias, act)
    return _shaped((y,), x.shape[:-1])[0]


def gemm_act_aux(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor]:
    check_gemm_act("gemm_act_aux", x, weight, bias, act)
    n, has_bias = weight.shape[0], bias is not None
    chosen = _choose_gemm("gemm_act_aux", x, weight, n=n, act=act, bias=has_bias)
    if chosen.implementation != "triton":
        return reference.gemm_act_aux(x, weight, bias, act)
    with _on_device_of(x):
        found = _triton().gemm_act(rows(x), weight, bias, act, aux=True, config=chosen.config)
    y, pre = _shaped(found, x.shape[:-1])
    return y, pre


def act_grad(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    check_act_grad(dy, pre, act)
    chosen = _choose_elementwise("act_grad", pre, dy, act=act)
    if chosen.implementation != "triton":
        return reference.activation_grad(dy, pre, act)
    with _on_device_of(pre):
        return _triton().act_grad(dy, pre, act)


def glu_grad(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    check_glu_grad(dy, gate, up, act)
    chosen = _choose_elementwise("glu_grad", gate, up, dy, act=act)
    if chosen.implementation != "triton":
        return reference.glu_grad(dy, gate, up, act)
    with _on_device_of(dy):
        return _triton().glu_grad(dy, gate, up, act)


def gemm_dact(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Tensor:
    check_gemm_dact("gemm_dact", dy, weight, pre, act)
    n = weight.shape[1]
    chosen = _choose_gemm("gemm_dact", dy, weight, n=n, act=act, others=(pre,))
    if chosen.implementation != "triton":
        return reference.gemm_dact(dy, weight, pre, act)
    with _on_device_of(dy):
        dh = _triton().gemm_dact(rows(dy), weight, rows(pre), act, config=chosen.config)
    return _shaped((dh,), dy.shape[:-1])[0]


def gemm_dact_dbias(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> tuple[Tensor, Tensor]:
    check_gemm_dact("gemm_dact_dbias", dy, weight, pre, act)
    n = weight.shape[1]
    chosen = _choose_gemm("gemm_dact_dbias", dy, weight, n=n, act=act, others=(pre,))
    if chosen.implementation != "triton":
        dh = gemm_dact(dy, weight, pre, act)  # by whatever is fastest for that
        return dh, rows(dh).sum(0)
    with _on_device_of(dy):
        dh, dbias = _triton().gemm_dact(
            rows(dy), weight, rows(pre), act, dbias=True, config=chosen.config
        )
    return _shaped((dh,), dy.shape[:-1])[0], dbias


def gemm_glu(*args: Any) -> Tensor:
    found = _glu("gemm_glu", False, *args)
    return found[0] if found else reference.gemm_glu(*args)


def gemm_glu_aux(*args: Any) -> tuple[Tensor, ...]:
    return _glu("gemm_glu_aux", True, *args) or reference.gemm_glu_aux(*args)


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
    has_bias = b_gate is not None or b_up is not None
    n = w_gate.shape[0]
    chosen = _choose_gemm(op, x, w_gate, w_up, n=n, act=act, bias=has_bias)
    if chosen.implementation != "triton":
        return None
    with _on_device_of(x):
        found = _triton().gemm_glu(
            rows(x), w_gate, w_up, b_gate, b_up, act, aux=aux, config=chosen.config
        )
    return _shaped(found if aux else (found,), x.shape[:-1])


def gemm_dglu(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    check_gemm_dglu(dy, weight, gate, up, act)
    n = weight.shape[1]
    chosen = _choose_gemm("gemm_dglu", dy, weight, n=n, act=act, others=(gate, up))
    if chosen.implementation != "triton":
        return reference.gemm_dglu(dy, weight, gate, up, act)
    with _on_device_of(dy):
        found = _triton().gemm_dglu(
            rows(dy), weight, rows(gate), rows(up), act, config=chosen.config
        )
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
