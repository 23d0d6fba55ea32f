"""Training split models: dropout, optimizer steps, recomputation, autocast, ``torch.compile``."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models import zoo
from tests.models.zoo import batch, build, outputs, scalar
from tests.modules.comparing import assert_ranks_agree
from tpkernels.checkpoint import full_state_dict
from tpkernels.comm.group import resolve_group
from tpkernels.modules.parameters import gather_gradient
from tpkernels.parallelize import parallelize
from tpkernels.testing import count_collectives

WITH_DROPOUT = ("bert", "bert_mlm", "gpt2", "encoder", "user", "llama_dropout")


def training_model(name):
    if name == "llama_dropout":
        torch.manual_seed(0)
        return zoo.llama(attention_dropout=0.2).double().train()
    return build(name).train()


def call(name, model):
    return outputs("llama_gqa" if name == "llama_dropout" else name, model)


def dropout_task(group, name):
    """Replicated activations and weights have the same bits on all ranks, through steps."""
    model = training_model(name)
    parallelize(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        found = call(name, model)
        loss = scalar(found)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().flatten())
    replicated = [p for p in model.parameters() if type(p) is torch.nn.Parameter]
    assert replicated
    assert losses[0] != losses[1]
    torch.manual_seed(4)
    first = call(name, model)
    second = call(name, model)
    key = list(first)[-1]
    assert not torch.equal(first[key], second[key]), "no dropout took place"
    model.eval()
    assert torch.equal(call(name, model)[key], call(name, model)[key])  # TP-36
    return torch.cat([*losses, *(p.detach().flatten() for p in replicated), torch.rand(2).double()])


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_ranks_agree_through_training_with_dropout_TP_35_TP_36(pool, name):
    assert_ranks_agree(pool.run(dropout_task, name, world_size=2, timeout=60))


def masks_task(group, name):
    """Of the attention weights, each rank drops others; eager attention shows them."""
    model = training_model(name)
    model.set_attn_implementation("eager")
    parallelize(model, group)
    ids, mask = batch()
    ids, mask = ids[:1], mask[:1]
    weights = model(ids, attention_mask=mask, output_attentions=True).attentions[0]
    dropped = weights == 0.0
    if name == "gpt2":
        dropped = dropped.tril()
    assert dropped.any()
    mine, others = dropped.chunk(2, dim=1)
    assert not torch.equal(mine, others)
    return dropped


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_attention_dropout_differs_per_rank(pool, name):
    assert_ranks_agree(pool.run(masks_task, name, world_size=2))


def recompute_task(group, name):
    """Gradient checkpointing repeats the dropout masks of every rank."""
    model = training_model(name)
    parallelize(model, group)
    found = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(6)
        scalar(call(name, model)).backward()
        resolved = resolve_group(group)
        found.append([gather_gradient(p, resolved) for p in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        assert (plain is None) == (recomputed is None)
        assert plain is None or torch.equal(plain, recomputed)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_dropout"])
def test_recomputation_with_dropout_TP_51(pool, name):
    pool.run(recompute_task, name, world_size=2, timeout=60)


def steps_task(group, name):
    """Optimizer steps give the dense model's weights (no dropout)."""
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    for each in (dense, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-4, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            scalar(outputs(name, each)).backward()
            optimizer.step()
    whole, expected = full_state_dict(model), dense.state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(
            whole[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", ["gpt2", "llama_mqa_tied", "encoder"])
def test_optimizer_steps_equal_dense(pool, name):
    pool.run(steps_task, name, world_size=2, timeout=60)


def accumulate_task(group, name):
    """Gradients of several backward passes add up, as the dense model's do."""
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    ids = torch.randint(3, 50, (4, 6))
    for each in (dense, model):
        for part in ids.chunk(2):
            each(part, labels=part).loss.backward()
    resolved, expected = resolve_group(group), dict(dense.named_parameters())
    for key, parameter in model.named_parameters():
        grad = gather_gradient(parameter, resolved)
        torch.testing.assert_close(grad, expected[key].grad, rtol=1e-10, atol=1e-11)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, dense(ids).logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["gpt2", "llama_uneven"])
def test_gradient_accumulation_and_inference_mode(pool, name):
    pool.run(accumulate_task, name, world_size=2, timeout=60)


def autocast_task(group, name):
    dense = build(name, torch.float32)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = outputs(name, model), outputs(name, dense)
    truth = outputs(name, dense)
    for key, value in ours.items():
        if value.is_floating_point() and value.dim():
            assert value.dtype is theirs[key].dtype, key
            error, eager = (
                (v - truth[key]).norm() / truth[key].norm() for v in (value, theirs[key])
            )
            assert error <= 2 * eager + torch.finfo(torch.bfloat16).eps, key
    scalar(ours).backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_gqa", "encoder"])
def test_autocast(pool, name):
    pool.run(autocast_task, name, world_size=2, timeout=60)


def compile_task(group, name):
    torch._dynamo.reset()
    model = build(name, torch.float32)
    parallelize(model, group)
    ids, mask = batch()
    arguments = {"attention_mask": mask} | ({"use_cache": False} if name == "llama_gqa" else {})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for forward in (model, compiled):
        model.zero_grad()
        found = forward(ids, **arguments)
        found = found if isinstance(found, torch.Tensor) else found[0]
        found.square().sum().backward()
        resolved = resolve_group(group)
        grads = {n: gather_gradient(p, resolved) for n, p in model.named_parameters()}
        results.append({"output": found.detach()} | grads)
    eager, ours = results
    for key, value in eager.items():
        if value is None:  # a compiled graph gives zeros to what no output needs
            assert ours[key] is None or not ours[key].any(), key
        else:
            assert (ours[key] - value).abs().max() <= 1e-5 * value.abs().max(), key
    return ours["output"]


@pytest.mark.parametrize("name", ["bert", "llama_gqa", "user"])
def test_compiled_model_equals_eager_TP_41(pool, name):
    assert_ranks_agree(pool.run(compile_task, name, world_size=2, timeout=120))


def collectives_task(group):
    """Each layer has two all-reduces forward and two backward; the rest is embedding and head."""
    model = build("llama_gqa", torch.float32)
    parallelize(model, group)
    ids, mask = batch()
    with count_collectives() as forward:
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    tokens, hidden = ids.numel(), 24 * 4
    assert (forward["all_reduce"].calls, forward["all_gather"].calls) == (2 * 2 + 1, 1)
    assert forward["all_reduce"].bytes == 5 * tokens * hidden
    with count_collectives() as backward:
        logits.sum().backward()
    # attention and MLP of each layer, and the head's input
    assert (backward["all_reduce"].calls, backward.total.calls) == (5, 5)
    assert backward["all_reduce"].bytes == 5 * tokens * hidden


def test_collectives_of_a_whole_model(pool):
    pool.run(collectives_task, world_size=2, env={"TPKERNELS_CHECK": "off"})
