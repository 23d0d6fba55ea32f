"""The reference: the activations are those of their sources, and the derivatives theirs."""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels import reference
from tpkernels.errors import ConfigError

Z = torch.linspace(-6, 6, 241, dtype=torch.float64)

# From the sources, without torch.nn.functional.
DEFINITIONS = {
    "none": lambda z: z,
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: (
        0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    ),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "relu": lambda z: torch.maximum(z, torch.zeros_like(z)),
    "relu2": lambda z: torch.maximum(z, torch.zeros_like(z)) ** 2,
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


every_act = pytest.mark.parametrize("act", reference.ACTIVATIONS)


def test_the_definitions_cover_every_activation():
    assert set(DEFINITIONS) == set(reference.ACTIVATIONS)


@every_act
def test_activation_is_its_definition(act):
    torch.testing.assert_close(
        reference.activation(Z, act), DEFINITIONS[act](Z), atol=1e-14, rtol=1e-13
    )


@every_act
@pytest.mark.parametrize("with_graph", [False, True], ids=["plain", "with_graph"])
def test_derivative_is_that_of_the_definition(act, with_graph):
    pre = (Z + 0.01).requires_grad_()  # off relu's kink
    dy = torch.randn_like(pre)
    (expected,) = torch.autograd.grad(DEFINITIONS[act](pre).clone(), pre, dy)
    given = pre if with_graph else pre.detach()
    ours = reference.activation_grad(dy, given, act)
    torch.testing.assert_close(ours.detach(), expected, atol=1e-13, rtol=1e-12)


@every_act
def test_results_share_no_memory_with_the_input(act):
    z = Z.clone()
    reference.activation(z, act).zero_()
    reference.activation_grad(z, z, act).zero_()
    assert torch.equal(z, Z)


@every_act
def test_gemms_are_their_definitions(act):
    x, weight, bias = (
        torch.randn(4, 3).double(),
        torch.randn(5, 3).double(),
        torch.randn(5).double(),
    )
    up, b_up, dy = torch.randn(5, 3).double(), torch.randn(5).double(), torch.randn(4, 6).double()
    down = torch.randn(6, 5).double()
    pre, second = x @ weight.T + bias, x @ up.T + b_up
    f = DEFINITIONS[act]
    close = torch.testing.assert_close
    close(reference.gemm_act(x, weight, bias, act), f(pre))
    close(reference.gemm_act_aux(x, weight, bias, act), (f(pre), pre))
    close(reference.gemm_glu(x, weight, up, bias, b_up, act), f(pre) * second)
    close(reference.gemm_glu_aux(x, weight, up, bias, b_up, act), (f(pre) * second, pre, second))

    gate = pre.clone().requires_grad_()
    dh = dy @ down
    (d_pre,) = torch.autograd.grad(f(gate).clone(), gate, dh)
    close(reference.gemm_dact(dy, down, pre, act), d_pre)
    (d_gate,) = torch.autograd.grad(f(gate) * second, gate, dh)
    close(reference.glu_grad(dh, pre, second, act), (d_gate, dh * f(pre)))
    close(reference.gemm_dglu(dy, down, pre, second, act), (d_gate, dh * f(pre)))


def test_an_unknown_activation_is_refused_with_the_known_ones():
    for call in (reference.activation, lambda z, act: reference.activation_grad(z, z, act)):
        with pytest.raises(ConfigError, match="act='gelu_new' is not known; allowed: none, gelu"):
            call(Z, "gelu_new")
