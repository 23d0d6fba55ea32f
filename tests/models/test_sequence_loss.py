"""The loss of causal language models on parts of the vocabulary: transformers' loss exactly."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.zoo import batch, build
from tpkernels.comm.group import resolve_group
from tpkernels.modules.causal_lm_loss import VocabParallelLoss
from tpkernels.modules.parameters import gather_gradient
from tpkernels.parallelize import parallelize, unparallelize
from tpkernels.testing import assert_two_times

IGNORED = -100
CASES = {
    "padding ignored": {},
    "items in batch": {"num_items_in_batch": 5},
    "items in a tensor": {"num_items_in_batch": torch.tensor(7)},
    "another ignored label": {"ignore_index": 5},
}


def labels():
    ids, mask = batch()
    return torch.where(mask == 1, ids, IGNORED)


def loss_task(group, sequence_parallel):
    ids, mask = batch()
    for name in ("gpt2", "llama_mqa_tied"):
        dense = build(name, torch.float32)
        model = copy.deepcopy(dense)
        parallelize(model, group, sequence_parallel=sequence_parallel)
        assert isinstance(model.loss_function, VocabParallelLoss)
        cases = CASES | {"shifted": {"shift_labels": labels().roll(-1, 1)}}
        for case, options in cases.items():
            found = []
            for each in (model, dense, copy.deepcopy(dense).double()):
                each.zero_grad()
                target = labels() if case != "another ignored label" else ids
                result = each(ids, attention_mask=mask, labels=target, **options)
                (2 * result.loss + result.logits[0, 1, 3]).backward()  # logits stay differentiable
                grads = [gather_gradient(p, resolve_group(group)) for p in each.parameters()]
                found.append([result.loss.detach(), result.logits.detach(), *grads])
            for ours, eager, truth in zip(*found, strict=True):
                assert ours.dtype is eager.dtype
                if ours.dim() == 0:  # one number, of which the truth is in fp32 too
                    torch.testing.assert_close(ours, eager)
                else:
                    assert_two_times(ours, eager, truth, torch.float32, name=f"{name}, {case}")
        unparallelize(model)
        assert not isinstance(model.loss_function, VocabParallelLoss)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_and_gradients(pool, sequence_parallel):
    pool.run(loss_task, sequence_parallel, world_size=2, timeout=60)


def saved_task(group):
    """No fp32 row of the whole vocabulary is kept for backward."""
    ids, mask = batch()
    model = build("gpt2", torch.float32)
    vocabulary, saved = model.config.vocab_size, []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    for split in (False, True):
        if split:
            parallelize(model, group)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, attention_mask=mask, labels=ids)
        tokens = ids.numel()
        assert ((tokens, vocabulary) in saved) is not split, saved


def test_no_whole_softmax_is_kept(pool):
    pool.run(saved_task, world_size=2, timeout=60)


def other_task(group):
    """Logits that were changed after the gather go through transformers' own loss."""
    ids, _ = batch()
    model = build("gpt2", torch.float32)
    dense = copy.deepcopy(model)
    parallelize(model, group)
    logits = model(ids).logits
    vocabulary = model.config.vocab_size
    expected = dense.loss_function(dense(ids).logits * 2, ids, vocabulary)
    changed = model(ids).logits
    with torch.no_grad():
        changed.mul_(2)
    for each in (logits * 2, changed):
        torch.testing.assert_close(model.loss_function(each, ids, vocabulary), expected)


def test_changed_logits(pool):
    pool.run(other_task, world_size=2, timeout=60)
