"""Parallelized models against the dense ones: outputs, hidden states and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.zoo import HUGGING_FACE, MODELS, batch, build, outputs, scalar
from tests.modules.comparing import TIGHT, assert_ranks_agree
from tpkernels.comm.group import resolve_group
from tpkernels.modules.parameters import gather_gradient
from tpkernels.parallelize import parallelize
from tpkernels.testing import assert_two_times

# fp64 through a model: a few hundred roundings of 1e-16, and of the softmax of masked scores
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def gradients(name, model, group=None, **options):
    """Outputs and whole gradients by name."""
    model.zero_grad()
    found = outputs(name, model, **options)
    scalar(found).backward()
    resolved = None if group is None else resolve_group(group)
    grads = {
        f"d {key}": p.grad if resolved is None else gather_gradient(p, resolved)
        for key, p in model.named_parameters()
    }
    return {k: v.detach() for k, v in (found | grads).items() if v is not None}


def real(name, value):
    """Without gradients PyTorch's encoder leaves out padded tokens; what they give is up to it."""
    return value[batch()[1] == 1] if name.startswith("encoder") else value


def compare_to(ours, dense):
    assert ours.keys() == dense.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, dense[key], **CLOSE, msg=lambda m, k=key: f"{k}: {m}")


def values_task(group, name):
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    ours = gradients(name, model, group)
    compare_to(ours, gradients(name, dense))
    again = gradients(name, model, group)
    assert all(torch.equal(value, again[key]) for key, value in ours.items())
    with torch.no_grad():
        ours = outputs(name, model)
        for key, value in outputs(name, dense).items():
            actual = real(name, ours[key])
            torch.testing.assert_close(actual, real(name, value), **CLOSE)
    return torch.cat([value.flatten() for value in ours.values()])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_hidden_states_and_gradients_TP_28(pool, name, world):
    assert_ranks_agree(pool.run(values_task, name, world_size=world, timeout=60))


def half_task(group, name):
    """The two-times rule in the dtypes models are run in."""
    for dtype in (torch.float32, torch.bfloat16):
        dense = build(name, dtype)
        model = copy.deepcopy(dense)
        parallelize(model, group)
        with torch.no_grad():
            ours, eager = outputs(name, model), outputs(name, dense)
            truth = outputs(name, copy.deepcopy(dense).double())
        for key, value in ours.items():
            if key == "loss":  # transformers computes it in fp32 whatever the model
                continue
            three = (real(name, each[key]) for each in ({key: value}, eager, truth))
            assert_two_times(*three, dtype, name=f"{key} in {dtype}")


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa", "encoder", "user"])
def test_single_and_half_precision(pool, name):
    pool.run(half_task, name, world_size=2, timeout=60)


def one_rank_task(group):
    for name in MODELS:
        dense = build(name)
        model = copy.deepcopy(dense)
        report = parallelize(model, group)
        assert report.replaced and report.parameter_bytes == report.dense_bytes
        compare_to(gradients(name, model, group), gradients(name, dense))


def test_one_rank_TP_54(pool):
    pool.run(one_rank_task, world_size=1, timeout=60)


def attention_task(group, name):
    """Eager attention returns its weights: of all heads, and differentiable."""
    dense = build(name)
    dense.set_attn_implementation("eager")
    model = copy.deepcopy(dense)
    parallelize(model, group)
    ours = gradients(name, model, group, output_attentions=True)
    assert ours["attention 1"].shape[1] == dense.config.num_attention_heads
    compare_to(ours, gradients(name, dense, output_attentions=True))
    return torch.cat([value.flatten() for key, value in ours.items() if "attention" in key[:9]])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_uneven"])
def test_eager_attention_and_its_weights(pool, name):
    assert_ranks_agree(pool.run(attention_task, name, world_size=2, timeout=60))


def checkpointing_task(group, name):
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    expected = gradients(name, dense)
    for reentrant in (False, True):
        model.train()  # recomputation is for training; dropout is off
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare_to(
            gradients(name, model, group, **{"use_cache": False} if name != "bert" else {}),
            expected,
        )


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa"])
def test_gradient_checkpointing_TP_51(pool, name):
    pool.run(checkpointing_task, name, world_size=2, timeout=60)


def lengths_task(group):
    """One token, one sequence, no sequence: whatever the dense model takes (TP-21)."""
    for name in ("bert", "llama_mqa_tied", "encoder", "user"):
        dense = build(name)
        model = copy.deepcopy(dense)
        parallelize(model, group)
        for shape in ((1, 1), (3, 1), (1, 9)):
            ids = torch.randint(3, 50, shape)
            mask = torch.ones_like(ids)
            ours, theirs = model(ids, attention_mask=mask), dense(ids, attention_mask=mask)
            if name in HUGGING_FACE:
                ours, theirs = ours[0], theirs[0]
            torch.testing.assert_close(ours, theirs, **TIGHT)


def test_other_lengths_TP_21(pool):
    pool.run(lengths_task, world_size=2, timeout=60)
