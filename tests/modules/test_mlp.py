"""``TPMLP`` against a dense MLP: plain, gated, fused gate and up; wire dtype, init, no rows."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modules.comparing import Case, assert_ranks_agree, compare, exact
from tpkernels.checkpoint import full_state_dict, load_full_state_dict
from tpkernels.errors import ConfigError
from tpkernels.modules import TPMLP
from tpkernels.modules.parameters import gather_full

ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """Plain or gated, as users write it."""

    def __init__(self, k, f, act, gated=False, bias=True):
        super().__init__()
        self.act, self.gated = act, gated
        if gated:
            self.gate_proj = nn.Linear(k, f, bias)
        self.up_proj, self.down_proj = nn.Linear(k, f, bias), nn.Linear(f, k, bias)

    def forward(self, x):
        act = ACTIVATIONS[self.act]
        h = act(self.gate_proj(x)) * self.up_proj(x) if self.gated else act(self.up_proj(x))
        return self.down_proj(h)


class FusedMLP(nn.Module):
    """Gate and up stacked in one projection."""

    def __init__(self, k, f, gate_first, bias=True):
        super().__init__()
        self.gate_first = gate_first
        self.wi, self.wo = nn.Linear(k, 2 * f, bias), nn.Linear(f, k, bias)

    def forward(self, x):
        a, b = self.wi(x).chunk(2, -1)
        return self.wo(F.silu(a) * b if self.gate_first else a * F.silu(b))


def shard(module, group, **options):
    gate = "gate_proj" if module.gated else None
    activation = module.act
    TPMLP.shard_(
        module, group, up="up_proj", down="down_proj", gate=gate, activation=activation, **options
    )


def shard_fused(module, group):
    TPMLP.shard_(
        module,
        group,
        up="wi",
        down="wo",
        activation="silu",
        fused=True,
        gate_first=module.gate_first,
    )


def case(k, f, act, gated=False, bias=True, shape=(2, 3)):
    build = functools.partial(MLP, k, f, act, gated, bias)
    return Case(build, shard, lambda: [torch.randn(*shape, k)])


def fused_case(f, gate_first, bias=True):
    build = functools.partial(FusedMLP, 6, f, gate_first, bias)
    return Case(build, shard_fused, lambda: [torch.randn(2, 3, 6)])


CASES = {
    "plain": case(8, 12, "gelu"),
    "plain_no_bias": case(8, 12, "gelu_tanh", bias=False),
    "plain_5": case(5, 5, "relu2"),
    "plain_3": case(7, 3, "silu"),
    "gated": case(8, 12, "silu", gated=True),
    "gated_no_bias_5": case(5, 5, "gelu", gated=True, bias=False),
    "gated_3": case(4, 3, "gelu_tanh", gated=True),
    "fused": fused_case(8, True),
    "fused_5_second_half": fused_case(5, False),
    "fused_3_no_bias": fused_case(3, True, bias=False),
    "one_vector": case(4, 6, "relu", shape=()),
    "no_rows": case(4, 6, "silu", gated=True, shape=(0,)),  # TP-21
}


def mlp_task(group, dtypes):
    outputs = [compare(group, each, dtype) for each in CASES.values() for dtype in dtypes]
    return torch.cat([y.flatten().double() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_mlp_equals_dense_TP_5_TP_21_TP_54(pool, world):
    dtypes = [torch.float64, torch.float32, torch.bfloat16] if world == 2 else [torch.float64]
    assert_ranks_agree(pool.run(mlp_task, dtypes, world_size=world))


def exact_task(group):
    for gated in (False, True):
        for act in ("none", "relu"):
            exact(group, case(5, 7, act, gated))


@pytest.mark.parametrize("world", [2, 4])
def test_whole_numbers_are_exact_TP_1_TP_2(pool, world):
    pool.run(exact_task, world_size=world)


def constructed_task(group):
    """A TPMLP made alone holds what nn.Linear would draw, and loads a dense state dict."""
    torch.manual_seed(4)
    ours = TPMLP(6, 7, activation="silu", gated=True, group=group)
    torch.manual_seed(4)
    drawn = [nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 6)]
    leaves = (ours.gate_proj, ours.up_proj, ours.down_proj)
    for ours_leaf, dense_leaf in zip(leaves, drawn, strict=True):
        assert torch.equal(gather_full(ours_leaf.weight, ours.group), dense_leaf.weight)
    dense = MLP(6, 7, "silu", gated=True)
    load_full_state_dict(ours, dense.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(ours(x), dense(x))
    whole = full_state_dict(ours)
    assert all(torch.equal(whole[k], v) for k, v in dense.state_dict().items())
    assert "gated=True" in repr(ours)


def test_constructed_alone(pool):
    pool.run(constructed_task, world_size=3)


def reduce_dtype_task(group):
    """TP-33: bf16 partial sums of 256 and -255.x on the wire, or their fp32 sum rounded once."""
    found = {}
    for reduce_dtype in (None, torch.float32):
        module = MLP(1, 8, "none", bias=False).bfloat16()
        with torch.no_grad():
            module.up_proj.weight.fill_(1)
            row = [256, 0.75, 256, 0.75, -256, 0.75, -256, 0.75]
            module.down_proj.weight.copy_(torch.tensor([row]))
        shard(module, group, reduce_dtype=reduce_dtype)
        found[reduce_dtype] = module(torch.ones(1, 1, dtype=torch.bfloat16)).item()
    assert found[torch.float32] == 3.0 != found[None]


def test_reduce_dtype_rounds_once_TP_33(pool):
    pool.run(reduce_dtype_task)


def frozen_task(group):
    """Only what requires a gradient gets one, and its value does not depend on the rest."""
    torch.manual_seed(0)
    whole = MLP(4, 6, "silu", gated=True)
    shard(whole, group)
    x = torch.randn(2, 4)
    whole(x).square().sum().backward()
    for trained in ("gate_proj.weight", "up_proj.bias", "down_proj.weight"):
        torch.manual_seed(0)
        part = MLP(4, 6, "silu", gated=True)
        shard(part, group)
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name == trained)
        part(x).square().sum().backward()
        for name, parameter in part.named_parameters():
            assert (parameter.grad is None) == (name != trained), name
        expected = dict(whole.named_parameters())[trained].grad
        actual = dict(part.named_parameters())[trained].grad
        assert torch.equal(actual.to_local(), expected.to_local())


def test_frozen_parameters(pool):
    pool.run(frozen_task, world_size=2)


def autocast_task(group):
    """bf16 autocast computes as bf16 and keeps fp32 gradients, as nn.Linear does."""
    torch.manual_seed(0)
    dense, split = MLP(8, 12, "silu", gated=True), MLP(8, 12, "silu", gated=True)
    split.load_state_dict(dense.state_dict())
    shard(split, group)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = split(x), dense(x)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)  # a few bf16 roundings of 2^-8
    y.float().sum().backward()
    assert split.up_proj.weight.grad.dtype is torch.float32


def test_autocast(pool):
    pool.run(autocast_task, world_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"activation": "swish"}, "swish"), ({"dropout": 1.0}, "dropout=1.0")],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ConfigError, match=message):
        TPMLP(4, 8, **options)


def test_an_odd_fused_projection_is_refused():
    module = nn.Module()
    module.wi, module.wo = nn.Linear(4, 7), nn.Linear(3, 4)
    with pytest.raises(ConfigError, match=r"mlp\.wi.*even out_features"):
        TPMLP.shard_(module, None, up="wi", down="wo", activation="silu", fused=True)
    assert type(module) is nn.Module
