"""Which implementation serves, and that what was asked for never is silently something else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from tests.ops.samples import OPS, assert_equal
from tpkernels import native, ops
from tpkernels.envs import IMPLEMENTATIONS
from tpkernels.errors import ConfigError
from tpkernels.kernels import available
from tpkernels.library import OP_NAMES
from tpkernels.ops import choice, serve
from tpkernels.ops.implementations import LOCAL_OPS, implementations


@pytest.fixture
def ask(monkeypatch):
    def set_and_apply(name):
        if name is None:
            monkeypatch.delenv("TPKERNELS_GEMM", raising=False)
        else:
            monkeypatch.setenv("TPKERNELS_GEMM", name)
        choice.apply()

    yield set_and_apply
    monkeypatch.undo()
    choice.apply()


interpreted = pytest.mark.skipif(
    not (available.interpreting() and available.triton_status().available),
    reason="needs Triton and TRITON_INTERPRET=1",
)


@contextmanager
def count_launches():
    """Names of the Triton launchers that are called."""
    launchers, names = serve._triton(), []

    def counting(name, launcher):
        def launch(*args, **kwargs):
            names.append(name)
            return launcher(*args, **kwargs)

        return launch

    counted = {name: counting(name, each) for name, each in vars(launchers).items()}
    with patch.multiple(launchers, **counted):
        yield names


def test_every_implementation_has_a_reason():
    listed = implementations()
    assert tuple(status.name for status in listed) == IMPLEMENTATIONS
    assert all(status.reason for status in listed)
    assert next(status for status in listed if status.name == "reference").available


def test_automatic_choice_is_the_best_that_is_built(ask):
    ask(None)
    built = native.load() is not None
    name, reason = choice.resolve("cpu")
    assert name == ("cpu" if built else "reference")
    assert reason
    assert choice.resolve("cuda")[0] == "reference"
    assert {row[0] for row in choice.resolve_all()} == set(OP_NAMES)


def test_reference_can_always_be_asked_for(ask):
    ask("reference")
    assert choice.resolve("cpu") == ("reference", "TPKERNELS_GEMM=reference")
    assert ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3)).sum() == 24


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("name", ["triton", "cuda", "cublaslt"])
def test_what_cannot_serve_raises_with_the_reason(ask, monkeypatch, name, op):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = op.integers((2,), 3, 4)
    ask(name)
    with pytest.raises(ConfigError, match=rf"TPKERNELS_GEMM={name} .* cannot serve: .*Fix: "):
        op.run(tensors, "relu")
    ask(None)
    assert_equal(op.run(tensors, "relu"), op.expected(tensors, "relu"))


@pytest.mark.skipif(native.load() is not None, reason="the compiled kernels are there")
def test_cpu_without_a_build_raises(ask):
    ask("cpu")
    with pytest.raises(ConfigError, match="TPKERNELS_GEMM=cpu was asked for and cannot serve"):
        ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3))


def test_an_unknown_name_lists_the_known(ask):
    with pytest.raises(ConfigError, match="TPKERNELS_GEMM='fast' is not known; allowed: auto, ref"):
        ask("fast")


def test_every_local_op_is_served_on_cuda_and_has_samples():
    assert tuple(serve.KERNELS) == tuple(LOCAL_OPS)
    assert {op.name for op in OPS} == set(LOCAL_OPS)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has_kernel(f"tpkernels::{name}", "CUDA") for name in LOCAL_OPS)


def test_using_nests_and_restores(ask):
    ask(None)
    before = choice.resolve("cpu")[0]
    with choice.using("reference"):
        assert choice.resolve("cpu")[0] == "reference" and not choice._registered
        with choice.using("auto"):
            assert choice.resolve("cpu")[0] == before
        with pytest.raises(ValueError, match="mine"), choice.using("onednn"):
            raise ValueError("mine")
        assert choice.asked() == "reference"
    assert choice.resolve("cpu")[0] == before and choice.asked() == "auto"
    ask("reference")
    with choice.using("auto"):
        assert choice.resolve("cpu")[0] == before
    assert choice.asked() == "reference"


def test_using_names_itself_and_an_unknown_name():
    with (
        choice.using("cublaslt"),
        pytest.raises(ConfigError, match=r"choice\.using\('cublaslt'\) was asked for and cannot"),
    ):
        ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4), "relu")
    with pytest.raises(ConfigError, match="not an implementation; allowed: auto, reference"):
        choice.using("fast").__enter__()
    assert choice.asked() != "fast"


@interpreted
def test_the_interpreter_serves_cpu_tensors_while_it_is_asked_for(ask):
    ask(None)
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with count_launches() as launches:
        assert ops.gemm_act(x, weight).sum() == 24
        assert launches == []  # never by automatic choice
        with choice.using("triton"):
            assert choice.resolve("cpu")[0] == "triton"
            assert ops.gemm_act(x, weight).sum() == 24
            assert launches == ["gemm_act"]
        assert ops.gemm_act(x, weight).sum() == 24
        assert launches == ["gemm_act"]
    assert has_kernel("tpkernels::gemm_act", "CPU") == choice._registered


@interpreted
@pytest.mark.parametrize("op", OPS, ids=str)
def test_float64_raises_under_triton(ask, op):
    ask("triton")
    with pytest.raises(ConfigError, match="no float64; allowed: float32, bfloat16, float16"):
        op.run(op.integers((2,), 3, 4, torch.float64), "relu")


def test_importing_the_ops_never_initialises_cuda_nor_imports_triton():
    code = """
import sys, torch
by_torch = "triton" in sys.modules or torch.version.cuda is not None  # which may itself
import tpkernels.ops
tpkernels.ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3))
assert not torch.cuda.is_initialized()
assert "tpkernels.kernels.launch" not in sys.modules
assert by_torch or "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
