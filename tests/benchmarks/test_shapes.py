"""The shapes are those of the models, and their ceilings and bounds follow from arithmetic."""

from __future__ import annotations

import pytest
import torch

from tpkernels.benchmarks import gemm_gelu, mlp, shapes
from tpkernels.benchmarks.ceilings import Ceilings, Work, measure_ceilings
from tpkernels.benchmarks.timers import CpuTimer, cache_bytes
from tpkernels.errors import ConfigError

H200 = Ceilings(790e12, 4.3e12)


def test_every_model_at_every_split_and_number_of_tokens():
    found = list(shapes.shards(shapes.MODELS, shapes.TP, shapes.M))
    assert len(found) == 5 * 4 * 5
    assert sorted({each.m for each in found}) == [1, 16, 256, 2048, 8192]
    sizes = {(each.model, each.tp): (each.n, each.k) for each in found}
    assert sizes["gpt2-xl", 1] == (6400, 1600)
    assert sizes["gpt3-13b", 8] == (2560, 5120)
    assert sizes["gpt3-175b", 4] == (12288, 12288)
    assert sizes["llama3-8b", 2] == (7168, 4096)
    assert sizes["llama3-70b", 8] == (3584, 8192)
    assert {each.model for each in found if each.gated} == {"llama3-8b", "llama3-70b"}
    assert all(each.bias != each.gated for each in found)


def test_the_order_is_that_of_the_request_and_models_take_turns():
    found = shapes.shards(["gpt2-xl", "gpt3-13b"], [8, 1], [8192, 16])
    assert [(each.m, each.tp, each.model) for each in found] == [
        (m, tp, model) for m in (8192, 16) for tp in (8, 1) for model in ("gpt2-xl", "gpt3-13b")
    ]


def test_a_split_that_does_not_divide_names_one_that_does():
    with pytest.raises(ConfigError, match=r"--tp 3 does not divide d_ff 6400 of gpt2-xl.*Fix"):
        list(shapes.shards(["gpt2-xl"], [3], [1]))


@pytest.mark.parametrize("k", [1600, 4096, 12288])
def test_the_bound_of_fusion_is_367_over_k_on_an_h200(k):
    (shard,) = shapes.custom([(8192, 4 * k, k)])
    bound = gemm_gelu.work(shard).fusion_bound(H200, 2)
    assert bound == pytest.approx(1 + 367 / k, rel=2e-3)


def test_a_limit_is_the_larger_of_arithmetic_and_bytes():
    large, small = Work(((8192, 8192, 8192),), 0), Work(((1, 8192, 8192),), 0)
    assert large.limit_us(H200, 2) == pytest.approx(2 * 8192**3 / 790e12 * 1e6)
    assert small.limit_us(H200, 2) == pytest.approx(2 * (8192**2 + 2 * 8192) / 4.3e12 * 1e6)
    assert small.limit_us(H200, 2, cold=False) == pytest.approx(2 * 8192**2 / 790e12 * 1e6)
    assert Work((), 0).fusion_bound(H200, 2) is None


@pytest.mark.parametrize("gated", [False, True])
def test_backward_has_twice_the_gemms_of_forward(gated):
    (shard,) = shapes.custom([(64, 48, 32)], gated=gated)
    flops = {
        op: sum(2 * m * n * k for m, n, k in mlp.work(op, shard).gemms)
        for op in (mlp.FORWARD, mlp.FORWARD_BACKWARD)
    }
    assert flops[mlp.FORWARD] == (6 if gated else 4) * 64 * 48 * 32
    assert flops[mlp.FORWARD_BACKWARD] == 3 * flops[mlp.FORWARD]


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr("tpkernels.benchmarks.ceilings._GEMM_SIZE", {"cpu": 256})
    monkeypatch.setattr("tpkernels.benchmarks.ceilings._COPY_BYTES", {"cpu": 1 << 22})
    found = measure_ceilings(torch.device("cpu"), torch.float32, CpuTimer())
    assert 1e8 < found.flops < 1e14
    assert 1e8 < found.bandwidth < 1e13


def test_the_cpu_has_a_cache():
    assert 1 << 16 <= cache_bytes(torch.device("cpu")) <= 256 << 20
