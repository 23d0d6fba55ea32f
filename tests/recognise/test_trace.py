import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpkernels.recognise.trace import Untraceable, evaluate, stateless, trace, undisturbed


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.seen = [], {}


class ControlFlow(Base):
    def forward(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else x


class WritesAttribute(Base):
    def forward(self, x):
        self.last = self.a(x)
        return self.b(self.last)


class AppendsToList(Base):
    def forward(self, x):
        self.calls.append(x)
        return self.b(self.a(x))


class FillsDictionary(Base):
    def forward(self, x):
        self.seen["x"] = x
        return self.b(self.a(x))


class CountsInBuffer(Base):
    def forward(self, x):
        self.count += 1
        return self.b(self.a(x))


class NoiseInTraining(Base):
    def forward(self, x):
        if self.training:
            x = x + torch.randn_like(x)
        return self.b(self.a(x))


class DropoutAlways(Base):
    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.1))


class DropoutInTraining(Base):
    def forward(self, x):
        x = self.a(x)
        if self.training:
            x = F.dropout(x, 0.1)
        return self.b(F.dropout(x, p=0.2 if self.training else 0.0))


REFUSED = {
    ControlFlow: "cannot trace it",
    WritesAttribute: "writes the attribute 'last'",
    AppendsToList: "writes the attribute 'calls'",
    FillsDictionary: "writes the attribute 'x'",
    CountsInBuffer: "count",
    NoiseInTraining: "in training than in evaluation",
    DropoutAlways: "in training than in evaluation",
}


def _state(module):
    rows = []
    for name, m in module.named_modules():
        for key, value in vars(m).items():
            shallow = dict(value) if isinstance(value, dict) else value
            rows.append((name, key, list(value) if isinstance(value, list) else shallow))
    return rows, [t.clone() for t in module.state_dict().values()], torch.get_rng_state()


def _unchanged(before, after):
    assert before[0] == after[0]
    assert all(map(torch.equal, before[1], after[1]))
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_one_graph_cannot_show_is_refused_and_leaves_nothing_behind(cls):
    module = cls()
    module.b.eval()
    before = _state(module)
    with pytest.raises(Untraceable, match=REFUSED[cls]):
        trace(module, stateless)
    _unchanged(before, _state(module))


def test_dropout_of_training_is_seen_whatever_way_it_is_written():
    module = DropoutInTraining()
    before = _state(module)
    traced = trace(module, stateless)
    _unchanged(before, _state(module))
    assert [n.args[1] if len(n.args) > 1 else n.kwargs["p"] for n in traced.graph.nodes
            if n.target is F.dropout] == [0.1, 0.2]  # fmt: skip
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    weights = {path: torch.randn(i, o, dtype=torch.float64) for path, i, o in
               (("a", 4, 6), ("b", 6, 4))}  # fmt: skip
    known = {traced.placeholders[0]: x}
    result = evaluate(traced, traced.output, known, lambda path, x: x @ weights[path])
    assert torch.equal(result, x @ weights["a"] @ weights["b"])


def test_a_replaced_forward_is_refused():
    module = Base()
    module.forward = lambda x: x
    with pytest.raises(Untraceable, match="replaced on the instance"):
        trace(module, stateless)


def test_hooks_do_not_run():
    def fail(*_):
        raise AssertionError("a hook ran")

    module = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 4))
    for m in module.modules():
        m.register_forward_hook(fail)
        m.register_forward_pre_hook(fail)
    traced = trace(module, stateless)
    known = {traced.placeholders[0]: torch.randn(1, 4)}
    evaluate(traced, traced.output, known, lambda path, x: x)


def test_statements_in_place_are_evaluated():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y.add_(1)
            return y * 3

    traced = trace(InPlace(), stateless)
    known = {traced.placeholders[0]: torch.ones(2)}
    assert torch.equal(evaluate(traced, traced.output, known), torch.full((2,), 9.0))


def test_undisturbed_names_what_was_written():
    module = Base()
    with undisturbed(module) as written:
        module.a.extra = 1
        module.calls.append(2)
        del module.seen
        module.training = False
    assert sorted(written) == ["a.extra", "calls", "seen"]
    assert not hasattr(module.a, "extra") and module.calls == [] and module.seen == {}
    assert module.training
