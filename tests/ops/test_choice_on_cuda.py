"""What is chosen on CUDA devices, simulated: a table, a description of the device, no GPU."""

from __future__ import annotations

import timeit
from dataclasses import replace

import pytest
import torch

from tpkernels.errors import ConfigError
from tpkernels.kernels import available, table
from tpkernels.kernels.config import GemmConfig, configs
from tpkernels.kernels.table import DeviceDescription, TableRow
from tpkernels.ops import choice, implementations
from tpkernels.ops.implementations import LOCAL_OPS, Call, ImplementationStatus

H200 = DeviceDescription("NVIDIA H200", (9, 0))
T4 = DeviceDescription("Tesla T4", (7, 5))
CUDA = torch.device("cuda", 0)
CONFIG = "128x128x64 g8 s4 w8 tma"
ROW = TableRow("gemm_act", "bfloat16", "gelu_tanh", 2048, 4096, 1024, "triton", CONFIG, 90, 100)
CALL = Call("gemm_act", "cuda", H200, torch.bfloat16, "gelu_tanh", True)


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    """A machine with an H200 and Triton, no table, and nothing asked for."""
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("TPKERNELS_GEMM", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(available, "status", lambda: available.Availability(True, "Triton 3.6"))
    monkeypatch.setattr(
        implementations,
        "_cublaslt_status",
        lambda: ImplementationStatus("cublaslt", True, "there"),
    )
    real = table.describe
    monkeypatch.setattr(table, "describe", lambda d: H200 if d == CUDA else real(d))
    table.invalidate()
    choice.apply()
    yield monkeypatch
    monkeypatch.undo()
    table.invalidate()
    choice.apply()


def choose(op="gemm_act", dtype=torch.bfloat16, m=2048, act="gelu_tanh", bias=True, aligned=True):
    return choice.choose(op, CUDA, dtype, m, 4096, 1024, act=act, bias=bias, aligned=aligned)


def test_what_was_not_measured_is_plain_pytorch():
    for op in LOCAL_OPS:
        found = choose(op)
        assert (found.implementation, found.config) == ("reference", None)
        assert found.reason == "not tuned on NVIDIA H200 for this size: tpkernels bench --tune"


def test_the_measured_winner_serves_its_bucket_and_no_other():
    assert choose().implementation == "reference"
    table.record([ROW], H200)  # noticed at once
    found = choose()
    assert found.implementation == "triton" and found.config == GemmConfig.parse(CONFIG)
    assert found.reason == "measured 90.0 us, plain PyTorch 100.0 us"
    assert choose(m=1500) == found
    for other in ({"m": 4096}, {"dtype": torch.float16}, {"act": "gelu"}, {"op": "gemm_act_aux"}):
        assert choose(**other).implementation == "reference"


@pytest.mark.parametrize(
    ("row", "name", "reason"),
    [
        (replace(ROW, us=101), "reference", "measured to be the fastest"),
        (
            replace(ROW, implementation="reference", config=None),
            "reference",
            "measured to be the fastest",
        ),
        (replace(ROW, implementation="cublaslt", config=None), "cublaslt", "measured 90.0 us"),
        (replace(ROW, config="256x256"), "reference", "cannot be used: '256x256' is no tile conf"),
        (replace(ROW, config="512x512x64 g8 s9 w8"), "reference", "'512x512x64 g8 s9 w8' is no"),
        (replace(ROW, config=f"{'9' * 5000}x8x8 g1 s1 w1"), "reference", f"'{'9' * 60}...' is no"),
        (replace(ROW, config=""), "reference", "'' is no tile configuration of gemm_act"),
        (replace(ROW, op="act_grad"), "reference", "is no tile configuration of act_grad"),
        (replace(ROW, dtype="int8"), "reference", "is no tile configuration of gemm_act"),
        (replace(ROW, implementation="cublaslt"), "cublaslt", "measured 90.0 us"),
        (replace(ROW, implementation="cuda"), "reference", "cuda was the fastest, but not part"),
        (replace(ROW, config=None), "triton", "measured 90.0 us"),
    ],
    ids=[
        "slower",
        "reference",
        "cublaslt",
        "no tiles",
        "tiles that are not tuned",
        "absurd numbers",
        "empty config",
        "op without tiles",
        "dtype without tiles",
        "cublaslt with tiles",
        "unknown kernels",
        "no config",
    ],
)
def test_rows_of_every_kind(row, name, reason):
    """TP-12: never slower than plain PyTorch by choice."""
    found = choice.decide(CALL, "auto", row)
    assert found.implementation == name and reason in found.reason
    assert (found.config is not None) == (name == "triton" and row.config is not None)


def test_tiles_of_another_capability_are_not_used():
    """Their time was of this device, but of a version that had them here."""
    ampere = str(configs("gemm_act", torch.bfloat16, (8, 0))[0])
    row = replace(ROW, config=ampere)
    assert choice.decide(CALL, "auto", row).implementation == "reference"
    a100 = DeviceDescription("NVIDIA A100", (8, 0))
    found = choice.decide(replace(CALL, device=a100), "auto", row)
    assert found.implementation == "triton" and str(found.config) == ampere


def test_a_row_that_cannot_be_used_is_plain_pytorch_at_every_call_and_in_the_report():
    table.record([replace(ROW, config="1x1x1 g1 s1 w1"), replace(ROW, m=16)], H200)
    for _ in range(2):
        assert choose().implementation == "reference"
        assert choose(m=16).implementation == "triton"
    found = {op: name for op, name, _ in choice.resolve_on(H200)}
    assert found["gemm_act"] == "reference 1, triton 1"


def test_operands_unlike_the_measured_are_plain_pytorch(gpu):
    """TP-12: never slower than plain PyTorch by choice."""
    table.record([ROW, replace(ROW, m=16, implementation="cublaslt", config=None)], H200)
    for m, winner in ((2048, "triton"), (16, "cublaslt")):
        for _ in range(2):  # each is remembered for itself
            assert choose(m=m).implementation == winner
            assert choose(m=m, aligned=False) == choice.Choice("reference", choice.UNALIGNED)
    for n, k in ((4096 - 8, 1024), (4096, 1024 - 8), (4095, 1023)):  # of the same buckets
        found = choice.choose("gemm_act", CUDA, torch.bfloat16, 2048, n, k, act="gelu_tanh")
        assert found == choice.Choice("reference", choice.UNALIGNED)
    gpu.setenv("TPKERNELS_GEMM", "triton")
    assert choose(aligned=False) == choice.Choice("triton", "asked for")


def test_a_row_that_cannot_serve_this_call_is_not_used():
    row = replace(ROW, implementation="cublaslt", config=None)
    for call in (replace(CALL, bias=False), replace(CALL, act="silu")):
        found = choice.decide(call, "auto", row)
        assert found.implementation == "reference" and "cublaslt was the fastest" in found.reason


def test_automatic_choice_never_takes_what_cannot_run(gpu):
    assert (
        "no kernels for float64"
        in choice.decide(replace(CALL, dtype=torch.float64), "auto", ROW).reason
    )
    old = choice.decide(replace(CALL, device=T4), "auto", ROW)
    assert old.implementation == "reference"
    assert "needs sm_80 or newer, Tesla T4 is sm_75" in old.reason
    gpu.setenv("TRITON_INTERPRET", "1")  # slow: for who asks for it
    assert choice.decide(CALL, "auto", ROW).implementation == "reference"
    gpu.setattr(available, "status", lambda: available.Availability(False, "no Triton", "pip"))
    found = choice.decide(CALL, "auto", ROW)
    assert found.implementation == "reference" and "no Triton" in found.reason


@pytest.mark.parametrize("op", LOCAL_OPS)
def test_triton_serves_every_local_op_when_asked(gpu, op):
    gpu.setenv("TPKERNELS_GEMM", "triton")
    for act in ("none", "gelu", "relu2"):
        for bias in (False, True):
            found = choose(op, act=act, bias=bias)
            assert found == choice.Choice("triton", "asked for")


@pytest.mark.parametrize("op", LOCAL_OPS)
def test_what_triton_cannot_serve_raises_when_asked(gpu, op):
    call = replace(CALL, op=op)
    for refused, reason in (
        (replace(call, dtype=torch.float64), "no float64; allowed: float32, bfloat16, float16"),
        (replace(call, device=T4), "needs sm_80 or newer, Tesla T4 is sm_75"),
        (replace(call, device_type="cpu", device=None), "CPU tensors need Triton's interpreter"),
        (replace(call, device_type="xpu", device=None), "does not serve device 'xpu'"),
    ):
        with pytest.raises(ConfigError, match=rf"TPKERNELS_GEMM=triton .*{reason}.*Fix: "):
            choice.decide(refused, "triton", None)
    gpu.setattr(available, "status", lambda: available.Availability(False, "no Triton", "pip x"))
    with pytest.raises(ConfigError, match=r"cannot serve: no Triton\. Fix: pip x"):
        choice.decide(call, "triton", None)


@pytest.mark.parametrize("act", ["gelu_tanh", "relu"])
def test_cublaslt_serves_what_its_epilogue_has(gpu, act):
    gpu.setenv("TPKERNELS_GEMM", "cublaslt")
    assert choose(act=act).implementation == "cublaslt"


@pytest.mark.parametrize("op", LOCAL_OPS)
def test_cublaslt_raises_for_the_rest_naming_what_it_serves(op):
    others = [(act, True) for act in ("none", "gelu", "silu", "relu2")] + [("relu", False)]
    calls = [replace(CALL, op=op, act=act, bias=bias) for act, bias in others]
    calls += [replace(CALL, op=op, dtype=torch.float64)]
    calls += [] if op == "gemm_act" else [replace(CALL, op=op)]
    for call in calls:
        message = r"it serves gemm_act with a bias and act gelu_tanh or relu, .*; this is"
        with pytest.raises(ConfigError, match=rf"TPKERNELS_GEMM=cublaslt .*{message}.*Fix: unset"):
            choice.decide(call, "cublaslt", None)
    with pytest.raises(ConfigError, match="does not serve device 'cpu', only CUDA"):
        choice.decide(replace(CALL, op=op, device_type="cpu", device=None), "cublaslt", None)


@pytest.mark.parametrize("op", LOCAL_OPS)
@pytest.mark.parametrize("name", ["cpu", "cuda", "onednn"])
def test_what_does_not_serve_cuda_raises(gpu, name, op):
    gpu.setenv("TPKERNELS_GEMM", name)
    with pytest.raises(ConfigError, match=rf"TPKERNELS_GEMM={name} was asked for and cannot"):
        choose(op)


def test_reference_when_asked(gpu):
    table.record([ROW], H200)
    gpu.setenv("TPKERNELS_GEMM", "reference")
    assert choose() == choice.Choice("reference", "asked for")
    with choice.using("auto"):
        assert choose().implementation == "triton"


def test_candidates_are_what_could_serve():
    bf16, f64 = torch.bfloat16, torch.float64
    assert choice.candidates("gemm_act", H200, bf16, "gelu", True) == ["reference", "triton"]
    every = ["reference", "triton", "cublaslt"]
    assert choice.candidates("gemm_act", CUDA, bf16, "relu", True) == every
    assert choice.candidates("gemm_act", H200, bf16, "relu", False) == every[:2]
    assert choice.candidates("gemm_dact", H200, bf16, "relu") == every[:2]
    assert choice.candidates("gemm_act", H200, f64, "relu", True) == ["reference"]
    assert choice.candidates("gemm_act", T4, bf16, "gelu") == ["reference"]
    on_cpu = choice.candidates("gemm_act", torch.device("cpu"), bf16, "gelu")
    assert set(on_cpu) <= {"reference", "cpu", "onednn"}
    assert "onednn" not in choice.candidates("gemm_glu", torch.device("cpu"), bf16, "gelu")


def test_a_repeated_call_costs_little():
    """A decode step asks a hundred times; under 3 us where it was tried, and bounded here."""
    table.record([ROW], H200)
    choose()
    assert min(timeit.repeat(choose, number=2000, repeat=5)) / 2000 < 30e-6


def test_the_report_s_words(gpu):
    assert choice.summary(CUDA) == "reference (not tuned: tpkernels bench --tune)"
    table.record([ROW], H200)
    assert choice.summary(CUDA) == "auto: table NVIDIA_H200 (1 row)"
    table.record([replace(ROW, m=16)], H200)
    assert choice.summary(H200) == "auto: table NVIDIA_H200 (2 rows)"
    gpu.setattr(available, "status", lambda: available.Availability(False, "no Triton", "pip"))
    assert choice.summary(CUDA) == "reference (no Triton)"
    gpu.setenv("TPKERNELS_GEMM", "reference")
    assert choice.summary(CUDA) == "reference"
    gpu.setenv("TPKERNELS_GEMM", "triton")
    with pytest.raises(ConfigError, match="no Triton"):
        choice.summary(CUDA)


def test_what_serves_each_op_by_measured_shape():
    tiles = str(configs("gemm_dact", torch.bfloat16, H200.capability)[0])
    rows = [ROW, replace(ROW, m=16, us=200), replace(ROW, op="gemm_dact", config=tiles)]
    table.record(rows, H200)
    found = {op: (name, reason) for op, name, reason in choice.resolve_on(H200)}
    assert tuple(found) == LOCAL_OPS
    assert found["gemm_act"] == ("reference 1, triton 1", "by measured shape; else reference")
    assert found["gemm_dact"][0] == "triton 1"
    assert found["gemm_glu"] == ("reference", "not tuned: tpkernels bench --tune")
