"""Which ops the MLP's backward is made of."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.overlap import mlp


class CalledOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tpkernels":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("gated", "bias", "trained", "expected"),
    [
        (False, True, True, "gemm_dact_dbias"),
        (False, True, False, "gemm_dact"),
        (False, False, True, "gemm_dact"),
        (True, True, True, "gemm_dglu"),
    ],
    ids=["with bias", "frozen bias", "no bias", "gated"],
)
def test_the_bias_gradient_comes_with_the_gemm_s(gated, bias, trained, expected):
    x, w_up, w_down = (torch.randn(s, requires_grad=True) for s in ((4, 3), (6, 3), (3, 6)))
    b_up = torch.randn(6, requires_grad=trained) if bias else None
    w_gate = torch.randn(6, 3, requires_grad=True) if gated else None
    y = mlp(x, w_up, b_up, w_down, None, act="gelu", w_gate=w_gate)
    with CalledOps() as called:
        y.sum().backward()
    assert called.names[0] == expected
    assert {"gemm_dact_dbias", "gemm_dact", "gemm_dglu"} & set(called.names) <= {
        expected,
        "gemm_dact",  # inside the other, where nothing fuses the sum
    }
    assert b_up is None or (b_up.grad is not None) == trained
