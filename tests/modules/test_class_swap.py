"""Modules as styles, in place and back; copies of split modules; inputs that ranks disagree on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.modules.comparing import TIGHT, run
from tests.modules.dense_attention import DenseAttention
from tests.modules.test_mlp import MLP
from tpkernels.checkpoint import full_state_dict
from tpkernels.errors import AgreementError, ConfigError, UnsupportedModuleError
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    TPAttention,
    TPMultiheadAttention,
    VocabParallelEmbedding,
)
from tpkernels.modules.class_swap import is_swapped, restore_class
from tpkernels.parallelize import unparallelize
from tpkernels.testing import RankError


class Model(nn.Module):
    """One of everything, as a user writes it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.attention = DenseAttention(12, 4, 2, 3, causal=True)
        self.mha = nn.MultiheadAttention(12, 4, batch_first=True)
        self.mlp = MLP(12, 10, "silu", gated=True)
        self.up, self.down = nn.Linear(12, 7), nn.Linear(7, 12)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.attention(x)
        x = x + self.mha(x, x, x, need_weights=False)[0]
        x = x + self.mlp(x)
        return self.down(self.up(x).relu())


def plan():
    return {
        "embedding": VocabParallelEmbedding.style(),
        "attention": TPAttention.style(num_heads=4, num_kv_heads=2, head_dim=3, causal=True),
        "mha": TPMultiheadAttention.style(),
        "mlp": TPMLP.style(up="up_proj", down="down_proj", gate="gate_proj", activation="silu"),
        "up": ColumnParallelLinear.style(),
        "down": RowParallelLinear.style(),
    }


def split_model(group):
    torch.manual_seed(0)
    dense = Model().double()
    split = copy.deepcopy(dense)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    assert parallelize_module(split, mesh, plan()) is split
    return dense, split


def style_task(group):
    dense, split = split_model(group)
    ids = torch.randint(11, (2, 5))
    ours, theirs = run(split, [ids], group).named(), run(dense, [ids]).named()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **TIGHT)
    assert isinstance(split.up, nn.Linear) and isinstance(split.up, ColumnParallelLinear)
    assert isinstance(split.up.weight, DTensor)
    assert isinstance(split.attention, DenseAttention)
    assert list(split.state_dict()) == list(dense.state_dict())
    assert "TPMLP.style(up='up_proj'" in repr(plan()["mlp"])


@pytest.mark.parametrize("world", [2, 3])
def test_styles_in_parallelize_module(pool, world):
    if world == 3:
        with pytest.raises(RankError, match="4 query heads with 2 key-value heads"):
            pool.run(style_task, world_size=world)
    else:
        pool.run(style_task, world_size=world)


def copy_task(group):
    """A copy has weights of its own, computes alike, and can be put back on its own."""
    dense, split = split_model(group)
    copied = copy.deepcopy(split)
    ids = torch.randint(11, (2, 5))
    first, second = run(split, [ids], group).named(), run(copied, [ids], group).named()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    attributes = {name: set(vars(m)) for name, m in dense.named_modules()}
    unparallelize(copied)
    for name, module in copied.named_modules():
        assert type(module) is type(dense.get_submodule(name)), name
        assert set(vars(module)) == attributes[name], name
        assert not any(type(value) is object for value in vars(module).values()), name
    assert all(torch.equal(v, dense.state_dict()[k]) for k, v in copied.state_dict().items())
    assert is_swapped(split.mlp)  # the original is still split
    with torch.no_grad():
        copied.up.weight.zero_()
    assert torch.equal(full_state_dict(split)["up.weight"], dense.up.weight)
    torch.testing.assert_close(split(ids), dense(ids), **TIGHT)


def test_deepcopy_of_split_modules(pool):
    pool.run(copy_task, world_size=2)


def test_swap_and_restore():
    layer = nn.Linear(4, 6)
    layer.group = "a name of the user's"
    before = dict(vars(layer))
    ColumnParallelLinear.shard_(layer, None)
    assert isinstance(layer, ColumnParallelLinear)
    with pytest.raises(ConfigError, match="already tensor-parallel"):
        RowParallelLinear.shard_(layer, None)
    restore_class(layer)
    assert type(layer) is nn.Linear
    assert vars(layer) == before


BROKEN = {
    "missing_up": (TPMLP, {"up": "nope", "down": "down_proj"}),
    "missing_down": (TPMLP, {"up": "up_proj", "down": "nope"}),
    "down_is_no_layer": (TPMLP, {"up": "up_proj", "down": "norm"}),
    "unknown_activation": (TPMLP, {"up": "up_proj", "down": "down_proj", "activation": "tanh"}),
    "widths_disagree": (TPMLP, {"up": "up_proj", "down": "other"}),
    "heads_disagree": (TPAttention, {"num_heads": 5, "head_dim": 4, "out": "down_proj"}),
    "no_out": (TPAttention, {"num_heads": 4, "head_dim": 3, "out": "nope"}),
}


@pytest.mark.parametrize(("cls", "options"), BROKEN.values(), ids=BROKEN)
def test_shard_changes_nothing_when_it_raises(cls, options):
    module = MLP(12, 10, "silu")
    module.norm, module.other = nn.LayerNorm(10), nn.Linear(9, 12)
    module.q_proj, module.k_proj, module.v_proj = (nn.Linear(12, 12) for _ in range(3))
    classes = [type(m) for m in module.modules()]
    with pytest.raises((UnsupportedModuleError, ConfigError)) as caught:
        cls.shard_(module, None, name="layer.0", **options)
    assert [type(m) for m in module.modules()] == classes
    if options.get("activation") != "tanh":
        assert "layer.0" in str(caught.value)


def disagree_task(group, kind, mode):
    """The first call is fine, the second one not: with ``first`` both are compared."""
    if kind == "mlp":
        module = TPMLP(8, 12, group=group)
    elif kind == "attention":
        module = TPAttention(8, 4, group=group)
    elif kind == "linear":
        module = ColumnParallelLinear(8, 12, group=group)
    else:
        module = nn.MultiheadAttention(8, 4, batch_first=True)
        TPMultiheadAttention.shard_(module, group)

    def call(x, **options):
        return module(x, x, x, **options) if kind == "multihead" else module(x, **options)

    x = torch.randn(2, 3, 8)
    call(x)
    if mode == "values":
        call(x + (group.rank() == 1))
    elif mode == "shape":
        call(torch.randn(2, 3 + group.rank(), 8))
    elif mode == "dtype":
        call(x.double() if group.rank() == 1 else x)
    else:
        padding = torch.zeros(2, 3, dtype=torch.bool)
        padding[0, 0] = group.rank() == 1
        call(x, key_padding_mask=~padding if kind == "attention" else padding)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("mlp", "values"),
        ("mlp", "shape"),
        ("mlp", "dtype"),
        ("linear", "values"),
        ("attention", "shape"),
        ("attention", "mask"),
        ("multihead", "values"),
        ("multihead", "mask"),
    ],
)
def test_ranks_that_disagree_on_inputs_all_raise(pool, kind, mode):
    what = {"mask": "values"}.get(mode, mode)
    with pytest.raises(RankError, match=f"differs in {what}.*") as caught:
        pool.run(disagree_task, kind, mode, world_size=2)
    assert len(caught.value.failures) == 2
    assert all(isinstance(f.exception, AgreementError) for f in caught.value.failures)


def test_the_check_can_be_switched_off(pool):
    pool.run(disagree_task, "mlp", "values", world_size=2, env={"TPKERNELS_CHECK": "off"})


def late_task(group):
    module = TPMLP(8, 12, group=group)
    x = torch.randn(2, 8)
    for _ in range(5):
        module(x)
    module(x + group.rank())


def test_the_check_covers_the_first_calls_or_always(pool):
    pool.run(late_task, world_size=2)
    with pytest.raises(RankError, match="inputs of TPMLP"):
        pool.run(late_task, world_size=2, env={"TPKERNELS_CHECK": "always"})
