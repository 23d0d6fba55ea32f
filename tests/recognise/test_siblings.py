import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.recognise.simulated_split import dense_and_summed
from tpkernels.recognise import MLPStructure, recognise
from tpkernels.recognise.siblings import feeds


class Upper(nn.Module):
    def __init__(self, act, dim=8, hidden=12):
        super().__init__()
        self.dense, self.act = nn.Linear(dim, hidden), act

    def forward(self, x):
        return self.act(self.dense(x))


class Lower(nn.Module):
    def __init__(self, dim=8, hidden=12):
        super().__init__()
        self.dense, self.norm = nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual)


class LowerWithResidualOfHidden(Lower):
    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual) + hidden.mean()


class Block(nn.Module):
    """Control flow, so that tracing the whole block fails."""

    def __init__(self, act, lower=Lower):
        super().__init__()
        self.upper, self.lower = Upper(act), lower()

    def forward(self, x):
        if x.shape[0] == 0:
            return x
        return self.feed_forward(x)

    def feed_forward(self, x):
        hidden = self.upper(x)
        return self.lower(hidden, x)


class Nested(Block):
    def feed_forward(self, x):
        return self.lower(self.upper(x), x)


class Twice(Block):
    def feed_forward(self, x):
        self.upper(x)
        outputs = self.upper(x)
        return self.lower(outputs[0], x)


class Leaks(Block):
    def feed_forward(self, x):
        hidden = self.upper(x)
        return self.lower(hidden, x) + hidden.mean()


class Unrelated(Block):
    def feed_forward(self, x):
        self.upper(x)
        return self.lower(torch.zeros(12), x)


class Inherited(Block):
    def feed_forward(self, x):
        return super().feed_forward(x) + self.lower(self.upper(x), x)


def model_of(block):
    return nn.ModuleList([block])


@pytest.mark.parametrize("cls", [Block, Nested])
@pytest.mark.parametrize(
    ("act", "name", "module"),
    [(nn.GELU(), "gelu", "upper.act"), (F.silu, "silu", None), (nn.Tanh(), None, None)],
    ids=["module", "function", "not-ours"],
)
def test_halves_in_two_children(cls, act, name, module):
    model = model_of(cls(act)).double()
    recognition = recognise(model)
    (found,) = recognition.found
    assert not recognition.kept and found.path == "0"
    assert found.structure == MLPStructure(
        "plain", "upper.dense", "lower.dense", act=name, act_module=module
    )
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    dense, summed = dense_and_summed(model, found, lambda m: m[0](x), ranks=2)
    torch.testing.assert_close(summed, dense)


@pytest.mark.parametrize("cls", [Leaks, Unrelated, Twice, Inherited])
def test_a_hidden_that_goes_elsewhere_is_refused(cls):
    assert not feeds(cls, "upper", "lower")
    recognition = recognise(model_of(cls(nn.GELU())))
    assert not recognition.found
    assert {k.path for k in recognition.kept} == {"0.upper.dense", "0.lower.dense"}
    assert all(k.in_block and k.fix and "cannot trace" in k.reason for k in recognition.kept)


def test_the_lower_half_reads_the_hidden_in_one_layer_only():
    block = Block(nn.GELU(), lower=LowerWithResidualOfHidden)
    assert not recognise(model_of(block)).found


@pytest.mark.parametrize("act", [nn.Softmax(-1), nn.PReLU(), nn.Dropout(0.1), nn.Identity()])
def test_what_is_not_an_activation(act):
    assert not recognise(model_of(Block(act))).found


def test_hooks_between_the_halves_are_refused():
    block = Block(nn.GELU())
    block.upper.register_forward_hook(lambda *_: None)
    assert not recognise(model_of(block)).found
