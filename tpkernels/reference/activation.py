"""The activations of the fused epilogues and their derivatives.

=========  ================================================  ==============================
name       value                                             source
=========  ================================================  ==============================
none       x
gelu       x Phi(x), Phi the normal CDF (erf)                arXiv:1606.08415
gelu_tanh  0.5 x (1 + tanh(sqrt(2/pi)(x + 0.044715 x^3)))    arXiv:1606.08415
silu       x sigmoid(x)                                      arXiv:1702.03118
relu       max(x, 0)
relu2      max(x, 0)^2                                       arXiv:2109.08668 (squared ReLU)
=========  ================================================  ==============================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.errors import ConfigError

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu", "relu2")


def check_activation(act: str) -> None:
    """Raise :class:`ConfigError` unless ``act`` is one of :data:`ACTIVATIONS`."""
    if act not in ACTIVATIONS:
        raise ConfigError(f"act={act!r} is not known; allowed: {', '.join(ACTIVATIONS)}")


def activation(x: Tensor, act: str) -> Tensor:
    """``act(x)``, element-wise, same shape and dtype."""
    match act:
        case "none":
            return x.clone()
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return torch.square(F.relu(x))
    check_activation(act)
    raise AssertionError(act)


def activation_grad(dy: Tensor, pre: Tensor, act: str) -> Tensor:
    """``dy * act'(pre)``: the gradient of ``activation(pre, act)`` for the output gradient ``dy``.

    Differentiable, so that second derivatives exist.
    """
    match act:
        case "none":
            return dy.clone()
        case "gelu":
            return torch.ops.aten.gelu_backward(dy, pre)
        case "gelu_tanh":
            return torch.ops.aten.gelu_backward(dy, pre, approximate="tanh")
        case "silu":
            if torch.is_grad_enabled() and (dy.requires_grad or pre.requires_grad):
                sigmoid = torch.sigmoid(pre)  # silu_backward itself has no derivative
                return dy * sigmoid * (1 + pre * (1 - sigmoid))
            return torch.ops.aten.silu_backward(dy, pre)
        case "relu":
            return torch.where(pre > 0, dy, torch.zeros_like(dy))
        case "relu2":
            return dy * 2 * F.relu(pre)
    check_activation(act)
    raise AssertionError(act)
