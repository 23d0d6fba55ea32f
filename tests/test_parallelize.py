"""``parallelize``: what it refuses and how it says so, what it keeps; all of it or nothing."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.kernels.interpreted import needs_interpreter
from tests.models.zoo import build, llama, outputs
from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.modules import TPMLP, ColumnParallelLinear
from tpkernels.parallelize import parallelize, unparallelize
from tpkernels.testing import RankError


def state_of(model):
    """Classes, names and weights: what must be unchanged after a refusal."""
    classes = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    return classes, {key: value.clone() for key, value in model.state_dict().items()}


def assert_unchanged(model, state):
    classes, weights = state_of(model)
    assert classes == state[0]
    assert list(weights) == list(state[1])
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for key, value in state[1].items():
        assert torch.equal(weights[key], value), key


class NormedAttention(nn.Module):
    """Attention with a norm over all heads: it cannot be split by heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (4, 3)).transpose(1, 2)
            for t in (self.norm(self.q(x)), self.k(x), self.v(x))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention()
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

    def forward(self, x):
        return x + self.mlp(x + self.attn(x))


class Model(nn.Module):
    def __init__(self, attention=NormedAttention):
        super().__init__()
        self.blocks = nn.ModuleList([Block(attention) for _ in range(2)])
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lonely(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.conv(x).mean(-1))


def raised(group, build_model, messages, **options):
    """The error of ``parallelize`` on a model, which must then be as it was."""
    model = build_model()
    state = state_of(model)
    try:
        parallelize(model, group, **options)
    except ConfigError as error:
        assert_unchanged(model, state)
        for message in messages:
            assert message in str(error), str(error)
        return type(error)
    raise AssertionError(f"accepted; expected {messages}")


def refusals_task(group):
    cases = [
        (Model, ["blocks.0.attn", "Fix:", "strict=False"], {}),
        (Lonely, ["no structure it knows in Lonely", "out"], {}),
        (
            lambda: llama(num_attention_heads=2, num_key_value_heads=2),
            [
                "layers.0.self_attn: 2 query heads with 2 key-value heads cannot be split over 3",
                "Allowed: any tp size from 1 to 2",
            ],
            {},
        ),
    ]
    for build_model, messages, options in cases:
        assert raised(group, build_model, messages, **options) is UnsupportedModuleError
    arguments = [
        ({"sequence_parallel": "yes"}, ["sequence_parallel='yes'", "allowed: True, False"]),
        ({"plan": "magic"}, ["plan must be 'auto'", "magic"]),
        ({"plan": {"blocks.0.nope": ColumnParallelLinear}}, ["'blocks.0.nope' matches no module"]),
        (
            {"plan": {"head": "column"}},
            ["'head' has style 'column'", "allowed: ColumnParallelLinear"],
        ),
        ({"plan": {"head": TPMLP}}, ["no mlp was recognised at 'head'"]),
    ]
    for options, messages in arguments:
        raised(group, Model, messages, **options)
    model = build("llama_gqa")
    parallelize(model, group)
    for again in (model, nn.Sequential(model)):
        try:
            parallelize(again, group)
        except ConfigError as error:
            assert "already tensor-parallel. Fix: tpkernels.unparallelize" in str(error)
        else:
            raise AssertionError("split twice")


def test_refusals_name_module_reason_and_fix_and_change_nothing_TP_24(pool):
    pool.run(refusals_task, world_size=3, timeout=60)


def test_the_function_is_not_hidden_by_its_module():
    code = """
import tpkernels as tpk
tpk.unparallelize
assert callable(tpk.parallelize)
import tpkernels.parallelize
from tpkernels.parallelize import parallelize
assert tpk.parallelize is parallelize
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Scaled(nn.Linear):
    """A linear layer that does more, as adapters do."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    model[1].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build_model", "reason"),
    [
        (
            lambda: nn.Sequential(Scaled(6, 10), nn.GELU(), nn.Linear(10, 6)),
            r"\n0: .*Scaled overrides the forward of Linear\n2: ",
        ),
        (hooked, r"\n2: '1' between the layers has a hook"),
        (
            lambda: nn.Sequential(nn.Linear(6, 9), nn.Conv2d(3, 3, 1), nn.Linear(9, 6)),
            r"\n2: Conv2d '1', not element-wise, lies before it",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1)), r"\(0 linear layers\)\. Fix: give plan"),
    ],
)
def test_no_structure_is_explained_by_the_reasons(build_model, reason):
    with pytest.raises(UnsupportedModuleError, match=reason) as caught:
        parallelize(build_model())
    assert "Fix: give plan=" in str(caught.value)


def saved_task(group):
    """A split model is not pickled, and says what to save; a copy of it checks its own inputs."""
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))})
    parallelize(model, group)
    for save in (lambda m: torch.save(m, io.BytesIO()), pickle.dumps):
        try:
            save(model)
        except ShardedSaveError as error:
            assert "Fix: torch.save(tpkernels.full_state_dict(model)" in str(error)
        else:
            raise AssertionError("saved")
    (check,) = model._forward_pre_hooks.values()
    (copied,) = copy.deepcopy(model)._forward_pre_hooks.values()
    assert copied.group is check.group and copied.check is not check.check
    unparallelize(model)
    torch.save(model, io.BytesIO())


def test_saving_a_split_model_names_the_way(pool):
    pool.run(saved_task, world_size=2)


def test_what_is_no_model_or_no_group():
    with pytest.raises(ConfigError, match=r"model must be an nn\.Module, got int"):
        unparallelize(3)
    with pytest.raises(ConfigError, match=r"strict='no' is not known; allowed: True, False"):
        parallelize(nn.Linear(2, 2), strict="no")
    with pytest.raises(ConfigError, match=r"model must be an nn\.Module, got str"):
        parallelize("model")
    with pytest.raises(ConfigError, match="mesh or group must be a DeviceMesh"):
        parallelize(nn.Linear(2, 2), "tp")


def kept_task(group):
    dense = Model().double()
    model = copy.deepcopy(dense)
    report = parallelize(model, group, strict=False)
    rows = {row.name: row for row in report.modules}
    assert rows["blocks.0.attn"].action == "kept" and rows["blocks.0.attn"].reason
    assert rows["blocks.1.mlp"].action == "TPMLP"
    assert rows["head"].action == "kept" and "outside" in rows["head"].reason
    assert {row.name for row in report.replaced} == {"blocks.0.mlp", "blocks.1.mlp"}
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-12, atol=1e-12)
    lonely = Lonely()
    state = state_of(lonely)
    assert parallelize(lonely, group, strict=False).replaced == []
    x = torch.randn(2, 4, 6)
    y = lonely(x)
    unparallelize(lonely)
    assert_unchanged(lonely, state)
    assert torch.equal(lonely(x), y)


def test_strict_false_keeps_and_reports(pool):
    pool.run(kept_task, world_size=2)


def interrupted_task(group):
    """Something that no check foresaw fails after half of the model: it is put back."""
    model = build("gpt2")
    state = state_of(model)
    original, calls = ColumnParallelLinear.shard_.__func__, []

    def fails_late(cls, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("out of memory")
        return original(cls, *args, **kwargs)

    ColumnParallelLinear.shard_ = classmethod(fails_late)
    try:
        parallelize(model, group)
    except MemoryError:
        pass
    else:
        raise AssertionError("the fault was not met")
    finally:
        ColumnParallelLinear.shard_ = classmethod(original)
    assert_unchanged(model, state)
    dense = build("gpt2")
    parallelize(model, group)
    for key, value in outputs("gpt2", dense).items():
        torch.testing.assert_close(outputs("gpt2", model)[key], value, rtol=1e-11, atol=1e-11)


def test_never_half_replaced(pool):
    pool.run(interrupted_task, world_size=2)


def shared_task(group):
    """A module in two places is split once and its parameters are counted once."""
    mlp = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 8, bias=False))
    dense = nn.ModuleList([mlp, mlp]).double()
    model = copy.deepcopy(dense)
    report = parallelize(model, group)
    assert report.dense_bytes == 2 * 8 * 12 * 8
    assert report.parameter_bytes == 8 * 12 * 8
    assert len(report.replaced) == 1
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(model[1](model[0](x)), dense[1](dense[0](x)), rtol=1e-12, atol=1e-12)
    assert list(model.state_dict()) == list(dense.state_dict())


def test_shared_modules(pool):
    pool.run(shared_task, world_size=2)


def root_task(group):
    """A plain sequential MLP, the model itself being the MLP."""
    dense = nn.Sequential(nn.Linear(6, 10), nn.SiLU(), nn.Linear(10, 4))
    model = copy.deepcopy(dense)
    report = parallelize(model, group)
    assert [row.name for row in report.replaced] == [""]
    assert "(root)" in str(report)
    x = torch.randn(3, 6)
    torch.testing.assert_close(model(x), dense(x))
    assert list(model.state_dict()) == list(dense.state_dict())
    unparallelize(model)
    assert type(model) is nn.Sequential
    assert torch.equal(model(x), dense(x))


def test_a_model_that_is_an_mlp(pool):
    pool.run(root_task, world_size=2)


def built_parallel_task(group):
    """Modules that were built parallel have no dense form to go back to."""
    model = nn.Sequential(TPMLP(8, 12, group=group))
    before = model.state_dict()
    try:
        unparallelize(model)
    except ConfigError as error:
        assert "0 (TPMLP) was built tensor-parallel" in str(error), error
    else:
        raise AssertionError("accepted")
    assert all(
        torch.equal(v.to_local(), before[k].to_local())
        for k, v in model.state_dict().items()
        if hasattr(v, "to_local")
    )
    unparallelize(nn.Linear(2, 2))  # nothing to do


def test_unparallelize_of_what_was_built_parallel(pool):
    pool.run(built_parallel_task, world_size=2)


def part_task(group):
    """A part of a model may be split, with the whole put back."""
    model = build("llama_gqa")
    dense = copy.deepcopy(model)
    state = state_of(model)
    parallelize(model.model.layers, group)
    for key, value in outputs("llama_gqa", dense).items():
        torch.testing.assert_close(outputs("llama_gqa", model)[key], value, rtol=1e-11, atol=1e-11)
    unparallelize(model)
    hooked = "_output_capturing_hooks_installed"  # by transformers, in the calls above
    assert_unchanged_but(model, state, hooked)


def assert_unchanged_but(model, state, attribute):
    classes = [(n, c, [a for a in names if a != attribute]) for n, c, names in state_of(model)[0]]
    assert classes == state[0]
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_a_part_of_a_model(pool):
    pool.run(part_task, world_size=2)


def asks_for_what_is_not_there(group):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    weight = model[0].weight
    try:
        parallelize(model, group)
    finally:
        assert type(model) is nn.Sequential and model[0].weight is weight


def asks_in_float64(group):
    parallelize(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double(), group)


@needs_interpreter
def test_a_dtype_that_what_was_asked_for_lacks_raises_before_anything_changes(pool):
    env = {"TPKERNELS_GEMM": "triton", "TRITON_INTERPRET": "1"}
    with pytest.raises(RankError, match=r"TPKERNELS_GEMM=triton was asked for and .*float64"):
        pool.run(asks_in_float64, world_size=2, env=env)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TPKERNELS_OVERLAP", "fused"),
        ("TPKERNELS_GEMM", "triton"),
        ("TPKERNELS_GEMM", "cublaslt"),
    ],
)
def test_what_was_asked_for_and_cannot_serve_raises_before_anything_changes(pool, variable, value):
    with pytest.raises(RankError, match=rf"{variable}={value} was asked for") as caught:
        env = {variable: value, "TRITON_INTERPRET": "0"}  # interpreted, Triton would serve
        pool.run(asks_for_what_is_not_there, world_size=2, env=env)
    assert all(each.type_name.endswith("ConfigError") for each in caught.value.failures)
