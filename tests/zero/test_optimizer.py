"""``manager.optimizer``: every allowed class steps shards as it steps whole parameters."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tpkernels as tpk
from tests.zero import samples
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError, TPKernelsWarning, UnsupportedModuleError
from tpkernels.testing import max_relative_error
from tpkernels.zero import ZeroConfig
from tpkernels.zero.optimizer import ELEMENT_WISE

CASES = [
    ("ASGD", {"lr": 0.05, "weight_decay": 0.01}),
    ("Adadelta", {"lr": 0.5}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.01), "foreach": False}),
    ("AdamW", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("Adamax", {"lr": 0.01}),
    ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Rprop", {"lr": 0.01}),
    ("SGD", {"lr": 0.05}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "foreach": False}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "fused": True}),
]


class Scaled(samples.Language):
    """With parameters of 0 dimensions and of one element, which most ranks hold nothing of."""

    def __init__(self):
        super().__init__(blocks=1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gain = nn.Parameter(torch.tensor([0.9]))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale * self.gain


def scaled(seed=0):
    torch.manual_seed(seed)
    return Scaled().double()


def train(model, optimizer, steps, rank=0, world=1):
    for step in steps:
        samples.loss_of(model, *samples.batch(step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()


def farthest(ours, theirs):
    return max(max_relative_error(ours[name], value) for name, value in theirs.items())


def every_class(group):
    """Three steps, the state out and into a fresh optimizer, two more: as one process."""
    rank, world = group.rank(), group.size()
    errors = {}
    for number, (name, settings) in enumerate(CASES):
        cls = getattr(torch.optim, name)
        plain, model, other = scaled(), scaled(), scaled(seed=1)
        # the implementation that shards take by themselves: ASGD's rounds eta in another way
        implementation = {} if {"foreach", "fused"} & set(settings) else {"foreach": True}
        truth = cls(plain.parameters(), **copy.deepcopy(settings), **implementation)
        manager = tpk.zero(model, group, stage=1 + number % 3)
        optimizer = manager.optimizer(cls, **copy.deepcopy(settings))
        train(plain, truth, range(3))
        train(model, optimizer, range(3), rank, world)
        state = tpk.full_optimizer_state_dict(model, optimizer)["state"]
        expected = get_optimizer_state_dict(plain, truth)["state"]
        assert state.keys() == expected.keys(), name
        for key, entries in expected.items():
            assert state[key].keys() == entries.keys(), (name, key)
            for entry, value in entries.items():
                if isinstance(value, torch.Tensor):
                    assert state[key][entry].shape == value.shape, (name, key, entry)
                    torch.testing.assert_close(state[key][entry], value, rtol=1e-9, atol=1e-12)
        errors[number, 3] = farthest(samples.full(model), plain.state_dict())
        manager = tpk.zero(other, group)
        fresh = manager.optimizer(cls, **copy.deepcopy(settings))
        other.load_state_dict(tpk.full_state_dict(model))
        fresh.load_state_dict(truth.state_dict())  # whole, by place
        train(plain, truth, range(3, 5))
        train(other, fresh, range(3, 5), rank, world)
        errors[number, 5] = farthest(samples.full(other), plain.state_dict())
    return {CASES[n][0]: e for (n, _), e in errors.items() if e > 1e-9}


def test_every_allowed_class(pool):
    assert {name for name, _ in CASES} == set(ELEMENT_WISE)
    assert pool.run(every_class, world_size=2, timeout=120) == [{}] * 2


def settings_of_training(group):
    """A schedule, clipping by the config, groups by name, a subclass."""
    rank, world = group.rank(), group.size()

    class Mine(torch.optim.SGD):
        pass

    plain, model = scaled(), scaled()
    config = ZeroConfig(gradient_clipping=0.05)
    manager = tpk.zero(model, group, config=config)
    with pytest.raises(UnsupportedModuleError, match=r"Mine .*not known.*element_wise=True"):
        manager.optimizer(Mine, lr=0.1)
    matrices = [each for each in model.named_parameters() if "fc" in each[0]]
    others = (each for each in model.named_parameters() if "fc" not in each[0])
    optimizer = manager.optimizer(
        Mine, [{"params": matrices, "lr": 0.3}, {"params": others}], lr=0.1, element_wise=True
    )
    truth = torch.optim.SGD(
        [
            {"params": [p for n, p in plain.named_parameters() if "fc" in n], "lr": 0.3},
            {"params": [p for n, p in plain.named_parameters() if "fc" not in n]},
        ],
        lr=0.1,
    )
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, truth)]
    norms = []
    for step in range(4):
        samples.loss_of(plain, *samples.batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        truth.step()
        truth.zero_grad()
        train(model, optimizer, [step], rank, world)
        for schedule in schedules:
            schedule.step()
    assert min(norms) > 0.05  # else nothing was clipped
    assert optimizer.param_groups[0]["lr"] == 0.3 / 16
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in matrices]
    return farthest(samples.full(model), plain.state_dict())


def test_schedule_clipping_names_and_subclass(pool):
    assert max(pool.run(settings_of_training, world_size=2)) < 1e-10


def empty_group_first(group):
    """Z-27: PyTorch's helper leaves an empty group that is not last without settings."""
    models, optimizers = [scaled(), scaled()], []
    for model in models:
        manager = tpk.zero(model, group)
        groups = [
            {"params": [], "lr": 0.75 - 0.25 * len(optimizers)},
            {"params": model.parameters()},
        ]
        optimizers.append(manager.optimizer(torch.optim.AdamW, groups, lr=0.01))
    train(models[0], optimizers[0], range(1), group.rank(), group.size())
    state = get_optimizer_state_dict(models[0], optimizers[0])
    with pytest.warns(TPKernelsWarning, match=r"no settings of param_groups\[0\].*Fix: make it"):
        set_optimizer_state_dict(models[1], optimizers[1], state)
    kept = [each["lr"] for each in optimizers[1].param_groups]
    whole = tpk.full_optimizer_state_dict(models[0], optimizers[0])
    tpk.load_full_optimizer_state_dict(models[1], optimizers[1], whole)
    train(models[1], optimizers[1], range(1, 2), group.rank(), group.size())
    return kept, [each["lr"] for each in optimizers[1].param_groups]


def test_a_group_without_parameters_before_another(pool):
    for kept, loaded in pool.run(empty_group_first, world_size=2):
        assert kept == [0.5, 0.01] and loaded == [0.75, 0.01]


def test_groups_by_dimensions_are_told():
    """The idiom ``p.ndim >= 2`` finds nothing: shards are 1-D."""
    model = scaled()
    manager = tpk.zero(model)

    def groups(dimensions):
        return [
            {"params": [p for p in model.parameters() if dimensions(p) >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if dimensions(p) < 2], "weight_decay": 0.0},
        ]

    with pytest.warns(TPKernelsWarning, match=r"param_groups\[0\] of 2 has no.*Fix: .*spec_of"):
        manager.optimizer(torch.optim.AdamW, groups(lambda p: p.ndim))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = manager.optimizer(
            torch.optim.AdamW, groups(lambda p: len(tpk.spec_of(p).whole_shape))
        )
    dense = [p.dim() >= 2 for p in scaled().parameters()]
    assert [len(each["params"]) for each in made.param_groups] == [
        dense.count(True),
        dense.count(False),
    ]


def refused(group):
    model = scaled()
    dense = list(model.parameters())
    manager = tpk.zero(model, group)
    for name, why in (
        ("LBFGS", "dot products over all parameters"),
        ("SparseAdam", "sparse gradients"),
        ("Adafactor", "rows and columns"),
        ("Muon", "orthogonalises whole matrices"),
    ):
        with pytest.raises(UnsupportedModuleError, match=rf"{name} .*{why}.*Allowed: ASGD.*Fix: "):
            manager.optimizer(getattr(torch.optim, name))
    for other in (3, "AdamW", nn.Linear):
        with pytest.raises(ConfigError, match=r"must be an optimizer class.*Fix: "):
            manager.optimizer(other)
    for groups in (dense, [{"params": dense[:1]}], [{"params": dense[0]}]):
        with pytest.raises(ConfigError, match=r"param_groups\[0\] .*not a shard.*after zero\(\)"):
            manager.optimizer(torch.optim.SGD, groups, lr=0.1)
    with pytest.raises(ConfigError, match=r"param_groups\[0\] holds str.*Fix: "):
        manager.optimizer(torch.optim.SGD, {"params": list(model.parameters())}, lr=0.1)

    class Careless(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] = torch.zeros(parameter.shape)

    careless = manager.optimizer(Careless, element_wise=True)
    careless.step()
    for give in (careless.state_dict, lambda: tpk.full_optimizer_state_dict(model, careless)):
        with pytest.raises(
            UnsupportedModuleError, match=r"Careless keeps 'sum'.*Fix: .*zeros_like"
        ):
            give()


def test_what_cannot_step_shards_is_refused_by_name(pool):
    pool.run(refused, world_size=2)


def stepped(cls, **settings):
    model = samples.language()
    optimizer = tpk.zero(model).optimizer(cls, **settings)
    train(model, optimizer, range(1))
    return model, optimizer


DAMAGES = {
    "nothing of 'head.weight', of which the optimizer has": lambda s: s["state"].pop("head.weight"),
    "no exp_avg of 'head.weight'": lambda s: s["state"]["head.weight"].pop("exp_avg"),
    "no exp_avg, exp_avg_sq of 'head": lambda s: s["state"].update({"head.weight": {"step": 1}}),
    r"5 \(int\) as exp_avg of 'head.weight', not a": lambda s: s["state"]["head.weight"].update(
        exp_avg=5
    ),
    "sum of 'head.weight', which AdamW does not keep": lambda s: s["state"]["head.weight"].update(
        sum=torch.ones(())
    ),
    r"exp_avg of 'head.weight' must be whole, of .* got \(2, 2\)": lambda s: s["state"][
        "head.weight"
    ].update(exp_avg=torch.ones(2, 2)),
    r"param_groups\[0\].* has lr='x' \(str\) where a value like 0.01": lambda s: s["param_groups"][
        0
    ].update(lr="x"),
    r"has betas=\[0.9, 'x'\]": lambda s: s["param_groups"][0].update(betas=[0.9, "x"]),
    r"param_groups\[0\].* lacks lr, which AdamW": lambda s: s["param_groups"][0].pop("lr"),
    "without 'param_groups'": lambda s: s.pop("param_groups"),
    "without 'state' and 'param_groups'": lambda s: s.clear(),
    r"state=5 \(int\), not a dict": lambda s: s.update(state=5),
    r"param_groups=5 \(int\), not a list": lambda s: s.update(param_groups=5),
    r"param_groups\[0\]={} \(dict\), without 'params'": lambda s: s.update(param_groups=[{}]),
    "state of 'head.weight'=5": lambda s: s["state"].update({"head.weight": 5}),
}


def test_a_damaged_whole_state_is_refused_by_name():
    model, optimizer = stepped(torch.optim.AdamW, lr=0.01)
    whole = tpk.full_optimizer_state_dict(model, optimizer)
    load = tpk.load_full_optimizer_state_dict
    fresh_model = samples.language()
    fresh = tpk.zero(fresh_model).optimizer(torch.optim.AdamW, lr=0.01)
    for told, damage in DAMAGES.items():
        state = copy.deepcopy(whole)
        damage(state)
        for target in ((model, optimizer), (fresh_model, fresh)):
            if target[1] is fresh and "of which" in told + "of which" * ("does not keep" in told):
                continue  # it cannot know
            with pytest.raises(ConfigError, match=told):
                load(*target, state)
    assert not fresh.state
    found = tpk.full_optimizer_state_dict(model, optimizer)["state"]
    assert all(torch.equal(found[n][k], v) for n, s in whole["state"].items() for k, v in s.items())
    lost = copy.deepcopy(whole)
    del lost["state"]["head.weight"]
    with pytest.warns(TPKernelsWarning, match=r"no state of 1 trained parameters \(head\.weight\)"):
        load(fresh_model, fresh, lost)
    for wrong in (5, [whole]):
        with pytest.raises(ConfigError, match=r"without 'state' and 'param_groups'.*Fix: "):
            load(model, optimizer, wrong)


def test_what_fits_an_optimizer_is_its_class_not_its_age():
    model, optimizer = stepped(torch.optim.AdamW, lr=0.01)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds initial_lr
    whole = tpk.full_optimizer_state_dict(model, optimizer)
    load = tpk.load_full_optimizer_state_dict
    with pytest.raises(ConfigError, match=r"lacks momentum, dampening, nesterov, which SGD has"):
        load(*stepped(torch.optim.SGD, lr=0.1, momentum=0.9), whole)
    with pytest.raises(ConfigError, match=r"lacks betas, eps, amsgrad"):
        other = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
        load(model, optimizer, tpk.full_optimizer_state_dict(*other))
    other = stepped(torch.optim.AdamW, lr=0.01, amsgrad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(*other, whole)  # amsgrad is off after it, and with it a field
        for group in whole["param_groups"]:
            del group["decoupled_weight_decay"], group["foreach"]  # of an older PyTorch
        load(*stepped(torch.optim.AdamW, lr=0.01), whole)
        load(*stepped(torch.optim.AdamW, lr=0.01), {**whole, "state": {}})


def parts_of_another(group, parts):
    model = scaled()
    optimizer = tpk.zero(model, group).optimizer(torch.optim.AdamW)
    if parts is None:
        train(model, optimizer, range(1), group.rank(), group.size())
        state = tpk.full_optimizer_state_dict(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # its own parts fit
        assert all(
            torch.equal(value, state["state"][name][key])
            for name, entries in tpk.full_optimizer_state_dict(model, optimizer)["state"].items()
            for key, value in entries.items()
        )
        return model.norm.weight.spec
    state = optimizer.state_dict()
    part = tpk.spec_of(model.norm.weight)
    assert part != parts
    local = torch.zeros(parts.local_shape).double()
    place = [id(p) for p in model.parameters()].index(id(model.norm.weight))
    state["state"] = {place: {"step": torch.ones(()), "exp_avg": ChunkedTensor.wrap(local, parts)}}
    with pytest.raises(ConfigError, match=r"exp_avg of .* holds another part.*checkpoint, which"):
        optimizer.load_state_dict(state)
    return None


def test_parts_of_another_world_size_are_refused(pool):
    (spec, *_) = pool.run(parts_of_another, None, world_size=2)
    pool.run(parts_of_another, spec, world_size=3)
