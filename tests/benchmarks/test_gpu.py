"""On a GPU: times of its events, the programs, and a table that choosing then reads."""

from __future__ import annotations

import pytest
import torch

from tpkernels.benchmarks import rows
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.timers import CudaTimer, cache_bytes
from tpkernels.kernels import table
from tpkernels.ops import choice, gemm_act

pytestmark = pytest.mark.gpu

SHAPES = ["--shapes", "256,512,384"]


def test_the_timer_times_the_device_and_not_the_host():
    device = torch.device("cuda", torch.cuda.current_device())
    timer = CudaTimer(device)
    x = torch.randn(4096, 4096, device=device)
    once, thrice = [], []
    for _ in range(40):  # in turns, and the least: other processes may use the GPU as well
        once.append(timer(lambda: x @ x))
        thrice.append(timer(lambda: [x @ x for _ in range(3)]))
    assert 2.0 < min(each.us for each in thrice) / min(each.us for each in once) < 4.0
    assert 0 < min(each.host_us for each in once) < 10_000
    assert cache_bytes(device) > 1 << 20


def test_the_programs_measure(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main([*SHAPES, "--no-compile", "--out", str(out)]) == 0
    found = rows.read([out])
    assert {row.device for row in found} == {torch.cuda.get_device_name()}
    by_name = {row.implementation: row for row in found if row.op == "gemm_gelu"}
    assert {"eager", "cublaslt", "ours", "ours:reference", "ours:triton"} <= set(by_name)
    for row in found:
        assert row.error is None, row
        assert row.us and row.host_us and row.cold


def test_a_tuned_table_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    table.invalidate()
    try:
        arguments = ["--tune", *SHAPES, "--op", "gemm_act", "--act", "gelu_tanh"]
        assert main(arguments) == 0
        device = torch.device("cuda", torch.cuda.current_device())
        row = table.lookup("gemm_act", device, torch.bfloat16, "gelu_tanh", 256, 512, 384)
        assert row is not None and row.us <= row.reference_us
        chosen = choice.choose(
            "gemm_act", device, torch.bfloat16, 256, 512, 384, act="gelu_tanh", bias=True
        )
        assert chosen.implementation == row.winner
        x, weight, bias = (
            torch.randn(size, device=device, dtype=torch.bfloat16)
            for size in ((256, 384), (512, 384), (512,))
        )
        assert gemm_act(x, weight, bias, "gelu_tanh").isfinite().all()
        assert main([*arguments, "--out", str(tmp_path / "other.json")]) == 0
        assert (tmp_path / "other.json").exists()
    finally:
        monkeypatch.undo()
        table.invalidate()
