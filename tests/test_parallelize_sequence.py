"""``parallelize(sequence_parallel=True)``: what becomes a region, what is refused, what is sent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.test_sequence_values import found
from tests.models.zoo import build
from tests.modules.comparing import TIGHT
from tpkernels import instrument
from tpkernels.errors import CommunicationError, ConfigError
from tpkernels.modules.class_swap import is_changed
from tpkernels.modules.sequence_parallel import SequenceParallelBlock
from tpkernels.testing import count_collectives

CHECK_OFF = {"TPKERNELS_CHECK": "off"}
WIDTH = 24


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """``mixed`` is what it does to its tokens beside the MLP."""

    def __init__(self, mixed):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.mixed = mixed

    def forward(self, x):
        return self.mixed(x + self.mlp(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, mixed=torch.nn.Identity, between=None, count=2):
        super().__init__()
        self.blocks = nn.ModuleList([Block(mixed()) for _ in range(2)])
        self.between, self.count = between, count

    def forward(self, x):
        for block in self.blocks[: self.count]:
            x = block(x)
            if self.between is not None:
                x = self.between(x)
        return x


class Flat(nn.Module):
    """Its MLP sees the tokens of all sequences one after another, as OPT's does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([FlatBlock(nn.Identity()) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class FlatBlock(Block):
    def forward(self, x):
        return x + self.mlp(self.norm(x).reshape(-1, WIDTH)).view(x.shape)


class Mean(nn.Module):
    def forward(self, x):
        return x + 1e-3 * x.mean(-2, keepdim=True)


class Shift(nn.Module):
    def forward(self, x):
        return x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


class Positions(nn.Module):
    """A table of the length that it was made for."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, WIDTH))

    def forward(self, x):
        return x + self.table


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def raised(call):
    try:
        call()
    except (ConfigError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def refused_task(group):
    """Blocks that read other tokens: all ranks raise, before a result is used."""
    some, messages = torch.randn(2, 6, WIDTH), []
    zeros = torch.zeros(2, 6, WIDTH)  # of equal tokens a mean is each of them
    for mixed, x in ((Mean, some), (Shift, some), (Positions, some), (Mean, zeros)):
        model = Stack(mixed).train()
        model.parallel = tpk.parallelize(model, group, sequence_parallel=True)
        state = torch.get_rng_state()
        messages.append(raised(lambda m=model, x=x: m(x)))
        assert torch.equal(torch.get_rng_state(), state) and model.blocks[0].training
        tpk.unparallelize(model)
        tpk.parallelize(model, group)
        model(x)
    return messages


def test_blocks_that_mix_tokens_are_refused_on_all_ranks(pool):
    for messages in pool.run(refused_task, world_size=2):
        for message in messages:
            assert message.startswith("UnsupportedModuleError: Block in blocks does not compute on")
            assert message.endswith("Fix: sequence_parallel=False")
        assert "a relative difference of" in messages[0] and "raises RuntimeError" in messages[2]


def planned_task(group):
    """What is known not to work is refused before anything has changed."""
    cases = {
        "BatchNorm1d": lambda: Stack(Tokens),
        "attends to another sequence": lambda: build("bert_cross"),
        "'decoder.layers.0.multihead_attn' attends": lambda: build("decoder"),
        "has no repeated blocks": MLP,
        "itself one split module": lambda: nn.Sequential(MLP(), MLP()),
    }
    for text, make in cases.items():
        model = make()
        message = raised(lambda m=model: tpk.parallelize(m, group, sequence_parallel=True))
        assert text in message and "Fix: sequence_parallel=False" in message, message
        assert not any(is_changed(module) for module in model.modules())


def test_refused_before_anything_has_changed(pool):
    pool.run(planned_task, world_size=2)


def lost_task(group):
    """A shard is never taken for the whole, nor another tensor for a shard."""
    x, messages = torch.randn(2, 6, WIDTH), []
    for options in ({"between": nn.Tanh()}, {"count": 1}):
        model = Stack(**options)
        tpk.parallelize(model, group, sequence_parallel=True)
        for _ in range(2):
            messages.append(raised(lambda m=model: m(x)))
    # In place between blocks, and a skipped first block, which only makes the rest whole: right.
    dense = Stack(between=lambda y: y.mul_(0.5)).double()
    model = copy.deepcopy(dense)
    tpk.parallelize(model, group, sequence_parallel=True)
    torch.testing.assert_close(model(x.double()), dense(x.double()), **TIGHT)
    assert model.blocks[1](x.double()).shape == x.shape
    return messages


def test_shards_that_get_lost_are_named(pool):
    for messages in pool.run(lost_task, world_size=2):
        for message in messages[:2]:
            assert "blocks.1: its input (2, 3, 24) was not given by a block of blocks" in message
        for message in messages[2:]:
            assert "Stack left blocks after block blocks.0, not after its last one" in message


def calls_task(group):
    """A block: two gathers and two reduce-scatters forward; nothing else but the norms' sum."""
    model = build("gpt2", torch.float32)
    report = tpk.parallelize(model, group, sequence_parallel=True)
    outside = [r.kind for r in report.replaced if "sequence parallel" not in r.implementation]
    assert outside == ["vocabulary"]
    states, counts = torch.randn(2, 8, WIDTH, requires_grad=True), []
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    blocks = list(model.transformer.h)
    with count_collectives() as first:
        y = blocks[0](states, attention_mask=mask)
    with count_collectives() as last:
        z = blocks[1](y, attention_mask=mask)
    with count_collectives() as back:
        z.square().sum().backward()
    layer = {"all_gather": 2, "reduce_scatter": 2}
    for each in (first, last, back):
        counts.append({kind: each[kind].calls for kind in each})
    assert counts[0] == layer  # cutting the sequence sends nothing
    assert counts[1] == layer | {"all_gather": 3}  # and the end gathers it
    # dY gathered twice a block, x gathered again twice; dX scattered twice; x's gradient at the end
    assert counts[2] == {"all_gather": 4 * 2 + 1, "reduce_scatter": 2 * 2, "all_reduce": 2}
    norms = sum(p.numel() for p in blocks[0].parameters() if p.dim() == 1 and p.numel() == WIDTH)
    assert norms == 6 * WIDTH  # two norms' weights and biases, and two biases that are not sent
    assert back["all_reduce"].bytes == 2 * 4 * WIDTH * 4


def test_collectives_of_a_block(pool):
    env = CHECK_OFF | {"TPKERNELS_OVERLAP": "off"}
    pool.run(calls_task, world_size=2, env=env)


def lengths_task(group):
    """Odd and short sequences, 2-D inputs, hidden states: the dense model's results."""
    for name in ("bert", "llama_gqa", "user", "encoder"):
        dense = build(name)
        model = copy.deepcopy(dense)
        tpk.parallelize(model, group, sequence_parallel=True)
        for shape in ((1, 1), (2, 2), (1, 5), (2, 9)):
            ids = torch.randint(3, 50, shape)
            ours, theirs = (found(name, each, ids) for each in (model, dense))
            close = {"rtol": 1e-11, "atol": 1e-11, "equal_nan": True}  # one token has no loss
            torch.testing.assert_close(ours, theirs, **close)
    for hidden in (True, False):
        options = {"output_hidden_states": hidden, "output_attentions": True}
        for each in (dense := build("bert"), model := copy.deepcopy(dense)):
            each.set_attn_implementation("eager")
            if each is model:
                tpk.parallelize(model, group, sequence_parallel=True)
        ours, theirs = (each(torch.arange(3, 10)[None], **options) for each in (model, dense))
        for key in theirs:
            for a, b in zip(ours[key], theirs[key], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    for make, shape in ((Stack, (7, WIDTH)), (Flat, (2, 7, WIDTH))):
        dense = make().double()
        model = copy.deepcopy(dense)
        tpk.parallelize(model, group, sequence_parallel=True)
        x = torch.randn(shape).double()
        torch.testing.assert_close(model(x), dense(x), **TIGHT)


@pytest.mark.parametrize("world", [2, 3])
def test_lengths_and_recorded_outputs(pool, world):
    pool.run(lengths_task, world_size=world, timeout=60)


def undone_task(group):
    dense = build("bert")
    model = copy.deepcopy(dense)
    before = {name: (type(m), set(m.__dict__)) for name, m in model.named_modules()}
    report = tpk.parallelize(model, group, sequence_parallel=True)
    blocks = [row for row in report.modules if row.kind == "block"]
    assert [row.name for row in blocks] == ["encoder.layer.0", "encoder.layer.1"]
    assert all("sequence parallel" in row.implementation for row in blocks)
    assert all("sequence parallel" in row.implementation for row in report.replaced)
    block = model.encoder.layer[0]
    assert isinstance(block, SequenceParallelBlock) and isinstance(
        block, type(dense.encoder.layer[0])
    )
    assert model.state_dict().keys() == dense.state_dict().keys()
    copied = copy.deepcopy(model)
    for each in (model, copied):
        ours = found("bert", each)
        torch.testing.assert_close(ours, found("bert", dense), rtol=1e-11, atol=1e-11)
    names = {m.layer for m in model.modules() if isinstance(m, tpk.RowParallelLinear)}
    assert "encoder.layer.1.output.dense" in names
    assert block.attention.self._tp.layer == "encoder.layer.0.attention.self"
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight.mul_(1.0)
    tpk.unparallelize(model)
    for name, module in model.named_modules():
        kind, names = before[name]
        assert type(module) is kind and set(module.__dict__) == names, name
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    torch.testing.assert_close(found("bert", model), found("bert", dense), rtol=0, atol=0)
    return str(report)


def test_reported_copied_and_undone(pool):
    report = pool.run(undone_task, world_size=2)[0]
    assert "encoder.layer.{0..1} x2" in report and "SequenceParallelBlock" in report


def one_rank_task(group):
    model = build("gpt2")
    report = tpk.parallelize(model, group, sequence_parallel=True)
    assert not any(row.kind == "block" for row in report.modules)
    with count_collectives() as counts:
        found("gpt2", model)
    assert counts.total.calls == 0


def test_one_rank_has_nothing_to_shard_TP_54(pool):
    pool.run(one_rank_task, world_size=1)


def plan_task(group):
    """A plan by hand: the blocks around what it splits become the region."""
    dense = Stack().double()
    model = copy.deepcopy(dense)
    plan = {"blocks.*.mlp.up": tpk.ColumnParallelLinear, "blocks.*.mlp.down": tpk.RowParallelLinear}
    tpk.parallelize(model, group, plan=plan, sequence_parallel=True)
    x = torch.randn(2, 5, WIDTH).double()
    torch.testing.assert_close(model(x), dense(x), **TIGHT)
    gathering = tpk.ColumnParallelLinear.style(gather_output=True)
    half = Stack()
    tpk.parallelize(half, group, plan={"blocks.*.mlp.up": gathering}, sequence_parallel=True)
    return raised(lambda: half(x.float()))


def test_plans(pool):
    for message in pool.run(plan_task, world_size=2):
        assert "Block in blocks does not compute on shards" in message


class Recorder:
    """Keeps which operation served which layer."""

    def __init__(self):
        self.seen = set()

    def begin(self, kind, name, tensor, details):
        if kind == "operation":
            self.seen.add((name, details["layer"]))

    def end(self, token, details):
        pass


def layers_task(group, name, sequence_parallel):
    model = build(name)
    tpk.parallelize(model, group, sequence_parallel=sequence_parallel)
    recorder = Recorder()
    instrument.record_to(recorder)
    try:
        sum(y.double().sum() for y in found(name, model).values()).backward()
    finally:
        instrument.record_to(None)
    return recorder.seen


LAYERS = {  # one layer's attention and MLP, by what runs them
    "bert": ("encoder.layer.1.attention.self", "encoder.layer.1.output.dense"),
    "gpt2": ("transformer.h.1.attn", "transformer.h.1.mlp"),
    "llama_gqa": ("model.layers.1.self_attn", "model.layers.1.mlp"),
    "encoder": ("encoder.layers.1.self_attn", "encoder.layers.1.linear2"),
    "user": ("blocks.1.attn", "blocks.1.mlp"),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_operation_knows_its_layer(pool, name, sequence_parallel):
    for seen in pool.run(layers_task, name, sequence_parallel, world_size=2, env=CHECK_OFF):
        assert {layer for _, layer in seen} >= set(LAYERS[name])
        assert not [operation for operation, layer in seen if not layer], seen
        gathered = {layer for operation, layer in seen if operation == "all_gather_gemm"}
        assert (LAYERS[name][0] in gathered) is sequence_parallel
