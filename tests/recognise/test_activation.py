import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.recognise.activation import identify_activation, is_elementwise, splits_features


class TrainingOnly(nn.Module):
    def forward(self, x):
        return F.relu(x) if self.training else x


class CapturedSlope(nn.Module):
    """relu, by a tensor that somebody may change."""

    def __init__(self):
        super().__init__()
        self.slope = torch.zeros(1)

    def forward(self, x):
        return F.prelu(x, self.slope)


KNOWN = {
    "identity": (nn.Identity(), "none"),
    "gelu-module": (nn.GELU(), "gelu"),
    "gelu-erf": (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "gelu-tanh-module": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "gelu-tanh-partial": (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
    "silu": (nn.SiLU(), "silu"),
    "silu-product": (lambda x: x * x.sigmoid(), "silu"),
    "relu-in-place": (nn.ReLU(inplace=True), "relu"),
    "relu-clamp": (lambda x: x.clamp(min=0), "relu"),
    "relu2": (lambda x: F.relu(x).pow(2), "relu2"),
    "sequential": (nn.Sequential(nn.GELU()), "gelu"),
}

ELEMENTWISE_BUT_NOT_OURS = {
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu-clipped": lambda x: F.gelu(x).clamp(-10, 10),
    "gelu-in-float32": lambda x: F.gelu(x.float()).to(x.dtype),
    "relu6": nn.ReLU6(),
    "leaky": nn.LeakyReLU(1e-4),
    "tanh": nn.Tanh(),
    "relu-without-gradient": lambda x: F.relu(x).detach(),
    "relu-with-another-gradient": lambda x: F.relu(x).detach() + x - x.detach(),
    "relu-in-training": TrainingOnly(),
}

NOT_ELEMENTWISE = {
    "softmax": nn.Softmax(-1),
    "glu": nn.GLU(),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "random-in-training": nn.RReLU(),
    "dropout": nn.Dropout(0.1),
    "prelu": nn.PReLU(),
    "prelu-zero": nn.PReLU(init=0.0),
    "captured-tensor": CapturedSlope(),
    "partial-tensor": functools.partial(F.prelu, weight=torch.zeros(1)),
    "raises": lambda x: x.view(7, 11),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_activations_are_named_whatever_they_are_called(name):
    function, expected = KNOWN[name]
    assert identify_activation(function) == expected
    assert is_elementwise(function)


@pytest.mark.parametrize("name", ELEMENTWISE_BUT_NOT_OURS)
def test_close_is_not_equal(name):
    assert identify_activation(ELEMENTWISE_BUT_NOT_OURS[name]) is None
    assert is_elementwise(ELEMENTWISE_BUT_NOT_OURS[name])


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_what_cannot_be_split_over_features_is_neither(name):
    assert identify_activation(NOT_ELEMENTWISE[name]) is None
    assert not is_elementwise(NOT_ELEMENTWISE[name])


def test_activations_of_transformers():
    act2fn = pytest.importorskip("transformers.activations").ACT2FN
    expected = {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_fast": "gelu_tanh",  # sqrt(2/pi) written with ten digits: off by 4e-12
        "linear": "none",
        "relu": "relu",
        "relu2": "relu2",
        "silu": "silu",
        "swish": "silu",
        "gelu_10": None,
        "quick_gelu": None,
        "relu6": None,
        "prelu": None,
        "mish": None,
    }
    assert {name: identify_activation(act2fn[name]) for name in expected} == expected


def test_identifying_leaves_mode_and_random_state_alone():
    module = nn.Sequential(nn.RReLU(), nn.Dropout(0.5))
    module[1].eval()
    state = torch.get_rng_state()
    identify_activation(module)
    is_elementwise(module)
    assert module.training and module[0].training and not module[1].training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fixed_width_does_not_split():
    assert splits_features(lambda x: F.relu(x.view(2, 3, -1)), 8)
    assert not splits_features(lambda x: F.relu(x.view(2, 3, 8)), 8)
