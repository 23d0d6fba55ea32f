"""Modules alone on shards of the sequence: the dense module's numbers, each rank its tokens."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.modules.comparing import Case, assert_ranks_agree, compare, exact
from tests.modules.dense_attention import DenseAttention
from tests.modules.test_mlp import MLP, FusedMLP, shard
from tpkernels.comm import regions
from tpkernels.comm.group import resolve_group
from tpkernels.errors import AgreementError, ConfigError
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    SequenceShards,
    TPAttention,
    TPMultiheadAttention,
)
from tpkernels.modules.kv_cache import KVCache
from tpkernels.modules.parameters import gather_gradient
from tpkernels.overlap import sequence_sizes
from tpkernels.testing import count_collectives

LENGTH, K = 7, 8
CHECK_OFF = {"TPKERNELS_CHECK": "off", "TPKERNELS_OVERLAP": "off"}


class Layer(nn.Module):
    """``x + inner(norm(x))``, with the tokens in dimension ``dim`` of x."""

    def __init__(self, inner, run=None, dim=1):
        super().__init__()
        self.norm, self.inner, self.dim = nn.LayerNorm(K), inner, dim
        self.run = run or (lambda inner, x: inner(x))

    def forward(self, x):
        return x + self.run(self.inner, self.norm(x))


class Pair(nn.Module):
    """Two linear layers that are split one by one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(K, 5), nn.Linear(5, K)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def sequence(group):
    """Uneven shards of the sequence."""
    return {"sequence_parallel": SequenceShards(sequence_sizes(LENGTH, resolve_group(group).size))}


def shard_pair(pair, group, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel}
    ColumnParallelLinear.shard_(pair.up, group, activation="none", **options)
    RowParallelLinear.shard_(pair.down, group, **options)


def shard_gated(mlp, group, sequence_parallel):
    TPMLP.shard_(
        mlp, group, up="wi", down="wo", activation="silu", fused=True, gate_first=mlp.gate_first,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip


def shard_attention(attention, group, sequence_parallel):
    TPAttention.shard_(
        attention,
        group,
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.dim,
        qkv="qkv_proj" if hasattr(attention, "qkv_proj") else None,
        causal=attention.causal,
        sequence_parallel=sequence_parallel,
    )


def attend(attention, x):
    return attention(x, x, x, need_weights=False)[0]


def case(make, split, run=None, shape=(2, LENGTH, K)):
    def apply(layer, group):
        SequenceParallel.shard_(layer.norm, group)
        split(layer.inner, group, **sequence(group))

    def call(layer, x):
        if not isinstance(layer.norm, SequenceParallel):
            return layer(x)
        name, dim = layer.norm._tp_group.name, x.dim() - 2
        sizes = sequence_sizes(x.shape[dim], layer.norm._tp_group.size)
        part = regions.scatter_to_sequence_parallel_region(x, name, dim, sizes)
        return regions.gather_from_tensor_model_parallel_region(layer(part), name, dim, sizes)

    return Case(lambda: Layer(make(), run), apply, lambda: [torch.randn(*shape)], call)


def mha(**options):
    return functools.partial(nn.MultiheadAttention, K, 4, **options)


CASES = {
    "mlp": case(lambda: MLP(K, 12, "gelu"), shard),
    "gated_mlp": case(lambda: MLP(K, 12, "silu", gated=True, bias=False), shard),
    "fused_mlp": case(lambda: FusedMLP(K, 6, False), shard_gated),
    "linear_layers": case(Pair, shard_pair),
    "two_dimensions": case(Pair, shard_pair, shape=(LENGTH, K)),
    "attention": case(lambda: DenseAttention(K, 4, 4, 2, causal=True), shard_attention),
    "grouped_fused": case(lambda: DenseAttention(K, 4, 2, 3, fused=True), shard_attention),
    "one_kv_head": case(lambda: DenseAttention(K, 4, 1, 2), shard_attention),
    "multihead": case(mha(batch_first=True), TPMultiheadAttention.shard_, attend),
    "multihead_batch_second": case(
        mha(), TPMultiheadAttention.shard_, attend, shape=(3, LENGTH, K)
    ),
}


def values_task(group, dtypes):
    outputs = []
    for each in CASES.values():
        outputs += [compare(group, each, dtype) for dtype in dtypes]
    return torch.cat([y.flatten().double() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_dense_TP_30_TP_32(pool, world):
    dtypes = [torch.float64, torch.bfloat16] if world == 2 else [torch.float64]
    assert_ranks_agree(pool.run(values_task, dtypes, world_size=world, timeout=60))


def exact_task(group):
    """Whole numbers: gathering and scattering lose nothing, and no token changes its place."""
    pair = CASES["linear_layers"]

    def split(model, group):
        shard_pair(model, group, **sequence(group))

    def call(model, x):
        if not hasattr(model.up, "group"):
            return model(x)
        name, sizes = model.up.group.name, model.up.sequence.sizes
        part = regions.scatter_to_sequence_parallel_region(x, name, 1, sizes)
        return regions.gather_from_tensor_model_parallel_region(model(part), name, 1, sizes)

    exact(group, Case(Pair, split, pair.inputs, call))


@pytest.mark.parametrize("world", [2, 3])
def test_whole_numbers_are_exact(pool, world):
    pool.run(exact_task, world_size=world)


def built_task(group):
    """Built with ``sequence_parallel=True``: as the one that is not, on equal shards."""
    options = {"dtype": torch.float64, "group": group}
    builds = {
        "mlp": functools.partial(TPMLP, K, 12, gated=True, activation="silu"),
        "attention": functools.partial(TPAttention, K, 4, 2, causal=True, rope_theta=1e4),
        "fused": functools.partial(TPAttention, K, 4, fused_qkv=True),
    }
    name, rank = group.group_name, dist.get_rank(group)
    x = torch.randn(2, 6, K, dtype=torch.float64)
    for build in builds.values():
        results = []
        for sequence_parallel in (False, True):
            torch.manual_seed(0)
            module = build(sequence_parallel=sequence_parallel, **options)
            y = module(x.chunk(2, 1)[rank] if sequence_parallel else x)
            if sequence_parallel:
                y = regions.gather_from_tensor_model_parallel_region(y, name, 1)
            results.append(y)
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    # A prefill that fills a cache, on shards; then one token at a time, whole.
    module, cache = build(group=group), KVCache()
    torch.manual_seed(1)
    shards = SequenceShards([2, 2])
    module = TPAttention(K, 4, causal=True, sequence_parallel=shards, **options)
    whole = TPAttention(K, 4, causal=True, **options)
    whole.load_state_dict(module.state_dict())
    expected = whole(x)
    part = module(x[:, :4].chunk(2, 1)[rank], cache=cache)
    shards.active = False
    rest = [module(x[:, i : i + 1], cache=cache) for i in (4, 5)]
    first = regions.gather_from_tensor_model_parallel_region(part, name, 1)
    torch.testing.assert_close(torch.cat((first, *rest), 1), expected, rtol=1e-12, atol=1e-12)


def test_built_modules_and_a_cache(pool):
    pool.run(built_task, world_size=2)


def sent_task(group):
    """One gather and one reduce-scatter each way, and one gather more for dW."""
    for build in (functools.partial(TPMLP, K, 12), functools.partial(TPAttention, K, 4)):
        module = build(group=group, sequence_parallel=True)
        x = torch.randn(2, 4, K, requires_grad=True)
        with count_collectives() as forward:
            y = module(x)
        with count_collectives() as backward:
            y.sum().backward()
        assert {k: forward[k].calls for k in forward} == {"all_gather": 1, "reduce_scatter": 1}
        assert {k: backward[k].calls for k in backward} == {"all_gather": 2, "reduce_scatter": 1}
        assert forward["all_gather"].bytes == 2 * 2 * 4 * K * 4  # of all ranks' tokens


def test_what_is_sent(pool):
    pool.run(sent_task, world_size=2, env=CHECK_OFF)


def dropout_task(group):
    """On shards every rank drops its own; the shared stream goes on alike."""
    torch.manual_seed(2)
    module = TPMLP(K, 12, dropout=0.5, group=group, sequence_parallel=True).train()
    norm = nn.Dropout(0.5)
    SequenceParallel.shard_(norm, group)
    mask = norm(torch.ones(64, 32, K))
    module(mask)
    masks = regions.gather_from_tensor_model_parallel_region(mask, group.group_name, 0).chunk(2)
    assert abs(float((masks[0] == masks[1]).double().mean()) - 0.5) < 0.02
    return torch.rand(3)


def test_dropout_differs_by_shard(pool):
    assert_ranks_agree(pool.run(dropout_task, world_size=2))


def compile_task(group):
    builds = (
        functools.partial(TPMLP, K, 12),
        functools.partial(TPMLP, K, 12, gated=True, activation="silu"),
        functools.partial(TPAttention, K, 4, 2, causal=True, rope_theta=1e4),
    )
    for build in builds:
        torch._dynamo.reset()
        module = build(group=group, sequence_parallel=SequenceShards([3, 2]))
        compiled, results = torch.compile(module, fullgraph=True, backend="aot_eager"), []
        shard = torch.randn(2, 5, K).split([3, 2], 1)[dist.get_rank(group)]
        for forward in (module, compiled):
            module.zero_grad()
            x = shard.clone().requires_grad_()
            y = forward(x)
            y.square().sum().backward()
            grads = [gather_gradient(p, resolve_group(group)) for p in module.parameters()]
            results.append([y.detach(), x.grad, *grads])
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_compiled_equals_eager_TP_39_TP_41(pool):
    pool.run(compile_task, world_size=2, timeout=120)


def errors_task(group):
    rank, messages = dist.get_rank(group), []
    calls = [
        lambda: TPMLP(K, 12, group=group, sequence_parallel="yes"),
        lambda: TPAttention(K, 4, group=group, sequence_parallel=True)(
            torch.ones(1, 2, K), context=torch.ones(1, 3, K)
        ),
        lambda: TPMLP(K, 12, group=group, sequence_parallel=SequenceShards([1, 2]))(
            torch.ones(1, 3, K)
        ),
        lambda: TPMLP(K, 12, group=group, sequence_parallel=True)(torch.ones(1, 2 + rank, K)),
    ]
    for call in calls:
        with pytest.raises((ConfigError, AgreementError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_errors_say_what_to_do(pool):
    for messages in pool.run(errors_task, world_size=2):
        parts = (
            "sequence_parallel='yes' is not known; allowed: False, True, SequenceShards(sizes)",
            "cross-attention needs whole sequences. Fix: sequence_parallel=False",
            "sizes=[1, 2]",
            "and another differs. Fix: pad the sequence to a multiple of the ranks",
        )
        for message, part in zip(messages, parts, strict=True):
            assert part in message, message
