"""``generate()`` of split models: the dense model's tokens, with every usual cache and strategy."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.models.zoo import CAUSAL, PAD, build
from tpkernels.parallelize import parallelize

STRATEGIES = {
    "greedy": {"do_sample": False},
    "no_cache": {"do_sample": False, "use_cache": False},
    "beam": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10, "temperature": 1.5},
    "static_cache": {"do_sample": False, "cache_implementation": "static"},
}


def prompts():
    """Two prompts, the shorter one padded on the left."""
    ids = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate_task(group, name):
    dense = build(name)
    model = copy.deepcopy(dense)
    parallelize(model, group)
    found = []
    for strategy, options in STRATEGIES.items():
        tokens = []
        for each in (dense, model):
            torch.manual_seed(11)
            tokens.append(each.generate(**prompts(), max_new_tokens=6, pad_token_id=PAD, **options))
        assert torch.equal(*tokens), f"{strategy}: {tokens}"
        found.append(tokens[1].flatten())
    assert len({tuple(t.tolist()) for t in found[:4]}) > 1, "all strategies gave one text"
    return torch.cat(found)


@pytest.mark.parametrize("name", CAUSAL)
def test_generate(pool, name):
    world = 3 if name == "llama_uneven" else 2
    results = pool.run(generate_task, name, world_size=world, timeout=60)
    assert all(torch.equal(result, results[0]) for result in results)


def cached_task(group):
    """The cache holds this rank's heads, and a continued forward equals the whole one."""
    dense = build("llama_gqa")
    model = copy.deepcopy(dense)
    parallelize(model, group)
    ids = prompts()["input_ids"][:1]
    with torch.no_grad():
        whole = dense(ids).logits
        start = model(ids[:, :3], use_cache=True)
        rest = model(ids[:, 3:], past_key_values=start.past_key_values)
    torch.testing.assert_close(
        torch.cat((start.logits, rest.logits), 1), whole, rtol=1e-11, atol=1e-11
    )
    return start.past_key_values.layers[0].keys.shape[1]


def test_the_cache_holds_this_ranks_heads(pool):
    assert pool.run(cached_task, world_size=2) == [2, 1]
