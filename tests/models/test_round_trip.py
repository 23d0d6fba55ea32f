"""Split and put back: state dicts, whole state dicts, classes, attributes, hooks, outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.models.zoo import MODELS, build, outputs, scalar
from tests.modules.comparing import TIGHT
from tpkernels.checkpoint import full_state_dict, load_full_state_dict
from tpkernels.errors import ConfigError
from tpkernels.modules.parameters import local_tensor
from tpkernels.parallelize import parallelize, unparallelize
from tpkernels.testing import RankError


def snapshot(model):
    """Everything that must be as before: classes, attributes, hooks, identity of modules."""
    return {
        name: (id(module), type(module), {k: _value(v) for k, v in vars(module).items()})
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _value(value):
    if isinstance(value, dict):  # parameters are new objects; their names and order stay
        return [k if isinstance(k, str) else "hook" for k in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value)


def clones(state):
    return {key: value.clone() for key, value in state.items()}


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype is value.dtype, key
        assert torch.equal(actual[key], value), key


def round_trip_task(group, name):
    model = build(name)
    outputs(name, model)  # transformers installs hooks of its own in the first call
    dense = copy.deepcopy(model)
    state, before = clones(model.state_dict()), snapshot(model)
    tied = tied_names(model)
    modules = {key: id(module) for key, module in model.named_modules()}
    report = parallelize(model, group)
    assert report.parameter_bytes < report.dense_bytes

    # names, global shapes and identity stay; whole weights come out as they went in
    assert {key: id(module) for key, module in model.named_modules()} == modules
    assert list(model.state_dict()) == list(state)
    assert tied_names(model) == tied
    for key, value in model.state_dict().items():
        spec = getattr(value, "spec", None)
        assert (spec.global_shape if spec else tuple(value.shape)) == tuple(state[key].shape), key
    whole = full_state_dict(model)
    assert_same(whole, state)
    assert all(value.is_contiguous() and not value.requires_grad for value in whole.values())

    # another model's weights go in, and come out
    torch.manual_seed(9)
    other = {k: torch.randn_like(v) if v.is_floating_point() else v for k, v in state.items()}
    for names in tied:
        other |= dict.fromkeys(names & other.keys(), other[min(names & other.keys())])
    given = clones(other)
    assert load_full_state_dict(model, other) == ([], [])
    assert_same(other, given)
    assert_same(full_state_dict(model), other)
    dense.load_state_dict(other)
    for key, value in outputs(name, model).items():
        torch.testing.assert_close(value, outputs(name, dense)[key], rtol=1e-10, atol=1e-10)

    # back: the very bits, classes, attributes and outputs, gradients included
    scalar(outputs(name, model)).backward()
    grads = {key: p.grad is not None for key, p in model.named_parameters()}
    unparallelize(model)
    assert snapshot(model) == before
    assert_same(model.state_dict(), other)
    assert tied_names(model) == tied
    for key, value in outputs(name, model).items():
        assert torch.equal(value, outputs(name, dense)[key]), key
    scalar(outputs(name, dense)).backward()
    expected = dict(dense.named_parameters())
    for key, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and parameter.requires_grad
        assert (parameter.grad is not None) == grads[key], key
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-9, atol=1e-9)
    parallelize(model, group)  # and again
    torch.testing.assert_close(
        scalar(outputs(name, model)), scalar(outputs(name, dense)), rtol=1e-9, atol=1e-9
    )


def tied_names(model):
    """Sets of names that share one parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [tied for tied in names.values() if len(tied) > 1]


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_TP_6_TP_28(pool, name):
    world = 3 if name in ("llama_uneven", "user", "bert") else 2
    pool.run(round_trip_task, name, world_size=world, timeout=60)


def copied_task(group):
    """A copy of a split model computes, saves and is put back on its own."""
    model = build("gpt2")
    dense = copy.deepcopy(model)
    parallelize(model, group)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.zero_()
    for key, value in outputs("gpt2", dense).items():
        torch.testing.assert_close(outputs("gpt2", copied)[key], value, **TIGHT)
    assert_same(full_state_dict(copied), dense.state_dict())
    before = snapshot(dense)
    unparallelize(copied)
    for name, (_, cls, attributes) in snapshot(copied).items():
        assert (cls, attributes) == before[name][1:], name
    assert_same(copied.state_dict(), dense.state_dict())


def test_a_copy_stands_alone(pool):
    pool.run(copied_task, world_size=2)


def converted_task(group):
    """A split model may be moved to another dtype, as a dense one may."""
    dense = build("llama_uneven", torch.float32)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    for m in (model, dense):
        m.to(torch.float64)
    for key, value in outputs("llama_uneven", dense).items():
        torch.testing.assert_close(
            outputs("llama_uneven", model)[key], value, rtol=1e-11, atol=1e-11
        )
    assert_same(full_state_dict(model), dense.state_dict())
    unparallelize(model)
    assert_same(model.state_dict(), dense.state_dict())


def test_conversion_of_a_split_model(pool):
    pool.run(converted_task, world_size=2)


def loading_errors_task(group):
    model = build("bert")
    state = clones(model.state_dict())
    parallelize(model, group)
    changed = clones(state)
    changed["pooler.dense.bias"] = torch.zeros(7)
    for broken, message in (
        ({k: v for k, v in state.items() if "query" not in k}, "missing keys"),
        (state | {"extra": torch.zeros(1)}, "unexpected keys"),
        (changed, r"pooler.dense.bias must be (24,), got (7,)"),
        (state | {"pooler.dense.bias": None}, "got None (NoneType)"),
    ):
        try:
            load_full_state_dict(model, broken)
        except ConfigError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)
        assert_same(full_state_dict(model), state)
    partial = {"pooler.dense.bias": torch.ones(24), "extra": torch.zeros(1)}
    missing, unexpected = load_full_state_dict(model, partial, strict=False)
    assert len(missing) == len(state) - 1 and unexpected == ["extra"]
    assert torch.equal(full_state_dict(model)["pooler.dense.bias"], torch.ones(24).double())


def test_loading_checks_before_it_writes(pool):
    pool.run(loading_errors_task, world_size=2)


def options_task(group):
    model = build("bert")
    parallelize(model, group)
    everywhere = full_state_dict(model, cpu=True)
    one = full_state_dict(model, rank0_only=True)
    if group.rank() == 0:
        assert_same(one, everywhere)
    else:
        assert one == {}


def test_whole_state_on_one_rank(pool):
    pool.run(options_task, world_size=2)


class Tiny(nn.Module):
    """Tied weights of which some ranks hold no row."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def empty_part_task(group):
    model = Tiny()
    before = clones(model.state_dict())
    parallelize(model, group)
    assert_same(full_state_dict(model), before)
    ids = torch.tensor([[0, 4, 2]])
    model(ids).sum().backward()
    unparallelize(model)
    assert_same(model.state_dict(), before)
    assert model.head.weight is model.embed.weight


def test_a_tied_weight_of_which_a_rank_holds_nothing_TP_28(pool):
    """Five rows over four ranks leave the last one none: all must still gather alike."""
    pool.run(empty_part_task)


def frozen_task(group):
    """Frozen weights stay frozen, get no gradient, and are saved whole (Z-30)."""
    model = build("gpt2")
    state = clones(model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    parallelize(model, group)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    scalar(outputs("gpt2", model)).backward()
    assert {name: p.grad is not None for name, p in model.named_parameters()} == flags
    assert_same(full_state_dict(model), state)
    unparallelize(model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


def test_frozen_weights_Z_30(pool):
    pool.run(frozen_task, world_size=2)


def meta_task(group):
    """Split before there are weights, then made real and loaded: no rank ever holds the whole."""
    dense = build("encoder")
    with torch.device("meta"):
        model = MODELS["encoder"]().double().eval()
    parallelize(model, group)
    model.to_empty(device="cpu")
    held = sum(local_tensor(p).numel() for p in model.parameters())
    assert held < sum(p.numel() for p in dense.parameters())
    load_full_state_dict(model, dense.state_dict())
    for key, value in outputs("encoder", dense).items():
        torch.testing.assert_close(outputs("encoder", model)[key], value, rtol=1e-11, atol=1e-11)
    assert_same(full_state_dict(model), dense.state_dict())


def test_a_model_on_the_meta_device(pool):
    pool.run(meta_task, world_size=2)


def assigned_task(group, name):
    """A whole weight in place of a part would be counted once a rank: it is refused at its use."""
    model = build(name)
    state = clones(model.state_dict())
    parallelize(model, group)
    model.load_state_dict(state, assign=True, strict=True)
    outputs(name, model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa", "encoder", "user"])
def test_load_state_dict_with_assign_is_not_silent(pool, name):
    with pytest.raises(RankError, match=r"load_full_state_dict|size mismatch") as caught:
        pool.run(assigned_task, name, world_size=2)
    assert len(caught.value.failures) == 2
