"""Every local op with its inputs and its formula in plain PyTorch, shared by the tests beside it.

The formulas are written from the op's definition, with autograd for the derivatives: they share
no code with tpkernels.
"""

# lead: leading dimensions of x, K in features, N out features

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import ops

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu", "relu2")
EXACT = ("none", "relu", "relu2")  # integers in, integers out
ROUNDED = ("gelu", "gelu_tanh", "silu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Judged by eager PyTorch's error against float64. In float64 eager is that truth itself, so nothing
# else could pass: there gradcheck, the exact integers and tests/test_native.py judge.
JUDGED_DTYPES = DTYPES[1:]
LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "offset")

Tensors = Sequence[Tensor | None]


def act_of(z: Tensor, act: str) -> Tensor:
    """The activation, from its definition."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda z: z,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": F.silu,
        "relu": F.relu,
        "relu2": lambda z: F.relu(z) ** 2,
    }
    return functions[act](z)


def act_gradient(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    """``dy * act'(pre)`` by autograd."""
    with torch.enable_grad():
        leaf = pre.detach().clone().requires_grad_()
        return torch.autograd.grad(act_of(leaf, act).clone(), leaf, dy.detach())[0]


def _gemm_act_aux(x, w, b, act):
    pre = F.linear(x, w, b)
    return act_of(pre, act), pre


def _gemm_dact_dbias(dy, w, pre, act):
    dh = act_gradient(dy @ w, pre, act)
    return dh, dh.clone() if dh.dim() == 1 else dh.flatten(0, -2).sum(0)


def _gemm_glu_aux(x, w_gate, w_up, b_gate, b_up, act):
    gate, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    return act_of(gate, act) * up, gate, up


def _glu_grad(dy, gate, up, act):
    return act_gradient(dy * up, gate, act), dy * act_of(gate, act)


@dataclass(frozen=True)
class Op:
    """A local op: how to call it, its formula, and the shapes of its tensors.

    Attributes:
        shapes: (lead, K, N) -> the shapes of the tensor arguments, in order.
        optional: positions of the arguments that may be None.
    """

    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    formula: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[tuple[int, ...], int, int], list[tuple[int, ...]]]
    optional: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    def run(self, tensors: Tensors, act: str) -> tuple[Tensor, ...]:
        """The op's outputs, always as a tuple."""
        return _tuple(self.call(*tensors, act))

    def expected(self, tensors: Tensors, act: str) -> tuple[Tensor, ...]:
        """The formula's outputs, always as a tuple."""
        return _tuple(self.formula(*tensors, act))

    def integers(
        self, lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Tensors of -1, 0 and 1: exact in every dtype for small K, and through relu2."""
        return [torch.randint(-1, 2, s).to(dtype) for s in self.shapes(lead, k, n)]

    def normals(
        self, lead: tuple[int, ...], k: int, n: int, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Normally distributed tensors, rounded to ``dtype``."""
        return [torch.randn(s, dtype=torch.float64).to(dtype) for s in self.shapes(lead, k, n)]


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _gemm(lead, k, n):
    return [(*lead, k), (n, k), (n,)]


def _glu(lead, k, n):
    return [(*lead, k), (n, k), (n, k), (n,), (n,)]


OPS = [
    Op("gemm_act", ops.gemm_act, lambda *a: _gemm_act_aux(*a)[0], _gemm, (2,)),
    Op("gemm_act_aux", ops.gemm_act_aux, _gemm_act_aux, _gemm, (2,)),
    Op("act_grad", ops.act_grad, act_gradient, lambda lead, k, n: [(*lead, n)] * 2),
    Op(
        "gemm_dact",
        ops.gemm_dact,
        lambda dy, w, pre, act: act_gradient(dy @ w, pre, act),
        lambda lead, k, n: [(*lead, k), (k, n), (*lead, n)],
    ),
    Op(
        "gemm_dact_dbias",
        ops.gemm_dact_dbias,
        _gemm_dact_dbias,
        lambda lead, k, n: [(*lead, k), (k, n), (*lead, n)],
    ),
    Op("gemm_glu", ops.gemm_glu, lambda *a: _gemm_glu_aux(*a)[0], _glu, (3, 4)),
    Op("gemm_glu_aux", ops.gemm_glu_aux, _gemm_glu_aux, _glu, (3, 4)),
    Op("glu_grad", ops.glu_grad, _glu_grad, lambda lead, k, n: [(*lead, n)] * 3),
    Op(
        "gemm_dglu",
        ops.gemm_dglu,
        lambda dy, w, gate, up, act: _glu_grad(dy @ w, gate, up, act),
        lambda lead, k, n: [(*lead, k), (k, n), (*lead, n), (*lead, n)],
    ),
]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """``tensor``'s values (for ``expanded``: its first row's, repeated) in another layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided" and tensor.dim() > 0:
        return torch.stack([tensor, tensor + 1], -1).flatten(-2)[..., ::2]
    if layout == "expanded" and tensor.dim() > 1 and tensor.shape[0]:
        return tensor[:1].contiguous().expand_as(tensor)
    if layout == "offset":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
    return tensor


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Same number, shapes, dtypes and values, without tolerance."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=0, rtol=0)
