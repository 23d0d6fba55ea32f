"""Every implementation by name on CUDA tensors, and the automatic choice by a measured table."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.ops.samples import OPS, assert_equal
from tpkernels import ops
from tpkernels.errors import ConfigError
from tpkernels.kernels import table
from tpkernels.kernels.config import configs
from tpkernels.ops import choice
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
M, K, N = 256, 128, 320


def drawn(dtype=torch.bfloat16):
    return [t.cuda() for t in OPS[0].normals((M,), K, N, dtype)]


def activated(z, act):
    return F.gelu(z, approximate="tanh") if act == "gelu_tanh" else F.relu(z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["gelu_tanh", "relu"])
def test_cublaslt_is_the_tanh_form_and_relu(act, dtype):
    x, weight, bias = drawn(DTYPES[dtype])
    with choice.using("cublaslt"):
        ours = ops.gemm_act(x, weight, bias, act)
        strided = ops.gemm_act(x, weight.t().contiguous().t(), bias, act)
    eager = activated(F.linear(x, weight, bias), act)
    truth = activated(F.linear(x.double(), weight.double(), bias.double()), act)
    assert_two_times(ours, eager, truth)
    assert_two_times(strided, eager, truth)


def test_cublaslt_gelu_is_not_the_erf_form():
    """The two forms differ by up to 4.7e-4: float32 tells them apart."""
    z, bias = torch.linspace(-4, 4, 512, device="cuda"), torch.zeros(64, device="cuda")
    # K above 1, or nothing is fused
    x, weight = F.pad(z[:, None], (0, 15)), F.pad(torch.ones(64, 1, device="cuda"), (0, 15))
    with choice.using("cublaslt"):
        ours = ops.gemm_act(x, weight, bias, "gelu_tanh")[:, 0].double()
    tanh = (ours - F.gelu(z.double(), approximate="tanh")).abs().max()
    erf = (ours - F.gelu(z.double())).abs().max()
    assert float(erf) > 4e-4 and float(tanh) < float(erf) / 10


def test_cublaslt_of_no_columns_is_the_activated_bias():
    x, weight, bias = (torch.ones(s, device="cuda").neg() for s in ((4, 0), (6, 0), (6,)))
    with choice.using("cublaslt"):
        y = ops.gemm_act(x, weight, bias, "relu")
    assert_equal([y], [torch.zeros(4, 6, device="cuda")])


@pytest.mark.parametrize("name", ["cublaslt", "triton"])
def test_what_it_cannot_serve_is_refused(name):
    x, weight, bias = drawn(torch.float64)
    with choice.using(name), pytest.raises(ConfigError, match=r"cannot serve.*Fix: "):
        ops.gemm_act(x, weight, bias, "relu")
    if name == "cublaslt":
        x, weight, bias = drawn()
        for act, given in (("gelu", bias), ("relu", None), ("silu", bias)):
            with choice.using(name), pytest.raises(ConfigError, match="cannot serve"):
                ops.gemm_act(x, weight, given, act)


@pytest.mark.parametrize("name", ["cpu", "cuda", "onednn"])
def test_implementations_that_are_not_for_cuda_are_refused(name):
    x, weight, bias = drawn()
    with pytest.raises(ConfigError, match=name), choice.using(name):
        ops.gemm_act(x, weight, bias, "relu")


@pytest.mark.parametrize("op", OPS, ids=str)
def test_float64_and_what_was_not_tuned_are_plain_pytorch(op, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "none")
    table.invalidate()
    try:
        for dtype in (torch.float64, torch.bfloat16):
            tensors = [t.cuda() for t in op.normals((9,), 5, 7, dtype)]
            with choice.using("reference"):
                expected = op.run(tensors, "silu")
            assert_equal(op.run(tensors, "silu"), expected)
    finally:
        table.invalidate()


@pytest.mark.parametrize("winner", ["triton", "cublaslt", "reference"])
def test_the_table_s_fastest_row_serves_its_bucket(winner, tmp_path, monkeypatch):
    from tpkernels.kernels.gemm_act import gemm_act

    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "none")
    device, act = torch.device("cuda", 0), "gelu_tanh"
    capability = torch.cuda.get_device_capability(device)
    tiles = configs("gemm_act", torch.bfloat16, capability)[0]  # not what so small a size gets
    row = table.TableRow(
        "gemm_act",
        "bfloat16",
        table.epilogue_class(act),
        *(table.bucket(size) for size in (M, N, K)),
        implementation=winner,
        config=str(tiles) if winner == "triton" else None,
        us=1.0,
        reference_us=2.0,
    )
    options = {"act": act, "bias": True}
    try:
        table.record([row], device)
        found = choice.choose("gemm_act", device, torch.bfloat16, M, N, K, **options)
        assert found.implementation == winner
        assert found.config == (tiles if winner == "triton" else None)
        other = choice.choose("gemm_act", device, torch.bfloat16, 64 * M, N, K, **options)
        assert other.implementation == "reference"
        x, weight, bias = drawn()
        ours = ops.gemm_act(x, weight, bias, act)
        with choice.using(winner):
            forced = ops.gemm_act(x, weight, bias, act)
        if winner == "triton":
            forced = gemm_act(x, weight, bias, act, config=tiles)
        assert_equal([ours], [forced])
    finally:
        table.invalidate()


@pytest.mark.parametrize("name", ["triton", "cublaslt", "reference"])
def test_the_variable_forces_it_in_a_new_process(name):
    """As a user would: TPKERNELS_GEMM, and the choice as `choose` tells it."""
    code = (
        "import torch; from tpkernels import ops; from tpkernels.ops import choice; "
        "x = torch.ones(8, 16, device='cuda'); "
        "y = ops.gemm_act(x, torch.ones(4, 16, device='cuda'), torch.ones(4, device='cuda'), "
        "'relu'); assert (y == 17).all(); "
        "print(choice.choose('gemm_act', x.device, x.dtype, 8, 4, 16, act='relu', bias=True)"
        ".implementation)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TPKERNELS_GEMM": name},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name]


def test_doctor_sees_the_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "tpkernels", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    on = {each["name"]: each["available"] for each in report["implementations"]}
    assert on["triton"] and on["cublaslt"] and on["reference"]
    assert torch.cuda.get_device_name(0) in done.stdout
