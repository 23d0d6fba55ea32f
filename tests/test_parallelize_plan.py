"""``parallelize`` with a plan: our classes, their styles, PyTorch's styles; all or nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from tests.models.test_round_trip import assert_same, clones, snapshot
from tests.models.zoo import build, outputs
from tests.modules.comparing import run
from tpkernels.checkpoint import full_state_dict
from tpkernels.errors import ConfigError
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    TPAttention,
    TPMultiheadAttention,
    VocabParallelEmbedding,
)
from tpkernels.parallelize import parallelize, unparallelize


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)]
        )
        self.attn = nn.MultiheadAttention(8, 4, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.out(self.norm(x))


PLANS = {
    "our_classes": {
        "embed": VocabParallelEmbedding,
        "blocks.*.0": ColumnParallelLinear,
        "blocks.*.2": RowParallelLinear,
        "attn": TPMultiheadAttention,
    },
    "our_styles": {
        "embed": VocabParallelEmbedding.style(),
        "blocks.0": TPMLP.style(up="0", down="2", activation="relu"),
        "blocks.1": TPMLP,
        "out": ColumnParallelLinear.style(gather_output=True),
    },
    "row_of_a_whole_input": {"out": RowParallelLinear.style(input_is_parallel=False)},
    "pytorch": {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()},
    "mixed": {
        "blocks.0.0": ColumnParallelLinear,
        "blocks.0.2": RowwiseParallel(),
        "blocks.1.0": ColwiseParallel(),
        "blocks.1.2": RowParallelLinear,
        "attn": TPMultiheadAttention,
    },
}


def plan_task(group, name):
    torch.manual_seed(0)
    dense = Net().double()
    model = copy.deepcopy(dense)
    before, state = snapshot(model), clones(model.state_dict())
    report = parallelize(model, group, plan=PLANS[name])
    assert len(report.replaced) == len(report.modules) >= 1
    ids = torch.randint(13, (2, 5))
    ours, theirs = run(model, [ids], group).named(), run(dense, [ids]).named()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(
            value, theirs[key], rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )
    assert_same(full_state_dict(model), state)
    unparallelize(model)
    assert snapshot(model) == before
    assert_same(model.state_dict(), state)
    assert torch.equal(model(ids), dense(ids))
    return [(row.name, row.action) for row in report.modules]


@pytest.mark.parametrize("name", PLANS)
def test_plans_compute_the_dense_model_and_can_be_undone(pool, name):
    rows = pool.run(plan_task, name, world_size=2)[0]
    if name == "our_classes":
        assert ("blocks.1.0", "ColumnParallelLinear") in rows
        assert ("attn", "TPMultiheadAttention") in rows
    if name == "pytorch":
        assert ("blocks.0.0", "ColwiseParallel") in rows


HALVES = {
    "norm": ({"blocks.0.0": ColumnParallelLinear, "norm": ColumnParallelLinear}, "norm: LayerNorm"),
    "no_embedding": (
        {"embed": VocabParallelEmbedding, "out": VocabParallelEmbedding},
        "out: expected nn.Embedding",
    ),
    "no_such_leaf": (
        {"blocks.0.0": ColumnParallelLinear, "blocks.1": TPMLP.style(up="0", down="two")},
        "blocks.1: there is no module 'two'",
    ),
    "split_twice": (
        {"blocks.0.0": ColumnParallelLinear, "blocks.0": TPMLP.style(up="0", down="2")},
        "blocks.0.0 is already tensor-parallel",
    ),
    "heads": (
        {"embed": VocabParallelEmbedding, "attn": TPAttention.style(num_heads=4, head_dim=2)},
        "attn: there is no module",
    ),
    "pytorch": ({"blocks.0.0": ColwiseParallel(), "attn": ColwiseParallel()}, ""),
    "pytorch_first": (
        {"blocks.0.0": ColwiseParallel(), "norm": RowParallelLinear},
        "norm: LayerNorm",
    ),
}


def half_task(group, name):
    plan, message = HALVES[name]
    model = Net()
    before, state = snapshot(model), clones(model.state_dict())
    ids = torch.randint(13, (2, 5))
    y = model(ids)
    try:
        parallelize(model, group, plan=plan)
    except (ConfigError, NotImplementedError) as error:
        assert message in str(error), error
    else:
        raise AssertionError("accepted")
    assert snapshot(model) == before
    assert_same(model.state_dict(), state)
    assert torch.equal(model(ids), y)


@pytest.mark.parametrize("name", HALVES)
def test_a_plan_that_fails_half_way_changes_nothing(pool, name):
    pool.run(half_task, name, world_size=2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({0: ColumnParallelLinear}, r"the key 0 must be a str, a module path\. Fix: .*'embed'"),
        ({}, r"plan=\{\} splits nothing\. Fix: .*'embed': tpkernels\.ColumnParallelLinear"),
    ],
)
def test_plans_that_name_nothing(plan, message):
    with pytest.raises(ConfigError, match=message):
        parallelize(Net(), plan=plan)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            ColumnParallelLinear,
            {"gather": True},
            r"ColumnParallelLinear\.style: gather=True is not an option of it; allowed: "
            "layout, gather_output, activation, sequence_parallel$",
        ),
        (RowParallelLinear, {"name": "a"}, r"name='a' is not an option"),
        (VocabParallelEmbedding, {"dim": 0}, r"dim=0 is not an option of it; allowed: none"),
        (TPMLP, {"down": "2"}, r"TPMLP\.style needs up; allowed options: up, down, gate"),
        (TPAttention, {"num_heads": 4}, r"TPAttention\.style needs head_dim"),
    ],
)
def test_options_that_do_not_fit_a_style(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        cls.style(**options)


def sequence_style_task(group):
    """A style that only adds hooks is undone as well."""
    model = nn.Sequential(nn.LayerNorm(8))
    before = snapshot(model)
    parallelize(model, group, plan={"0": SequenceParallel(use_local_output=True)})
    assert snapshot(model) != before
    unparallelize(model)
    assert snapshot(model) == before


def test_a_style_of_hooks(pool):
    pool.run(sequence_style_task, world_size=2)


def family_task(group):
    """A plan by recognised classes on a Hugging Face model equals the automatic one."""
    dense = build("llama_gqa")
    model = copy.deepcopy(dense)
    parallelize(
        model, group, plan={"model.layers.*.mlp": TPMLP, "model.layers.*.self_attn": TPAttention}
    )
    for key, value in outputs("llama_gqa", dense).items():
        torch.testing.assert_close(outputs("llama_gqa", model)[key], value, rtol=1e-11, atol=1e-11)


def test_recognised_classes_in_a_plan(pool):
    pool.run(family_task, world_size=2)
