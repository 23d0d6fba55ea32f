"""What is kept for backward is counted by storage, without parameters; sharding it saves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.models.zoo import build
from tpkernels.benchmarks.activation_memory import VARIANTS, Sizes, main, measure, saved_bytes
from tpkernels.parallelize import parallelize


def test_storages_are_counted_once_and_parameters_not():
    linear = nn.Linear(4, 6, bias=False)
    x = torch.randn(8, 4, requires_grad=True)

    def call():
        return linear(x).relu(), linear(x)  # x twice, the weight twice, the relu's output

    assert saved_bytes(call, linear.parameters()) == (8 * 4 + 8 * 6) * 4
    assert saved_bytes(call) == (8 * 4 + 8 * 6 + 6 * 4) * 4
    assert saved_bytes(lambda: linear(x).relu().detach()) == 0  # its graph is gone
    with torch.no_grad():
        assert saved_bytes(call) == 0


def measure_task(group):
    sizes = Sizes(layers=2, width=32, heads=4, batch=2, length=16)
    return measure(sizes, group)


@pytest.mark.parametrize("world", [2, 4])
def test_sequence_parallel_saves(pool, world):
    for found in pool.run(measure_task, world_size=world):
        assert tuple(found) == VARIANTS
        dense, tensor, sequence = found.values()
        assert sequence < tensor < dense
        # All of it is cut but what is per token alone (a norm's mean and deviation are too).
        assert sequence < 1.03 * dense / world
        assert tensor > 1.3 * dense / world


def families_task(group):
    ids, found = torch.randint(3, 50, (2, 16)), {}
    for name in ("bert", "gpt2", "llama_gqa", "user"):
        sizes = []
        for sequence_parallel in (False, True):
            model = build(name, torch.float32).train()
            parallelize(model, group, sequence_parallel=sequence_parallel)
            model(ids, attention_mask=torch.ones_like(ids))
            call = partial(model, ids, attention_mask=torch.ones_like(ids))
            sizes.append(saved_bytes(call, model.parameters()))
        found[name] = sizes
    return found


def test_families_keep_less(pool):
    for found in pool.run(families_task, world_size=2):
        for name, (tensor, sequence) in found.items():
            assert sequence < 0.85 * tensor, (name, tensor, sequence)


def test_one_rank_prints_a_table(capsys):
    sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "1", "--length", "8"]
    assert main(["--nproc", "1", *sizes]) == 0
    assert "| tensor parallel |" in capsys.readouterr().out
