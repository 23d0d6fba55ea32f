"""Training sequence-parallel models: recomputation, dropout, accumulation, sharded weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.models import zoo
from tests.models.test_generate import prompts
from tests.models.test_sequence_values import found, gradients
from tests.models.test_values import CLOSE, compare_to
from tests.models.zoo import PAD, build, scalar
from tests.modules.comparing import assert_ranks_agree
from tpkernels.checkpoint import full_state_dict
from tpkernels.comm.group import resolve_group
from tpkernels.modules.parameters import gather_gradient
from tpkernels.parallelize import parallelize
from tpkernels.testing.rank_errors import RankError


def split(group, name, dtype=torch.float64):
    dense = build(name, dtype)
    model = copy.deepcopy(dense)
    parallelize(model, group, sequence_parallel=True)
    return model, dense


def whole_gradients(model, group):
    return [gather_gradient(p, resolve_group(group)) for p in model.parameters()]


def checkpointing_task(group, name):
    """Both ways of recomputing a block find how the sequence was cut in its forward."""
    model, dense = split(group, name)
    expected = gradients(name, dense)
    options = {} if name == "bert" else {"use_cache": False}
    for reentrant in (False, True):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare_to(gradients(name, model, group, **options), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa"])
def test_gradient_checkpointing_TP_51(pool, name):
    pool.run(checkpointing_task, name, world_size=2, timeout=60)


class Segments(nn.Module):
    """Recomputes everything at once, or blocks two by two, as users write it."""

    def __init__(self, model, together):
        super().__init__()
        self.model, self.together = model, together

    def forward(self, ids):
        model = self.model
        if self.together:
            return checkpoint(lambda ids: model(ids), ids, use_reentrant=False)
        x = checkpoint(self.blocks, model.embed(ids), use_reentrant=False)
        return model.head(model.norm(x))

    def blocks(self, x):
        for block in self.model.blocks:
            x = block(x)
        return x


def segments_task(group):
    for together in (False, True):
        for length in (1, 6):
            model, dense = (Segments(each, together) for each in split(group, "user"))
            for each in (model, dense):
                each(torch.arange(3, 3 + length)[None]).square().sum().backward()
            for ours, theirs in zip(whole_gradients(model, group), dense.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.grad, **CLOSE)


def test_recomputing_several_blocks_at_once(pool):
    pool.run(segments_task, world_size=2)


def two_lengths_task(group):
    """Two forwards of different lengths before their backwards, one of them whole."""
    model, dense = split(group, "gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in (model.train(), dense.train()):
        for module in each.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        losses = [
            each(torch.arange(3, 3 + 2 * n).view(2, n), output_hidden_states=n == 5).logits
            for n in (7, 1, 5, 4)
        ]
        for loss in (*losses[1:], losses[0]):
            scalar({"y": loss}).backward()
    for ours, theirs in zip(whole_gradients(model, group), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, **CLOSE)


def test_forwards_of_several_lengths_before_their_backwards(pool):
    pool.run(two_lengths_task, world_size=2, timeout=60)


def steps_task(group, name):
    """Accumulation over two batches, then optimizer steps: the dense model's weights."""
    model, dense = split(group, name)
    ids = torch.randint(3, 50, (4, 5), generator=torch.Generator().manual_seed(7))
    for each in (dense, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            for part in ids.split([3, 1]):
                scalar(found(name, each, part)).backward()
            optimizer.step()
    whole = full_state_dict(model)
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa", "user"])
def test_accumulated_steps_equal_dense(pool, name):
    pool.run(steps_task, name, world_size=2, timeout=60)


def dropout_task(group, name):
    """Weights and losses keep the same bits on all ranks; recomputation repeats the masks."""
    model = build(name).train()
    parallelize(model, group, sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = scalar(found(name, model))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().flatten())
    replicated = [p for p in model.parameters() if type(p) is nn.Parameter]
    assert replicated and losses[0] != losses[1]
    state, results = torch.get_rng_state(), []
    for recompute in (False, False, True):  # a resumed run draws the same; so does recomputing
        if recompute and hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.set_rng_state(state)
        optimizer.zero_grad()
        scalar(found(name, model)).backward()
        results.append(whole_gradients(model, group))
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            assert a is b is None or torch.equal(a, b)
    return torch.cat([*losses, *(p.detach().flatten() for p in replicated), torch.rand(2).double()])


@pytest.mark.parametrize("name", ["bert", "gpt2", "user"])
def test_training_with_dropout_TP_35_TP_36(pool, name):
    assert_ranks_agree(pool.run(dropout_task, name, world_size=2, timeout=60))


class Block(nn.Module):
    """A residual block whose own dropout is all it does to a constant."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.ones_like(x)) + 0 * self.down(torch.relu(self.up(x)))


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        before = self.drop(torch.ones_like(x))
        for block in self.blocks:
            x = block(x)
        return before, x, self.drop(torch.ones_like(x))


def masks_task(group):
    """Masks differ between the shards and agree on what is replicated; half of it is kept."""
    model = Masks().train()
    parallelize(model, group, sequence_parallel=True)
    torch.manual_seed(5)
    before, inside, after = model(torch.zeros(16, 64, 4))
    shards = inside.chunk(group.size(), dim=-2)
    for i, shard in enumerate(shards):
        for other in shards[:i]:  # equal where two sums of two fair masks are: 3 cases of 8
            assert abs(float((shard == other).double().mean()) - 0.375) < 0.06
    assert abs(float(inside.mean()) - 2.0) < 0.05
    assert not torch.equal(before, after)
    return torch.stack([before, inside, after])


def test_dropout_masks_differ_by_shard_and_agree_where_replicated(pool):
    assert_ranks_agree(pool.run(masks_task, world_size=4))


def generate_task(group):
    for name in ("gpt2", "llama_gqa"):
        model, dense = split(group, name)
        for options in ({"do_sample": False}, {"num_beams": 2}, {"use_cache": False}):
            settings = {"max_new_tokens": 4, "pad_token_id": PAD} | options
            assert torch.equal(
                model.generate(**prompts(), **settings), dense.generate(**prompts(), **settings)
            ), (name, options)


def test_generate(pool):
    pool.run(generate_task, world_size=2, timeout=60)


def compile_task(group):
    """What is around a block's forward stays eager, the rest is compiled: eager's numbers."""
    torch._dynamo.reset()
    model, _ = split(group, "user")
    compiled = torch.compile(model, backend="aot_eager")
    ids, results = torch.arange(3, 10)[None], []
    for forward in (model, compiled, compiled):
        model.zero_grad()
        y = forward(ids)
        y.square().sum().backward()
        results.append([y.detach(), *whole_gradients(model, group)])
    for again in results[1:]:
        for a, b in zip(results[0], again, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_compiled_equals_eager_TP_39(pool):
    pool.run(compile_task, world_size=2, timeout=120)


def even_llama():
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 52, "head_dim": 6}
    return zoo.llama(**sizes).double()


def two_dimensional_task(group, how):
    """Tensor and sequence parallel by 2, weights sharded by 2: two steps as one process's."""
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    model, dense = even_llama(), even_llama()
    parallelize(model, mesh["tp"], sequence_parallel=True)
    parameters, step, clip = model.parameters, None, None
    if how == "fully_shard":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        step = torch.optim.SGD(parameters(), lr=0.05)
        clip = lambda: tpk.clip_grad_norm_(model, 1.0)  # noqa: E731
    else:
        manager = tpk.zero(model, mesh["dp_shard"], stage=int(how[-1]), prefetch_bytes=6000)
        step = manager.optimizer(torch.optim.SGD, lr=0.05)
        clip = lambda: manager.clip_grad_norm_(1.0)  # noqa: E731
    truth = torch.optim.SGD(dense.parameters(), lr=0.05)
    ids = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    rank = mesh["dp_shard"].get_local_rank()
    for _ in range(2):
        step.zero_grad()
        model(ids[2 * rank : 2 * rank + 2], labels=ids[2 * rank : 2 * rank + 2]).loss.backward()
        norm = clip()
        step.step()
        truth.zero_grad()
        dense(ids, labels=ids).loss.backward()
        assert abs(norm / nn.utils.clip_grad_norm_(dense.parameters(), 1.0) - 1) < 1e-6
        truth.step()
    whole = tpk.full_state_dict(model)
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["fully_shard", "zero 1", "zero 3"])
def test_with_sharded_weights_2_x_2(pool, how):
    pool.run(two_dimensional_task, how, timeout=60)


def inner_unit_task(group, how):
    """Weights of a module inside a block, gathered while the block runs, would be missed."""
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    model = even_llama()
    parallelize(model, mesh["tp"], sequence_parallel=True)
    norms = [layer.input_layernorm for layer in model.model.layers]
    if how == "fully_shard":
        for norm in norms:
            fully_shard(norm, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    else:
        tpk.zero(model, mesh["dp_shard"], stage=3, units=norms)
    model(torch.arange(3, 9).view(1, 6))


@pytest.mark.parametrize("how", ["fully_shard", "zero"])
def test_units_inside_a_block_are_refused(pool, how):
    with pytest.raises(RankError, match=r"'weight' of a .*RMSNorm is gathered by itself .*Fix: "):
        pool.run(inner_unit_task, how, timeout=60)
