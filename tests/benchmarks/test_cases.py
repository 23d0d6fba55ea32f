"""The two benchmarks' cases: what they compute is right, and the gate sees what is not."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.test_harness import FakeTimer
from tpkernels.benchmarks import gemm_gelu, mlp, variants
from tpkernels.benchmarks.harness import Settings, Variant, run_case
from tpkernels.benchmarks.shapes import Shard, custom
from tpkernels.ops import choice

CPU = torch.device("cpu")
ONCE = Settings(1, 1, 1)
PLAIN = Shard("custom", 1, 33, 40, 24, "gelu_tanh", False, True)
GATED = Shard("custom", 1, 33, 40, 24, "silu", True, False)
NO_BIAS = Shard("custom", 1, 33, 40, 24, "gelu", False, False)


def errors(case):
    return {each.variant.name: each.error for each in run_case(case, FakeTimer(), ONCE)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", gemm_gelu.ACTS)
def test_gemm_gelu(act, dtype):
    found = errors(gemm_gelu.case(PLAIN, act, dtype, CPU, compile=False))
    assert found.pop("cublaslt") == "cannot run: needs CUDA"
    assert set(found) >= {"eager", "ours", "ours:reference"}
    assert set(found.values()) == {None}


@pytest.mark.parametrize("shard", [PLAIN, GATED, NO_BIAS], ids=["plain", "gated", "no bias"])
@pytest.mark.parametrize("op", [mlp.FORWARD, mlp.FORWARD_BACKWARD])
def test_mlp(op, shard):
    found = errors(mlp.case(op, shard, torch.float32, CPU, compile=False))
    assert set(found) >= {"eager", "ours", "ours:reference"}
    assert set(found.values()) == {None}


@pytest.mark.parametrize("shard", [PLAIN, GATED], ids=["plain", "gated"])
def test_every_gradient_of_the_mlp_is_gated(shard):
    case = mlp.case(mlp.FORWARD_BACKWARD, shard, torch.float32, CPU, compile=False)
    eager = case.variants[0]
    names = [truth.name for truth in case.truths(case.make_inputs())]
    assert names == (
        ["y", "dx", "dw_up", "dw_gate", "dw_down"]
        if shard.gated
        else ["y", "dx", "dw_up", "db_up", "dw_down", "db_down"]
    )

    def spoiled(index):
        def run(inputs):
            outputs = list(eager.run(inputs))
            outputs[index] = outputs[index] * 1.001
            return outputs

        return run

    case.variants[1:] = [Variant(name, spoiled(i)) for i, name in enumerate(names)]
    found = errors(case)
    for name in names:
        assert found[name].startswith(f"wrong: {name}: relative error 1.0")


def test_torch_compile_is_a_variant_and_its_failure_is_a_row(monkeypatch):
    def no_compiler(function, **options):
        def call(*arguments):
            raise RuntimeError("no C++ compiler was found")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    found = errors(gemm_gelu.case(PLAIN, "gelu", torch.float32, CPU))
    assert found["compile"] == "cannot run: RuntimeError: no C++ compiler was found"
    assert found["ours"] is None


def test_each_variant_of_ours_runs_by_its_own_implementation(monkeypatch):
    asked = {}
    case = gemm_gelu.case(PLAIN, "gelu", torch.float32, CPU, compile=False)
    for variant in case.variants:
        if variant.name.startswith(variants.OURS):
            with variant.within():
                asked[variant.name] = choice.asked()
    assert asked.pop("ours") == "auto"
    assert asked and all(name == f"ours:{used}" for name, used in asked.items())
    assert "ours:triton" not in asked  # an interpreter is not measured
    assert choice.asked() == choice.envs.gemm()


def test_inputs_are_random_and_the_same_every_time():
    (shard,) = custom([(8, 16, 32)])
    first, second = (gemm_gelu.make_inputs(shard, torch.float32, CPU) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert all(tensor.std() > 0.05 for tensor in first)
