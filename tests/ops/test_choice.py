"""Which implementation serves, and that what was asked for never is silently something else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tpkernels import native, ops
from tpkernels.envs import IMPLEMENTATIONS
from tpkernels.errors import ConfigError
from tpkernels.library import OP_NAMES
from tpkernels.ops import choice


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


def test_every_implementation_has_a_reason():
    listed = choice.implementations()
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


@pytest.mark.parametrize("name", ["onednn", "triton", "cuda", "cublaslt"])
def test_what_cannot_serve_raises_with_the_reason(ask, name):
    ask(name)
    with pytest.raises(ConfigError, match=rf"TPKERNELS_GEMM={name} .* cannot serve: .*Fix: "):
        ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3))
    ask(None)
    assert ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3)).sum() == 24


@pytest.mark.skipif(native.load() is not None, reason="the compiled kernels are there")
def test_cpu_without_a_build_raises(ask):
    ask("cpu")
    with pytest.raises(ConfigError, match="TPKERNELS_GEMM=cpu was asked for and cannot serve"):
        ops.gemm_act(torch.ones(2, 3), torch.ones(4, 3))


def test_an_unknown_name_lists_the_known(ask):
    with pytest.raises(ConfigError, match="TPKERNELS_GEMM='fast' is not known; allowed: auto, ref"):
        ask("fast")


def test_importing_the_ops_never_initialises_cuda():
    code = "import tpkernels.ops, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
