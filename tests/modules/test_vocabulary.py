"""``VocabParallelEmbedding`` and ``vocab_parallel_cross_entropy`` against their dense forms."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.modules.comparing import TIGHT, Case, assert_ranks_agree, compare
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tpkernels.modules.parameters import gather_full
from tpkernels.shard_spec import chunk_sizes
from tpkernels.testing import RankError, assert_two_times, count_collectives


def ids(vocabulary, *shape):
    return lambda: [torch.randint(vocabulary, shape)]


def embedding_case(rows, *shape, padding_idx=None):
    return Case(
        lambda: nn.Embedding(rows, 6, padding_idx),
        VocabParallelEmbedding.shard_,
        ids(rows, *shape),
    )


EMBEDDINGS = {
    "even": embedding_case(12, 3, 4),
    "uneven": embedding_case(5, 7),
    "fewer_rows_than_ranks": embedding_case(3, 8),
    "padding": embedding_case(9, 2, 8, padding_idx=1),
    "padding_at_the_end": embedding_case(5, 8, padding_idx=-1),
    "one_id": embedding_case(7),
    "no_ids": embedding_case(7, 0, 3),  # TP-21
}


def embedding_task(group):
    outputs = []
    for case in EMBEDDINGS.values():
        outputs.append(compare(group, case, torch.float64))
        compare(group, case, torch.bfloat16)
    return torch.cat([y.flatten() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_embedding_equals_dense(pool, world):
    assert_ranks_agree(pool.run(embedding_task, world_size=world))


def embedding_alone_task(group):
    torch.manual_seed(2)
    ours = VocabParallelEmbedding(10, 4, padding_idx=3, group=group)
    torch.manual_seed(2)
    dense = nn.Embedding(10, 4, padding_idx=3)
    assert torch.equal(gather_full(ours.weight, ours.group), dense.weight)
    everything = torch.arange(10)
    assert torch.equal(ours(everything), dense(everything))
    with count_collectives() as counts:
        y = ours(everything)
    assert (counts.total.calls, counts["all_reduce"].bytes) == (1, 10 * 4 * 4)
    with count_collectives() as counts:
        y.sum().backward()
    assert counts.total.calls == 0
    ours(torch.tensor([3, 10]))


def test_embedding_alone_and_an_id_outside_it(pool):
    with pytest.raises(RankError, match="id 10 is outside the vocabulary of 10 rows") as caught:
        pool.run(embedding_alone_task, world_size=3, env={"TPKERNELS_CHECK": "off"})
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_embeddings_that_cannot_be_split(options):
    embedding = nn.Embedding(8, 4, **options)
    with pytest.raises(UnsupportedModuleError, match=f"wte: .*{next(iter(options))}"):
        VocabParallelEmbedding.shard_(embedding, None, name="wte")
    assert type(embedding) is nn.Embedding


def part(logits, vocabulary, group):
    sizes = chunk_sizes(vocabulary, group.size())
    start = sum(sizes[: group.rank()])
    return logits[..., start : start + sizes[group.rank()]]


LOSSES = (
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"ignore_index": 2},
)


def loss_task(group, vocabulary, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(3, 4, vocabulary) * 4).to(dtype)
    target = torch.randint(vocabulary, (3, 4))
    target[0, 0] = -100
    results = []
    for options in LOSSES:
        if options.get("ignore_index") == 2:
            target = target.clamp_min(0)
        ours = part(logits, vocabulary, group).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            ours, target, group=group, vocab_size=vocabulary, **options
        )
        weight = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        (loss * weight).sum().backward()
        given, grad = ours.detach(), ours.grad
        assert torch.equal(given, part(logits, vocabulary, group))
        truth, eager = (
            dense_loss(logits, kind, target, weight, options) for kind in (torch.float64, dtype)
        )
        truth_grad, eager_grad = (part(g, vocabulary, group) for g in (truth[1], eager[1]))
        if dtype is torch.float64:
            torch.testing.assert_close(loss.detach(), truth[0], **TIGHT)
            torch.testing.assert_close(grad, truth_grad, **TIGHT)
        else:
            assert loss.dtype is torch.float32
            assert_two_times(loss, eager[0], truth[0], dtype, name=f"loss {options}")
            assert_two_times(grad, eager_grad, truth_grad, name=f"gradient {options}")
        results.append(loss.detach().flatten())
    return torch.cat(results)


def any_split_task(group, sizes):
    """Without vocab_size the parts may be of any size, none included; also under torch.compile."""
    torch.manual_seed(0)
    logits = torch.randn(5, sum(sizes), dtype=torch.float64)
    target = torch.tensor([0, sum(sizes) - 1, sizes[0] - 1, 2, 1])
    truth, truth_grad = dense_loss(logits[None], torch.float64, target, torch.ones(()), {})
    compiled = torch.compile(vocab_parallel_cross_entropy, backend="aot_eager")
    for function in (vocab_parallel_cross_entropy, compiled):
        ours = logits.split(sizes, 1)[group.rank()].clone().requires_grad_()
        loss = function(ours, target, group=group)
        loss.backward()
        torch.testing.assert_close(loss.detach(), truth, **TIGHT)
        expected = truth_grad[0].split(sizes, 1)[group.rank()]
        torch.testing.assert_close(ours.grad, expected, **TIGHT)
    if group.size() > 1:
        torch._dynamo.reset()
        whole = torch.compile(vocab_parallel_cross_entropy, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Fix: pass vocab_size"):
            whole(ours, target, group=group)


@pytest.mark.parametrize("sizes", [(7,), (6, 5), (2, 9), (3, 0, 4), (1, 2, 8)], ids=str)
def test_cross_entropy_without_vocab_size(pool, sizes):
    pool.run(any_split_task, sizes, world_size=len(sizes))


def dense_loss(logits, dtype, target, weight, options):
    whole = logits.to(dtype).clone().requires_grad_()
    flat = F.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    loss = flat.view(weight.shape)
    (loss * weight.to(loss.dtype)).sum().backward()
    return loss.detach(), whole.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world", "vocabulary"), [(1, 7), (2, 12), (3, 7), (4, 5)])
def test_cross_entropy_equals_dense(pool, world, vocabulary, dtype):
    assert_ranks_agree(pool.run(loss_task, vocabulary, dtype, world_size=world))


def extreme_task(group):
    """Large logits neither overflow nor lose the small ones; no tokens and no targets are fine."""
    logits = torch.tensor([[1e4, 0.0, -1e4, 5.0], [-1e4, -1e4, -1e4, -1e4], [0.0] * 4])
    logits[2:] = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf])  # masked out
    target = torch.tensor([1, 3, 1])
    ours = part(logits, 4, group).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, target, group=group, reduction="none")
    loss.sum().backward()
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, part(whole.grad, 4, group))
    empty = vocab_parallel_cross_entropy(logits[:0, :2], target[:0], group=group, reduction="sum")
    assert empty.item() == 0.0
    ignored = torch.full((3,), -100)
    nothing = vocab_parallel_cross_entropy(part(logits, 4, group), ignored, group=group)
    assert bool(nothing.isnan()) and bool(F.cross_entropy(logits, ignored).isnan())


def test_cross_entropy_of_extreme_logits(pool):
    pool.run(extreme_task, world_size=2)


def wire_task(group):
    """Per token one maximum and three sums, whatever the vocabulary; backward sends nothing."""
    logits = torch.randn(6, 500, requires_grad=True)
    target = torch.randint(1000, (6,))
    for vocab_size, gathers in ((1000, 0), (None, 1)):
        with count_collectives() as counts:
            loss = vocab_parallel_cross_entropy(logits, target, group=group, vocab_size=vocab_size)
        assert (counts["all_reduce"].calls, counts["all_reduce"].bytes) == (2, 6 * 4 * 4)
        assert counts.total.calls == 2 + gathers
    with count_collectives() as counts:
        loss.backward()
    assert counts.total.calls == 0


def test_cross_entropy_on_the_wire(pool):
    pool.run(wire_task, world_size=2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"target": torch.tensor([0, 8])}, IndexError, r"target 8 is outside \[0, 8\)"),
        ({"target": torch.tensor([0.0, 1.0])}, ConfigError, "integer ids"),
        ({"target": torch.tensor([[0, 1]])}, ConfigError, r"of shape \(2,\)"),
        ({"vocab_size": 9}, ConfigError, "vocab_size=9 .*9 columns, but logits have 8"),
        ({"label_smoothing": 1.5}, ConfigError, "label_smoothing=1.5"),
        ({"reduction": "avg"}, ConfigError, "allowed: mean, sum, none"),
        ({"logits": torch.ones(2, 8, dtype=torch.int64)}, ConfigError, "floating point"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(changed, error, message):
    arguments = {"logits": torch.randn(2, 8), "target": torch.tensor([0, 1])} | copy.copy(changed)
    with pytest.raises(error, match=message):
        vocab_parallel_cross_entropy(**arguments)
