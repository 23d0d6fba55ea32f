"""Sequence-parallel models against the dense ones: outputs and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.test_values import compare_to
from tests.models.zoo import HUGGING_FACE, batch, build, scalar
from tests.modules.comparing import assert_ranks_agree
from tpkernels.comm.group import resolve_group
from tpkernels.modules.parameters import gather_gradient
from tpkernels.modules.sequence_parallel import SequenceParallelBlock
from tpkernels.overlap import sequence_sizes
from tpkernels.parallelize import parallelize
from tpkernels.testing import assert_two_times

FAMILIES = ("bert", "bert_mlm", "gpt2", "llama_gqa", "llama_mqa_tied", "encoder", "user")


def found(name, model, ids=None, **options):
    """Outputs by name, without hidden states, whose recording keeps the sequence whole."""
    given, mask = batch()
    ids, mask = (given, mask) if ids is None else (ids, torch.ones_like(ids))
    if name not in HUGGING_FACE:
        return {"output": model(ids, attention_mask=mask)}
    labels = {} if name == "bert" else {"labels": ids}
    result = model(ids, attention_mask=mask, **labels, **options)
    keys = ("loss", "logits", "last_hidden_state", "pooler_output")
    return {key: result[key] for key in keys if result.get(key) is not None}


def gradients(name, model, group=None, ids=None, **options):
    """Outputs and whole gradients by name."""
    model.zero_grad()
    results = found(name, model, ids, **options)
    scalar(results).backward()
    resolved = None if group is None else resolve_group(group)
    grads = {
        f"d {key}": p.grad if resolved is None else gather_gradient(p, resolved)
        for key, p in model.named_parameters()
    }
    return {k: v.detach() for k, v in (results | grads).items() if v is not None}


def values_task(group, name):
    """Seven tokens: uneven shards. Outputs and gradients are the dense model's."""
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group, sequence_parallel=True)
    seen = []
    for module in model.modules():
        if isinstance(module, SequenceParallelBlock):
            module.register_forward_hook(lambda m, args, y: seen.append(y.shape[-2]))
    ours = gradients(name, model, group)
    assert seen == [sequence_sizes(7, group.size())[group.rank()], 7]
    compare_to(ours, gradients(name, dense))
    again = gradients(name, model, group)
    assert all(torch.equal(value, again[key]) for key, value in ours.items())
    return torch.cat([value.flatten() for value in ours.values()])


def half_task(group, name):
    """The two-times rule in the dtypes models are run in."""
    for dtype in (torch.float32, torch.bfloat16):
        dense = build(name, dtype)
        model = copy.deepcopy(dense)
        parallelize(model, group, sequence_parallel=True)
        with torch.no_grad():
            ours, eager = found(name, model), found(name, dense)
            truth = found(name, copy.deepcopy(dense).double())
        for key, value in ours.items():
            if key != "loss":  # transformers computes it in fp32 whatever the model
                assert_two_times(value, eager[key], truth[key], dtype, name=f"{key} in {dtype}")


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa", "user"])
def test_single_and_half_precision(pool, name):
    pool.run(half_task, name, world_size=2, timeout=60)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_TP_30_TP_32(pool, name, world):
    assert_ranks_agree(pool.run(values_task, name, world_size=world, timeout=60))
