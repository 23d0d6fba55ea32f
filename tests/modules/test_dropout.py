"""Dropout: other masks on split activations, the same on replicated ones, repeatable throughout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.modules.comparing import assert_ranks_agree
from tpkernels.comm.group import resolve_group
from tpkernels.modules import TPMLP, TPAttention, TPMultiheadAttention
from tpkernels.modules.dropout import ShardedDropout, sharded_dropout
from tpkernels.modules.parameters import gather_gradient, local_tensor

WIDTH = 64  # of a mask that is read back: that two halves agree by chance has probability 2^-32


class Block(nn.Module):
    """Attention and MLP with dropout inside, and residual dropout on what all ranks share."""

    def __init__(self, group):
        super().__init__()
        self.attention = TPAttention(16, 8, 4, causal=True, dropout=0.4, group=group)
        self.mlp = TPMLP(16, 32, activation="silu", gated=True, dropout=0.3, group=group)
        self.residual = nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.residual(self.attention(x))
        return x + self.residual(self.mlp(x))


def identity_mlp(group, p):
    """What it gives for any input is its intermediate dropout mask, over 1 - p."""
    module = TPMLP(WIDTH, WIDTH, activation="none", dropout=p, group=group)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local_tensor(parameter).fill_(float(name == "up_proj.bias"))
        down = local_tensor(module.down_proj.weight)  # [N, K_r]
        first = group.rank() * down.shape[1]
        down.copy_(torch.eye(WIDTH)[:, first : first + down.shape[1]])
    return module


def mlp_masks_task(group):
    module = identity_mlp(group, 0.5)
    y = module(torch.randn(4, WIDTH))
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < (y == 0).float().mean().item() < 0.7
    halves = y.chunk(group.size(), -1)
    assert all(not torch.equal(halves[0], other) for other in halves[1:])
    assert not torch.equal(y, module(torch.randn(4, WIDTH))), "the same mask twice"
    module.eval()
    assert torch.equal(module(torch.randn(4, WIDTH)), torch.ones(4, WIDTH))  # TP-36
    return torch.cat((y.flatten(), torch.rand(2)))  # the shared stream is still shared


def test_an_mlp_drops_other_units_on_every_rank(pool):
    assert_ranks_agree(pool.run(mlp_masks_task))


def attention_masks_task(group, module):
    """All heads alike, values one: the output's parts are each head's kept attention weights."""
    if module == "TPAttention":
        attention = TPAttention(16, 8, dropout=0.5, group=group)
        values = attention.v_proj
    else:
        attention = nn.MultiheadAttention(16, 8, dropout=0.5, batch_first=True)
        TPMultiheadAttention.shard_(attention, group)
        values = None
    with torch.no_grad():
        for parameter in attention.parameters():
            local_tensor(parameter).zero_()
        if values is None:
            bias = local_tensor(attention.in_proj_bias)
            bias[2 * bias.shape[0] // 3 :] = 1.0
            out = local_tensor(attention.out_proj.weight)
        else:
            local_tensor(values.bias).fill_(1.0)
            out = local_tensor(attention.o_proj.weight)
        first = group.rank() * out.shape[1]
        out.copy_(torch.eye(16)[:, first : first + out.shape[1]])
    x = torch.randn(4, 32, 16)

    def call(**options):
        return attention(x) if values is not None else attention(x, x, x, **options)[0]

    halves = call().chunk(group.size(), -1)
    assert not torch.equal(halves[0], halves[1])
    if values is None:
        halves = call(need_weights=False).chunk(group.size(), -1)
        assert not torch.equal(halves[0], halves[1])
    attention.eval()
    torch.testing.assert_close(call(), torch.ones(4, 32, 16))  # TP-36
    return torch.cat((halves[0].flatten(), torch.rand(2)))


@pytest.mark.parametrize("module", ["TPAttention", "TPMultiheadAttention"])
def test_attention_drops_other_weights_on_every_rank(pool, module):
    assert_ranks_agree(pool.run(attention_masks_task, module, world_size=2))


def block_task(group, use_reentrant):
    """Ranks agree in training; recomputation repeats the masks."""
    torch.manual_seed(0)
    block = Block(group)
    x = torch.randn(2, 6, 16)
    grads, outputs = [], []
    for recompute in (False, True):
        block.zero_grad()
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        if recompute:
            y = checkpoint(block, leaf, use_reentrant=use_reentrant)
        else:
            y = block(leaf)
        y.square().sum().backward()
        outputs.append(y.detach())
        resolved = resolve_group(group)
        parameters = [gather_gradient(p, resolved) for p in block.parameters()]
        grads.append([leaf.grad, *parameters])
    assert torch.equal(*outputs)
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)
    block.eval()
    assert torch.equal(block(x), block(x))
    return torch.cat((outputs[0].flatten(), grads[0][0].flatten(), torch.rand(1)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ranks_agree_and_recompute_repeats_TP_51(pool, use_reentrant):
    assert_ranks_agree(pool.run(block_task, use_reentrant, world_size=2))


def resume_task(group):
    """A checkpoint that gives every rank the generator state of rank 0 resumes every rank."""
    torch.manual_seed(3)
    block = Block(group)
    x = torch.randn(2, 6, 16)
    block(x)
    saved = [torch.get_rng_state()]
    torch.distributed.broadcast_object_list(saved, src=0, group=group)
    uninterrupted = block(x)
    torch.manual_seed(99)
    block(x)
    torch.set_rng_state(saved[0])
    assert torch.equal(block(x), uninterrupted)


def test_one_generator_state_resumes_all_ranks_TP_35(pool):
    pool.run(resume_task, world_size=2)


def sharded_task(group):
    resolved = resolve_group(group)
    ones = torch.ones(200)
    mine = sharded_dropout(ones, 0.5, True, resolved)
    assert sharded_dropout(ones, 0.5, False, resolved) is ones
    assert sharded_dropout(ones, 0.0, True, resolved) is ones
    layer = nn.Dropout(0.5)
    ShardedDropout.shard_(layer, group)
    assert isinstance(layer, nn.Dropout)
    return mine, layer(ones), torch.rand(2)


def test_sharded_dropout(pool):
    results = pool.run(sharded_task, world_size=3)
    for kind in (0, 1):
        masks = [result[kind] for result in results]
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert_ranks_agree([result[2] for result in results])


def one_rank_task(group):
    """On one rank the draws are those of the dense module."""
    torch.manual_seed(0)
    module = TPMLP(16, 32, dropout=0.5, group=group)
    x = torch.randn(4, 16)
    torch.manual_seed(1)
    y = module(x)
    torch.manual_seed(1)
    h = nn.functional.gelu(nn.functional.linear(x, module.up_proj.weight, module.up_proj.bias))
    expected = nn.functional.linear(
        nn.functional.dropout(h, 0.5), module.down_proj.weight, module.down_proj.bias
    )
    torch.testing.assert_close(y, expected)


def test_one_rank_draws_as_dense_TP_54(pool):
    pool.run(one_rank_task, world_size=1)
