"""Which parameters are gathered together: every way to say it, nested, tied and shared modules."""

from __future__ import annotations

import functools
import gc
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _recursive_wrap,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from tpkernels.errors import ConfigError
from tpkernels.modules import TPMLP
from tpkernels.zero.units import ROOT, find_units


class Mlp(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(d), Mlp(d)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Gpt(nn.Module):
    """Embedding, blocks in a ``ModuleList``, norm and head."""

    def __init__(self, layers=3, d=4, tied=False):
        super().__init__()
        self.embed = nn.Embedding(11, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def planned(module, units=None, **kwargs):
    """Name -> names of the parameters, after checking that each is in exactly one unit."""
    found = find_units(module, units, **kwargs)
    entries = [each for unit in found for each in unit.parameters]
    names = {id(each): name for name, each in module.named_parameters()}
    assert sorted(each.fqn for each in entries) == sorted(names.values())
    assert all(names[id(each.parameter)] == each.fqn for each in entries)
    for _, parameter, owners in entries:
        assert len(owners) == len({(id(owner), name) for owner, name in owners})
        assert all(owner._parameters[name] is parameter for owner, name in owners)
    assert all(unit.parameters and unit.modules for unit in found)
    assert len({unit.name for unit in found}) == len(found)
    return {unit.name: [each.fqn for each in unit.parameters] for unit in found}


BLOCKS = [ROOT, "layers.0", "layers.1", "layers.2"]


def test_repeated_blocks_are_units_and_the_rest_is_the_roots():
    plan = planned(Gpt())
    assert list(plan) == BLOCKS
    assert plan[ROOT] == ["embed.weight", "norm.weight", "norm.bias", "head.weight"]
    assert plan["layers.1"] == [
        f"layers.1.{name}.{kind}"
        for name in ("norm", "mlp.up", "mlp.down")
        for kind in ("weight", "bias")
    ]
    (_, first, *_) = find_units(model := Gpt())
    assert first.modules == [model.layers[0]]
    assert first.numel == sum(each.numel() for each in model.layers[0].parameters())


def linears(count):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def stages():
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        *(nn.Sequential(Block(), Block()) for _ in range(2)),
    )


def two_lists():
    return nn.ModuleList(nn.ModuleList([Mlp(), Block(), nn.LayerNorm(4)]) for _ in range(2))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (linears(3), ["0", "1", "2"]),
        (nn.Linear(2, 2), [ROOT]),
        (Mlp(), ["up", "down"]),
        (Gpt(layers=1), [ROOT, "layers.0"]),
        (nn.Sequential(nn.Embedding(4, 4), Gpt(layers=2)), [ROOT, "1.layers.0", "1.layers.1"]),
        (nn.Sequential(Block(), Block(), nn.Linear(4, 4)), [ROOT, "0", "1"]),
        (nn.Sequential(Mlp(), Block(), nn.Linear(4, 4)), ["0", "1", "2"]),
        (nn.ModuleDict({"a": Block(), "b": Block(), "n": nn.LayerNorm(4)}), [ROOT, "a", "b"]),
        (stages(), ["0", "1.0", "1.1", "2.0", "2.1"]),
        (two_lists(), [ROOT, "0.0", "0.1", "1.0", "1.1"]),
        (nn.MultiheadAttention(4, 2), [ROOT]),
        (nn.ParameterList([nn.Parameter(torch.ones(2))] * 2), [ROOT]),
        (nn.TransformerEncoderLayer(4, 2, 8), [ROOT]),
        (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), ["1"]),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else str(len(each)),
)
def test_units_by_default(module, names):
    """Without repeated blocks every child is a unit, so that there is something to prefetch."""
    assert sorted(planned(module)) == sorted(names)


def test_torchs_own_transformer_is_split_by_layers():
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    units = [name for name in planned(model) if name != ROOT]
    assert units == [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)]


def is_block(module):
    return isinstance(module, Block)


@pytest.mark.parametrize(
    "units",
    [
        Block,
        [Block],
        {Block},
        (each for each in [Block]),
        "Block",
        ["Block"],
        [f"{__name__}.Block"],
        is_block,
        ModuleWrapPolicy({Block}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block),
        CustomPolicy(is_block),
    ],
    ids=lambda each: str(each).split(" at 0x")[0][:60],
)
def test_every_way_to_name_the_blocks_gives_the_same_units(units):
    plan = planned(Gpt(), units)
    assert plan == planned(Gpt())


@pytest.mark.parametrize("least", [1, 20, 70, 80, 100, 250])
@pytest.mark.parametrize(
    "make", [Gpt, stages, lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True)]
)
def test_a_policy_by_size_picks_what_fsdp_would_wrap(make, least):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    wrapped, model = [], make()
    inside = nn.MultiheadAttention, nn.TransformerEncoderLayer

    def note(module):
        wrapped.append(module)
        return module

    _recursive_wrap(model, policy, note, set(), set(), only_wrap_children=True)
    kept = [
        each for outer in model.modules() if isinstance(outer, inside) for each in outer.children()
    ]
    heads = [id(unit.modules[0]) for unit in find_units(model, policy) if unit.name != ROOT]
    kept = {id(each) for outer in kept for each in outer.modules()}
    assert sorted(heads) == sorted(id(each) for each in wrapped if id(each) not in kept)


def test_modules_themselves_are_units_in_the_models_order():
    model = Gpt()
    chosen = [model.head, model.layers[2], model.layers[0].mlp]
    plan = planned(model, chosen)
    assert list(plan) == [ROOT, "layers.0.mlp", "layers.2", "head"]
    assert planned(model, set(chosen)) == plan
    assert list(planned(model, model)) == list(planned(model, [model])) == [ROOT]


def test_a_unit_inside_another_owns_its_parameters():
    plan = planned(Gpt(layers=1), [Block, Mlp])
    assert plan["layers.0"] == ["layers.0.norm.weight", "layers.0.norm.bias"]
    assert plan["layers.0.mlp"][0] == "layers.0.mlp.up.weight"


def test_every_module_as_a_unit():
    for policy in (always_wrap_policy, lambda module: True):
        plan = planned(Gpt(layers=1), policy)
        assert ROOT not in plan and "layers" not in plan
        assert len(plan) == 6  # the leaves with parameters


@pytest.mark.parametrize("units", [None, Block, [nn.Embedding, nn.Linear], "1KiB", lambda m: True])
def test_tied_weights_are_owned_once_by_the_smallest_unit_around_their_owners(units):
    """Z-29: one parameter, two owners, one unit, which is gathered while any of them runs."""
    model = Gpt(tied=True)
    plan = planned(model, units)
    if units != "1KiB":
        assert plan[ROOT][0] == "embed.weight"
    (entry,) = [
        each
        for unit in find_units(model, units)
        for each in unit.parameters
        if each.parameter is model.head.weight
    ]
    assert entry.owners == [(model.embed, "weight"), (model.head, "weight")]


def test_tied_inside_one_block_stays_in_the_block():
    model = Gpt(layers=2)
    model.layers[1].mlp.down.bias = model.layers[1].norm.bias
    plan = planned(model, [Block, nn.Linear])
    assert "layers.1.norm.bias" in plan["layers.1"]
    assert plan["layers.1.mlp.down"] == ["layers.1.mlp.down.weight"]


def test_a_module_under_two_names_is_one_unit():
    model = Gpt(layers=1)
    model.layers.append(model.layers[0])
    model.again = model.layers[0].mlp
    plan = planned(model, [Block, Mlp])
    assert list(plan) == [ROOT, "layers.0", "layers.0.mlp"]
    assert "layers.0.mlp.up.weight" in plan["layers.0.mlp"]
    # not a unit itself, and used outside the block: it must be there for both
    assert "layers.0.mlp.up.weight" in planned(model, Block)[ROOT]


def test_one_parameter_under_two_names_of_one_module():
    module = nn.Linear(2, 2)
    module.twin = module.weight
    ((_, _, owners), _) = find_units(module)[0].parameters
    assert owners == [(module, "weight"), (module, "twin")]


def test_neighbours_are_grouped_up_to_a_size():
    model = linears(7)  # 24 bytes each, 12 in bfloat16
    assert list(planned(model, "50B")) == ["0", "2", "4", "6"]
    units = find_units(model, 50, param_dtype=torch.bfloat16)
    assert [[*unit.modules] for unit in units] == [list(model[:4]), list(model[4:])]
    assert list(planned(model, 1)) == [str(i) for i in range(7)]  # a leaf is never split
    assert list(planned(model, "1GiB")) == [ROOT] == list(planned(model, "inf"))


def test_a_module_that_fits_is_not_opened_and_one_that_does_not_is():
    model = Gpt(layers=2)
    size = 4 * sum(each.numel() for each in model.layers[0].parameters())
    assert list(planned(model, size)) == ["embed", "layers.0", "layers.1", "norm"]
    assert "layers.0.mlp.up" in planned(model, size // 2)
    own = nn.Module()
    own.add_module("inner", Mlp())
    own.scale = nn.Parameter(torch.ones(3))
    own.forward = lambda x: x
    assert planned(nn.Sequential(own), 64)[ROOT] == ["0.scale"]  # read by the opened module


def test_no_unit_begins_inside_what_reads_weights_without_calling():
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    for units in (nn.Linear, lambda module: isinstance(module, nn.Linear), 1):
        assert "0.out_proj.weight" not in planned(model, units).get("0.out_proj", [])
        assert "1" in planned(model, units)
    with pytest.raises(ConfigError, match="without calling it"):
        find_units(model, [model[0].out_proj])


def test_no_unit_begins_inside_a_tensor_parallel_module():
    model = nn.Sequential(TPMLP(4, 8), nn.Linear(4, 4))
    assert sorted(planned(model)) == sorted(planned(model, "1B")) == ["0", "1"]
    assert sorted(planned(model, lambda module: True)) == ["0", "1"]


def test_small_models_are_one_unit_for_a_policy_by_size():
    assert list(planned(Gpt(), size_based_auto_wrap_policy)) == [ROOT]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ("LlamaDecoderLayer", "the classes in it are: Block, Embedding, Gpt, LayerNorm, Linear"),
        ([nn.Conv2d], "matches no module of Gpt"),
        ([Block()], "matches no module of Gpt"),
        (["Block", 3], "3 is no module, module class or class name"),
        ([int], "is no module, module class or class name"),
        ([], "units=[model]"),
        ({Block: True}, "is not known"),
        (True, "units=True"),
        (2.5, "units=2.5"),
        ("64k", "units='64k'"),
        ("0B", "allowed: a size > 0"),
        (-1, "units=-1"),
        (nn.ModuleList, "'layers' is a ModuleList, which has no forward"),
        (lambda module: None, "answered None"),
        (lambda module: False, "picks no module of Gpt"),
        (ModuleWrapPolicy([nn.Conv2d]), "picks no module of Gpt"),
        (CustomPolicy(lambda module: {"limit": 1} if is_block(module) else False), "{'limit': 1}"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_picks_nothing_or_cannot_work_is_refused_by_name(units, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        find_units(Gpt(), units)
    assert "Fix: " in str(error.value)


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet"):
        find_units(nn.Sequential(nn.LazyLinear(2)))


def test_objects_that_come_and_go_are_never_taken_for_tied():
    """Z-11: ids of freed parameters are used again, and nothing of ours remembers them."""
    for _ in range(200):
        plan = planned(Block())
        assert plan == {
            "norm": ["norm.weight", "norm.bias"],
            "mlp": [f"mlp.{n}.{k}" for n in ("up", "down") for k in ("weight", "bias")],
        }
        gc.collect(0)


def test_a_module_that_defines_equality_is_still_itself():
    class Equal(Block):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            return True

    assert list(planned(nn.Sequential(Equal(), Equal()), lambda m: isinstance(m, Equal))) == (
        ["0", "1"]
    )


def test_planning_changes_nothing():
    model = Gpt(tied=True)
    before = [(name, id(each)) for name, each in model.named_parameters(remove_duplicate=False)]
    plans = [planned(model) for _ in range(2)]
    assert plans[0] == plans[1]
    assert before == [
        (name, id(each)) for name, each in model.named_parameters(remove_duplicate=False)
    ]


class Node(nn.Module):
    def forward(self, x):
        return x


@st.composite
def trees(draw):
    """A module graph: nodes of several kinds below earlier ones, some shared, some tied."""
    kinds = st.sampled_from([Node, nn.Sequential, nn.ModuleList])
    nodes = [Node()]
    parameters = []
    for _ in range(draw(st.integers(0, 9))):
        node = draw(kinds)()
        for number in range(draw(st.integers(0, 2))):
            tied = parameters and draw(st.booleans())
            parameter = draw(st.sampled_from(parameters)) if tied else nn.Parameter(torch.ones(2))
            parameters.append(parameter)
            if isinstance(node, Node):
                node.register_parameter(f"p{number}", parameter)
        for parent in draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2)):
            parent.add_module(str(len(parent._modules)), node)
        nodes.append(node)
    return nodes


def holds(unit, owner):
    return any(owner is each for head in unit.modules for each in head.modules())


@settings(max_examples=150)
@given(data=st.data())
def test_every_parameter_is_in_exactly_one_unit_that_holds_its_owners(data):
    nodes = data.draw(trees())
    callable_nodes = [node for node in nodes if isinstance(node, Node)]
    chosen = data.draw(st.lists(st.sampled_from(callable_nodes), min_size=1))
    size = data.draw(st.integers(1, 40))
    for units in (None, chosen, size, lambda module: any(module is each for each in chosen)):
        found = find_units(nodes[0], units)
        planned(nodes[0], units)
        for unit in found:
            for _, _, owners in unit.parameters:
                assert all(holds(unit, owner) for owner, _ in owners)
        heads = {id(head): unit for unit in found for head in unit.modules}
        for unit in found:  # what a head alone owns is its own
            for _, _, owners in unit.parameters:
                if len(owners) == 1:
                    assert heads.get(id(owners[0][0]), unit) is unit
