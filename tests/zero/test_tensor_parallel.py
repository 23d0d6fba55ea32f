"""ZeRO over one dimension of a mesh, tensor parallelism over the other: training is as of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.zoo import llama
from tests.zero import samples
from tpkernels.chunked_tensor import ChunkedTensor

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def built(name):
    torch.manual_seed(0)
    kv = {"even": 2, "three heads": 3}[name]
    heads = {"even": 4, "three heads": 3}[name]
    model = llama(num_attention_heads=heads, num_key_value_heads=kv, vocab_size=52, head_dim=6)
    return model.double()


def ids(rank=0, world=1):
    whole = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(1))
    return whole[rank * 4 // world : (rank + 1) * 4 // world]


def step(model, optimizer, clip, tokens):
    optimizer.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    norm = clip(0.5)
    optimizer.step()
    return loss.item(), norm.item()


def trained(group, name, stage):
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    model, dense = built(name), built(name)
    tpk.parallelize(model, mesh["tp"])
    manager = tpk.zero(model, mesh["dp_shard"], stage=stage, prefetch_bytes=6000)
    optimizer = manager.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    truth = torch.optim.AdamW(dense.parameters(), lr=0.01, weight_decay=0.1)
    rank = mesh["dp_shard"].get_local_rank()
    for _ in range(3):
        ours = step(model, optimizer, manager.clip_grad_norm_, ids(rank, 2))
        theirs = step(
            dense, truth, lambda bound: nn.utils.clip_grad_norm_(dense.parameters(), bound), ids()
        )
        assert abs(ours[1] / theirs[1] - 1) < 1e-9  # Z-44, Z-45
    found = samples.full(model)
    assert list(found) == list(dense.state_dict())
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(found[key], value, **CLOSE, msg=lambda m, k=key: f"{k}: {m}")
    assert all(isinstance(p, ChunkedTensor) and p.dim() == 1 for p in manager.parameters())
    assert stage < 3 or samples.all_sharded(manager)
    return sum(p.numel() for p in manager.parameters())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["even", "three heads"])
def test_training_on_2_x_2_is_that_of_one_process(pool, name, stage):
    """Z-44, Z-45: also with parameters split by heads, and each clipped by the one global norm."""
    held = pool.run(trained, name, stage, timeout=60)
    whole = sum(p.numel() for p in built(name).parameters())
    assert whole <= sum(held) < 1.35 * whole  # what tp keeps whole is there twice
