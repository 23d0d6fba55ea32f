import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.recognise.plain_models import FunctionalMLP, FusedGateMLP, GatedMLP, InlineBlock
from tests.recognise.simulated_split import dense_and_summed
from tpkernels.recognise import MLPStructure, recognise
from tpkernels.reference.activation import activation


def only_mlp(model: nn.Module) -> MLPStructure:
    found = [f for f in recognise(model).found if f.kind == "mlp"]
    assert len(found) == 1
    return found[0].structure


def reason_of(model: nn.Module, path: str) -> str:
    recognition = recognise(model)
    assert not recognition.found
    return next(kept.reason for kept in recognition.kept if kept.path == path)


def formula(model: nn.Module, s: MLPStructure, x: torch.Tensor) -> torch.Tensor:
    """The structure's docstring, run."""
    up = model.get_submodule(s.up)(x)
    if s.kind == "plain":
        hidden = activation(up, s.act)
    elif s.kind == "gated":
        hidden = activation(model.get_submodule(s.gate)(x), s.act) * up
    else:
        a, b = up.chunk(2, -1)
        hidden = activation(a, s.act) * b if s.gate_first else a * activation(b, s.act)
    return model.get_submodule(s.down)(hidden)


WHOLE = {
    "sequential": (
        nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
        MLPStructure("plain", "0", "2", act="gelu", whole=True, act_module="1"),
    ),
    "sequential-dropouts": (
        nn.Sequential(
            nn.Linear(8, 12, bias=False),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(12, 5),
            nn.Dropout(0.2),
        ),
        MLPStructure(
            "plain",
            "0",
            "3",
            act="relu",
            whole=True,
            act_module="1",
            inner_dropout="2",
            outer_dropout="4",
        ),
    ),
    "functional": (
        FunctionalMLP(8, 12),
        MLPStructure(
            "plain", "fc1", "fc2", act="gelu_tanh", whole=True, inner_dropout=0.3, outer_dropout=0.2
        ),
    ),
    "gated": (
        GatedMLP(8, 12),
        MLPStructure("gated", "w3", "w2", gate="w1", act="silu", whole=True),
    ),
    "gated-last": (
        GatedMLP(8, 12, gate_last=True),
        MLPStructure("gated", "w3", "w2", gate="w1", act="silu", whole=True),
    ),
}
for form in ("chunk", "split", "slices", "unbind", "second"):
    WHOLE[f"fused-{form}"] = (
        FusedGateMLP(8, 6, form),
        MLPStructure(
            "gated_fused",
            "gate_up",
            "down",
            act="gelu",
            whole=True,
            gate_first=form != "second",
        ),
    )


@pytest.mark.parametrize("name", WHOLE)
def test_whole_mlps(name):
    model, expected = WHOLE[name]
    assert only_mlp(model) == expected
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(model.eval()(x), formula(model, expected, x))


@pytest.mark.parametrize("name", WHOLE)
def test_whole_mlps_without_weights(name):
    model, expected = WHOLE[name]
    assert only_mlp(copy.deepcopy(model).to("meta")) == expected


class Net(nn.Module):
    """fc1, fc2 and a norm, with a forward from outside."""

    def __init__(self, forward, hidden=12):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.norm, self.act, self.drop = nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.1)
        self.how = forward

    def forward(self, x):
        return self.how(self, x)


INLINE = {
    "residual-after": (lambda s, x: x + s.fc2(s.act(s.fc1(s.norm(x)))), "relu"),
    "norm-after": (lambda s, x: s.norm(s.fc2(s.act(s.fc1(x)))), "relu"),
    "two-outputs": (lambda s, x: (s.fc2(F.silu(s.fc1(x))), x), "silu"),
    "not-ours": (lambda s, x: s.fc2(torch.tanh(s.fc1(x))), None),
    "quick-gelu": (lambda s, x: s.fc2((lambda h: h * torch.sigmoid(1.702 * h))(s.fc1(x))), None),
    "dropout-before-act": (lambda s, x: s.fc2(s.act(s.drop(s.fc1(x)))), "relu"),
}


@pytest.mark.parametrize("name", INLINE)
def test_halves_inline_in_a_larger_forward(name):
    forward, act = INLINE[name]
    model = Net(forward)
    structure = only_mlp(model)
    assert (structure.up, structure.down, structure.act) == ("fc1", "fc2", act)
    assert not structure.whole and structure.outer_dropout is None
    (found,) = recognise(model.double().eval()).found
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    dense, summed = dense_and_summed(model, found, lambda m: m(x), ranks=3)
    torch.testing.assert_close(summed, dense)


REFUSED = {
    "norm-between": (lambda s, x: s.fc2(nn.functional.layer_norm(s.fc1(x), (12,))), "element-wise"),
    "softmax-between": (lambda s, x: s.fc2(s.fc1(x).softmax(-1)), "element-wise"),
    "fixed-width": (lambda s, x: x + s.fc2(F.relu(s.fc1(x).view(2, 3, 12))), "fixed width"),
    "input-joins": (lambda s, x: s.fc2(s.fc1(x) * x.mean()), "'x' reaches it"),
    "hidden-leaks": (lambda s, x: (lambda h: s.fc2(F.relu(h)) + h.sum())(s.fc1(x)), "also used"),
    "parameter-joins": (lambda s, x: s.fc2(F.relu(s.fc1(x)) * s.norm.weight.sum()), "takes part"),
    "called-twice": (lambda s, x: s.fc2(F.relu(s.fc1(F.relu(s.fc1(x)[..., :8])))), "called twice"),
    "random": (lambda s, x: s.fc2(torch.bernoulli(s.fc1(x).sigmoid())), "element-wise"),
    "nothing-between": (lambda s, x: x + s.fc2(s.fc1(x)), "no activation"),
    "control-flow": (lambda s, x: s.fc2(s.fc1(x)) if x.sum() > 0 else x, "cannot trace"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    forward, reason = REFUSED[name]
    assert reason in reason_of(Net(forward), "fc2")


def test_a_norm_module_between_is_named():
    model = Net(lambda s, x: s.fc2(s.norm(s.fc1(x))), hidden=8)
    assert "LayerNorm 'norm', not element-wise" in reason_of(model, "fc2")


def test_an_activation_with_parameters_is_refused():
    model = nn.Sequential(nn.Linear(8, 12), nn.PReLU(), nn.Linear(12, 8))
    assert "PReLU '1'" in reason_of(model, "2")


@pytest.mark.parametrize("form", ["glu", "interleaved"])
def test_fused_gates_that_are_not_ours(form):
    model = FusedGateMLP(8, 6, form).double()
    if form == "interleaved":
        assert "element-wise" in reason_of(model, "down")
        return
    assert only_mlp(model) == MLPStructure("gated_fused", "gate_up", "down", act=None)
    (found,) = recognise(model).found
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    dense, summed = dense_and_summed(model, found, lambda m: m(x), ranks=2)
    torch.testing.assert_close(summed, dense)


def test_a_fused_split_by_a_fixed_size_is_whole_or_nothing():
    model = FusedGateMLP(8, 6, "split")
    model.down.register_forward_hook(lambda *_: None)  # a replaced module would not run it
    assert "fixed width" in reason_of(model, "down")


def test_hooks_inside_leave_only_the_leaves():
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    model[0].register_forward_hook(lambda *_: None)
    assert not only_mlp(model).whole
    model[1].register_forward_hook(lambda *_: None)
    assert "'1' between the layers has a hook" in reason_of(model, "2")


def test_hooks_on_the_module_itself_do_not_matter():
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    model.register_forward_hook(lambda *_: None)
    assert only_mlp(model).whole


def test_an_activation_used_elsewhere_is_not_offered():
    shared = nn.GELU()
    mlps = [nn.Sequential(nn.Linear(8, 12), shared, nn.Linear(12, 8)) for _ in range(2)]
    structures = [f.structure for f in recognise(nn.ModuleList(mlps)).found]
    assert [s.act_module for s in structures] == [None, None]


class UnusedParameter(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self[2](self[1](self[0](x)))


def test_extra_parameters_or_arguments_that_take_part_are_not_whole():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x, scale=1.0):
            return self.fc2(F.relu(self.fc1(x))) * scale

    assert not only_mlp(Scaled()).whole
    assert not only_mlp(UnusedParameter()).whole


def test_a_chain_of_three_splits_one_pair():
    model = nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3)
    )
    recognition = recognise(model)
    assert [(f.structure.up, f.structure.down) for f in recognition.found] == [("0", "2")]
    assert [(k.path, "already belongs" in k.reason) for k in recognition.kept] == [("4", True)]


def test_inline_in_a_block_beside_attention():
    model = InlineBlock(16, 24, 4).double().eval()
    found = {f.kind: f for f in recognise(model).found}
    assert found["mlp"].structure == MLPStructure(
        "plain", "fc1", "fc2", act="gelu", act_module="act", inner_dropout="drop"
    )
    assert found["attention"].path == "attn"
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    dense, summed = dense_and_summed(model, found["mlp"], lambda m: m(x), ranks=2)
    torch.testing.assert_close(summed, dense)


def test_weights_without_values_do_not_matter():
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    nn.init.constant_(model[0].weight, float("nan"))
    assert only_mlp(model).whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights(dtype):
    assert only_mlp(GatedMLP(8, 12).to(dtype)).whole


def test_a_forward_that_hides_from_tracing_is_caught_by_running_it():
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            y = self.fc2(F.relu(self.fc1(x)))
            return y if isinstance(x, torch.fx.Proxy) else y + 1

    assert "another result than its formula" in reason_of(Hides(), "fc2")
