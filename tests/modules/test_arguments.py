"""A replaced module is called as its own forward was: by position, by name, with defaults."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modules.test_mlp import MLP
from tpkernels.errors import ConfigError
from tpkernels.modules import TPMLP, TPAttention
from tpkernels.parallelize import parallelize


class Attention(nn.Module):
    """As users write it: its own names, an option that is never given."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, hidden, spare=None, keep=None):
        q, k, v = (
            w(hidden).unflatten(-1, (4, 3)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.wo(y.transpose(1, 2).flatten(2))


CALLS = {
    "by_position": lambda module, x, keep: module(x),
    "by_name": lambda module, x, keep: module(hidden=x),
    "defaults_given": lambda module, x, keep: module(x, None, keep=None),
    "mask_by_name": lambda module, x, keep: module(x, keep=keep),
    "mask_by_position": lambda module, x, keep: module(x, None, keep),
    "everything_by_name": lambda module, x, keep: module(keep=keep, spare=None, hidden=x),
}


def attention_task(group):
    dense = nn.ModuleList([Attention() for _ in range(2)]).double()
    model = copy.deepcopy(dense)
    report = parallelize(model, group)
    assert [row.action for row in report.modules] == ["TPAttention"] * 2
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    for name, call in CALLS.items():
        ours, theirs = call(model[0], x, keep), call(dense[0], x, keep)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    for wrong in (
        lambda: model[0](x, 2.0),  # not the mask, though it is the second
        lambda: model[0](x, spare=torch.ones(5, 5)),
        lambda: model[0](x, key_padding_mask=torch.ones(2, 5)),
        lambda: model[0](x, None, None, None),
        lambda: model[0](),
    ):
        with pytest.raises(ConfigError, match="TPAttention: "):
            wrong()


def test_a_replaced_attention_is_called_as_before(pool):
    pool.run(attention_task, world_size=2)


class NamedMLP(MLP):
    def forward(self, hidden_states, unused=None):
        return super().forward(hidden_states)


def test_a_replaced_mlp_is_called_as_before():
    dense = NamedMLP(6, 8, "silu")
    module = copy.deepcopy(dense)
    TPMLP.shard_(module, None, up="up_proj", down="down_proj", activation="silu")
    x = torch.randn(3, 6)
    for ours in (module(x), module(hidden_states=x), module(x, None), module(x, unused=1)):
        torch.testing.assert_close(ours, dense(x))
    with pytest.raises(ConfigError, match="forward takes 2 arguments"):
        module(x, None, None)
    with pytest.raises(ConfigError, match="needs its first argument"):
        module(unused=x)


def test_modules_built_alone_have_their_own_signature():
    with pytest.raises(TypeError):
        TPMLP(6, 8)(torch.randn(3, 6), unused=1)
    with pytest.raises(TypeError):
        TPAttention(6, 2)(torch.randn(1, 3, 6), keep=None)
