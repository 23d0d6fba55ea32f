"""`tpkernels bench` on this CPU: real runs of tiny shapes, options, interrupts, the scripts."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tpkernels.benchmarks import rows
from tpkernels.benchmarks.command import main

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = pytest.mark.skipif(not BENCH.is_dir(), reason="needs the repository")
ON_CPU = ["--device", "cpu", "--no-compile", "--quick"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setattr("tpkernels.benchmarks.ceilings._GEMM_SIZE", {"cpu": 128})
    monkeypatch.setattr("tpkernels.benchmarks.ceilings._COPY_BYTES", {"cpu": 1 << 20})


def tiny(*options: str) -> list[str]:
    return ["--device", "cpu", "--no-compile", "--warm", "--shapes", "8,24,16", *options]


def test_gemm_gelu(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    threads = torch.get_num_threads()
    arguments = tiny("--act", "gelu", "gelu_tanh", "--out", str(out), "--commit", "abc")
    assert main(["gemm_gelu", *arguments, "--dtype", "bf16"]) == 0
    assert torch.get_num_threads() == threads
    captured = capsys.readouterr()
    assert "### gemm_gelu (gelu), bfloat16" in captured.out
    assert "### gemm_gelu (gelu_tanh), bfloat16" in captured.out
    assert "[2/2]" in captured.err
    found = rows.read([out])
    assert f"{len(found)} rows appended to {out}" in captured.out
    assert [row.implementation for row in found[:3]] == ["eager", "cublaslt", "ours"]
    for row in found:
        assert row.shape == {"m": 8, "n": 24, "k": 16} and row.dtype == "bfloat16"
        assert (row.world, row.threads, row.cold, row.commit) == (1, 1, False, "abc")
        if row.implementation == "cublaslt":
            assert row.us is None and row.error == "cannot run: needs CUDA"
        else:
            assert row.error is None and row.us and row.p20_us and row.p80_us
            assert row.p20_us <= row.us <= row.p80_us and row.repetitions >= 5
            assert row.percent_of_limit == pytest.approx(100 * row.limit_us / row.us, rel=1e-3)
            assert 0 < (row.relative_error or 0) < 0.01
    assert main(["gemm_gelu", *arguments]) == 0
    assert rows.read([out])[: len(found)] == found  # appended


@pytest.mark.parametrize("gated", [False, True])
def test_mlp(gated, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["mlp", *tiny("--quick", "--out", str(out), *["--gated"] * gated)]) == 0
    found = rows.read([out])
    assert {row.op for row in found} == {"mlp_forward", "mlp_forward_backward"}
    assert {row.act for row in found} == {"silu" if gated else "gelu_tanh"}
    assert all(row.error is None and row.us and row.repetitions <= 10 for row in found)


def test_without_a_program_both_run(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(tiny("--out", str(out))) == 0
    assert [row.op for row in rows.read([out]) if row.implementation == "ours"] == [
        "gemm_gelu",
        "mlp_forward_backward",
        "mlp_forward",
    ]


def test_a_models_shards(tmp_path):
    out = tmp_path / "rows.jsonl"
    choice = ["--models", "gpt2-xl", "--tp", "8", "--m", "1", "16", "--out", str(out)]
    assert main(["gemm_gelu", *ON_CPU, "--warm", *choice]) == 0
    shapes = {(row.model, row.tp, *row.shape.values()) for row in rows.read([out])}
    assert shapes == {("gpt2-xl", 8, 1, 800, 1600), ("gpt2-xl", 8, 16, 800, 1600)}


def test_a_budget_leaves_cases_out_and_says_so(capsys):
    arguments = [*ON_CPU, "--models", "gpt2-xl", "--m", "1", "2", "3", "--budget", "1e-6"]
    assert main(["gemm_gelu", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "left out 12 cases, no time left of 1e-06 s: gemm_gelu gpt2-xl tp1 M=1" in captured.err


def test_a_wrong_result_is_an_exit_status(monkeypatch, capsys):
    from tpkernels.benchmarks import gemm_gelu

    right = gemm_gelu.gemm_act
    monkeypatch.setattr(gemm_gelu, "gemm_act", lambda *arguments: 1.1 * right(*arguments))
    assert main(["gemm_gelu", *tiny()]) == 1
    assert "- ours, not timed (1): wrong: y: relative error 1.000e-01" in capsys.readouterr().out


def test_a_case_that_does_not_fit_is_left_out(monkeypatch, capsys):
    from tpkernels.benchmarks import gemm_gelu

    def too_large(*arguments):
        raise torch.OutOfMemoryError("Tried to allocate 1 TiB")

    monkeypatch.setattr(gemm_gelu, "make_inputs", too_large)
    assert main(["gemm_gelu", *tiny()]) == 0
    assert "left out 1 case, not enough memory (OutOfMemoryError: Tried" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "'nope' is not a benchmark; allowed: gemm_gelu, mlp, tune, report"),
        (["--shapes", "1,2"], "'1,2' is not a shape"),
        (["--shapes", "1,2,0"], "'1,2,0' is not a shape"),
        (["--shapes", "1,2,3", "--full"], "--shapes and --full exclude each other"),
        (["--shapes", "1,2,3", "--tp", "2"], "--shapes and --tp exclude each other"),
        (["--quick", "--full"], "--full and --quick exclude each other"),
        (["--gated"], "--gated goes with --shapes"),
        (["--tp", "7"], "--tp 7 does not divide d_ff"),
        (["--tp", "0"], "'0' is not a whole number"),
        (["--budget", "-1"], "'-1' is not a time"),
        (["--budget", "nan"], "'nan' is not a time"),
        (["--out", "/absent/rows.jsonl"], "its directory is not there"),
        (["--out", "/"], "it is a directory"),
        (["--dtype", "fp64"], "invalid choice: 'fp64'"),
        (["mlp", "--act", "gelu"], "unrecognized arguments: --act gelu"),
        (["gemm_gelu", "--act", "silu"], "invalid choice: 'silu'"),
        (["tune", "--op", "all_reduce"], "invalid choice: 'all_reduce'"),
    ],
    ids=str,
)
def test_bad_values_are_one_line_and_exit_2(arguments, message, capsys):
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
@pytest.mark.parametrize("path", ["/proc/x.jsonl", "/dev/full"])
def test_a_file_that_cannot_be_written_is_one_line(path, capsys):
    """Also where permissions say it can."""
    assert main(tiny("--quick", "--out", path)) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "Traceback" not in said
    assert f"error: --out {path}: it cannot be written: " in said


def test_a_file_is_left_as_it_was_by_the_look_whether_it_can_be_written(tmp_path):
    from tpkernels.benchmarks.options import check_output

    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.write_text("kept")
    link.symlink_to(new)
    for path in (new, old, link):
        check_output("--out", path)
    assert not new.exists() and old.read_text() == "kept" and link.is_symlink()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_a_gpu_that_is_not_there(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU. Fix: --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["gemm_gelu", "mlp", "tune", "report"])
def test_every_program_has_help(program, capsys):
    with pytest.raises(SystemExit) as ended:
        main([program, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: tpkernels bench {program}")


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": "", **variables}


def test_a_bad_variable_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCH / "bench_mlp.py"), "--quick"],
        cwd=tmp_path,
        env=environment(TPKERNELS_GEMM="nope"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "TPKERNELS_GEMM='nope'" in done.stderr


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("bench_gemm_gelu.py", ["gemm_gelu"]),
        ("bench_mlp.py", ["mlp"]),
        ("report.py", ["report"]),
        ("harness.py", []),
    ],
)
def test_each_script_is_its_program(name, program, monkeypatch):
    given = []
    monkeypatch.setattr("tpkernels.benchmarks.command.main", lambda argv: given.append(argv) or 7)
    monkeypatch.setattr(sys, "argv", [name, "--option"])
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / name), run_name="__main__")
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    assert ended.value.code == 7 and given == [[*program, "--option"]]
    assert sys.path[0] == str(BENCH.parent)  # the checkout before what is installed


def test_an_interrupt_keeps_the_rows_so_far(monkeypatch, tmp_path, capsys):
    from tpkernels.benchmarks import session

    calls, real = [], session.run_case

    def third_is_interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(session, "run_case", third_is_interrupted)
    out = tmp_path / "rows.jsonl"
    shapes = ["4,24,16", "5,24,16", "6,24,16", "7,24,16"]
    arguments = ["gemm_gelu", "--device", "cpu", "--no-compile", "--warm", "--out", str(out)]
    assert main([*arguments, "--shapes", *shapes]) == 130
    assert {row.shape["m"] for row in rows.read([out])} == {4, 5}
    assert "interrupted; what was written before is kept" in capsys.readouterr().err


def test_sigterm_is_an_interrupt(tmp_path):
    out = tmp_path / "rows.jsonl"
    shapes = [f"{m},24,16" for m in range(1, 400)]
    arguments = ["--device", "cpu", "--no-compile", "--warm", "--shapes", *shapes]
    process = subprocess.Popen(
        [sys.executable, str(BENCH / "bench_gemm_gelu.py"), *arguments, "--out", str(out)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_text().count("\n") > 8):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; what was written before is kept" in said and "Traceback" not in said
    found = rows.read([out])  # every line is whole
    assert f"{len(found)} rows appended" in printed
