"""``bench/multi_gpu_check.sh``: usage, a dry run, its parts with planted results and failures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "bench" / "multi_gpu_check"
SCRIPT = ROOT / "bench" / "multi_gpu_check.sh"


@pytest.fixture
def parts(monkeypatch):
    """`parts(name)`: a module of bench/multi_gpu_check, as its own program imports it."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu_check"))
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "bench") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def check(tmp_path, *arguments, **extra):
    (tmp_path / "tmp").mkdir(exist_ok=True)
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path / "tmp")}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **own, **extra},
        cwd=tmp_path,
        timeout=280,
    )


# --- usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: OUT_DIR"),
        (("file", "--dry-run"), "OUT_DIR file is a file. Fix: name a directory"),
        (("mine",), "holds report.md, of no earlier run"),
    ],
)
def test_bad_usage_is_one_error(tmp_path, arguments, message):
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.md").write_text("my own\n")
    done = check(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    assert (tmp_path / "mine" / "report.md").read_text() == "my own\n"


def test_help_names_every_option(tmp_path):
    done = check(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("OUT_DIR", "--quick", "--dry-run", "--commit", "report.md", "PYTHON"):
        assert word in done.stdout


# --- steps ------------------------------------------------------------------------------------


def planned(parts, tmp_path, gpus, *, dry_run=False, quick=False):
    """The steps of a run whose machine has so many GPUs."""
    plan, runner, workspace = parts("plan"), parts("runner"), parts("workspace")
    settings = plan.Settings(tmp_path, dry_run, quick, "abc")
    space = workspace.Workspace(ROOT, tmp_path, tmp_path)
    lines = ["torch: 2.11.0", *(f"gpu {i}: H200" for i in range(gpus))]
    results, found = [], []
    for step in parts("multi_steps").steps(settings, space, None, results):
        found.append(step)
        results.append(runner.Result(step.name, "passed", 1.0, "", "\n".join(lines)))
    return found


@pytest.mark.parametrize("gpus", [0, 1])
def test_fewer_than_two_gpus_are_refused_with_the_fix(parts, tmp_path, gpus):
    with pytest.raises(parts("check_run").Refused, match=rf"2.11.0; {gpus} CUDA .*--dry-run"):
        planned(parts, tmp_path, gpus)


@pytest.mark.parametrize(("quick", "seconds"), [(False, 1770), (True, 570)])
def test_a_real_run_tells_what_matters_most_first_and_within_its_time(
    parts, tmp_path, quick, seconds
):
    steps = planned(parts, tmp_path, 16, quick=quick)
    names = [step.name for step in steps]
    assert names.index("strategies") < names.index("killed rank") < names.index("overlap")
    assert {step.name for step in steps if step.skipped} <= {"tune"}
    launched = next(step for step in steps if step.name == "graphs").command
    assert launched[2:] == ("8", str(FOLDER / "graphs.py"))  # one a GPU, eight at most
    through = names.index("strategies") + 1
    assert sum(step.limit for step in steps[:through]) < seconds
    programs = [Path(word) for step in steps for word in step.command if word.endswith(".py")]
    assert programs and all(program.is_file() for program in programs)


# --- programs ---------------------------------------------------------------------------------


def test_a_dry_run_passes_and_leaves_only_its_results(tmp_path):
    out = tmp_path / "out"
    done = check(tmp_path, out, "--dry-run", TPKERNELS_OVERLAP="no such strategy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []
    names = {path.name for path in out.iterdir()}
    assert names == {"report.md", "results.jsonl", "chart.svg", "log.txt"}
    report = (out / "report.md").read_text()
    for step in ("machine", "build", "strategies", "killed rank", "overlap"):
        assert f"| {step} | passed |" in report, report
    for step in ("topology", "graphs", "peers' memory", "tune"):
        assert f"| {step} | skipped | 0.0 | needs CUDA |" in report
    assert "no speed between GPUs" in report and "NOT AT ITS END" not in report
    log = (out / "log.txt").read_text()
    for strategy in ("off", "chunked", "signaled"):
        for op in ("all_reduce", "reduce_scatter", "all_gather", "column"):
            assert f"passed: {strategy} {op} " in log
        assert f"passed: {strategy} with a rank that is late" in log
    assert "passed: Gloo, rank 1 of 2 killed" in log
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        timed = {r["implementation"] for r in rows if r["op"] == op and r["us"] is not None}
        assert {"gemm", "collective", "plain", "dtensor", "ours, off", "ours, chunked"} <= timed
    assert all(row["us"] is not None or row["error"] for row in rows)


def rank(tmp_path, code):
    """A world of one on CPU that runs `code` with the programs' folder to import from."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    path = os.pathsep.join((str(ROOT), str(FOLDER)))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=120,
    )


def test_when_one_rank_fails_the_others_are_ended(parts, tmp_path, capsys, monkeypatch):
    start_ranks = parts("start_ranks")
    monkeypatch.setattr(start_ranks, "GRACE", 0.3)
    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else 0\n")
    assert start_ranks.main(2, ["-S", str(program)]) == 1
    assert "exit status: 1 (7)" in capsys.readouterr().out
    program.write_text(program.read_text() + "time.sleep(60)\n")
    assert start_ranks.main(2, ["-S", str(program)]) == 1
    assert "exit status: 0 (-9), 1 (7)" in capsys.readouterr().out
    program.write_text("import os\nassert os.environ['WORLD_SIZE'] == '2'\n")
    assert start_ranks.main(2, ["-S", str(program)]) == 0


PLANTED = """
import torch
import strategies, ranks
device = ranks.start("cpu")

def wrong(call, M, N, K, device, dtype):
    y = torch.zeros(M, N)
    y[3, 1] = call  # right in the first call alone
    yield "y", y, torch.zeros(M, N)

def refuses(*_):
    raise strategies.ConfigError("TPKERNELS_OVERLAP=signaled cannot serve: it is a test. Fix: none")
    yield

def other(*_):
    raise strategies.ConfigError("x is not 2-D")
    yield

results = [
    ranks.checked(op.__name__, lambda: strategies._exactly(op, (5, 3, 2), device, None), device)
    for op in (wrong, refuses, other)
]
raise SystemExit(ranks.finish(results, "planted"))
"""


def test_one_wrong_bit_in_a_later_call_fails_and_a_refusal_by_name_does_not(tmp_path):
    done = rank(tmp_path, PLANTED)
    assert done.returncode == 1, done.stderr
    assert "call 1: y: 1 of 15 differ, from tensor([3, 1]) on" in done.stdout
    assert "FAILED: wrong\n" in done.stdout and "FAILED: other\n" in done.stdout
    assert "not served: TPKERNELS_OVERLAP=signaled" in done.stdout
    assert "passed: refuses\n" in done.stdout and "planted: 1 of 3 passed" in done.stdout


def test_survivors_that_do_not_name_the_killed_rank_are_a_failure(parts, capsys, monkeypatch):
    killed_rank = parts("killed_rank")
    monkeypatch.setitem(killed_rank.ROUNDS, "cpu", {"Gloo": ({}, "rank {rank} has left a letter")})
    assert killed_rank.main("cpu", 2) == 1
    told = capsys.readouterr().out
    assert "FAILED: Gloo, rank 1 of 2 killed" in told
    assert "rank 0 did not name it, status 1: layer block.0.mlp, gemm_all_reduce: " in told


# --- the report -------------------------------------------------------------------------------


def row(implementation, us, **more):
    timed = us is not None
    figures = {
        "op": "all_reduce",
        "model": "gpt3-13b",
        "shape": {"m": 8192, "k": 20480, "n": 5120},
        "dtype": "bfloat16",
        "world": 2,
        "implementation": implementation,
        "note": "",
        "error": None if timed else "RuntimeError: no | such thing",
        "us": us,
    }
    if timed:
        figures |= {"ratio_to_plain": us / 100, "limit_us": 60.0, "overlap": (110 - us) / 50}
        figures |= {"percent_of_limit": 6000 / us}
    return {**figures, **more}


def test_the_report_has_every_row_and_the_chart_a_mark_at_the_limit(parts, tmp_path):
    comparison, plan, runner = parts("comparison"), parts("plan"), parts("runner")
    rows = [row("gemm", 60.0), row("collective", 50.0), row("plain", 100.0)]
    rows += [row("async TP", 80.0, note="PyTorch did not fuse it"), row("ours, signaled", 70.0)]
    rows.append(row("dtensor", None))
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "results.jsonl").write_text(text + '{"op": "cut sh')
    settings = plan.Settings(tmp_path, False, False, "abc")
    results = [runner.Result("overlap", "failed", 9.0, "RuntimeError: no", "")]
    short = comparison.write(tmp_path, results, settings, 9.0)
    report = (tmp_path / "report.md").read_text()
    assert comparison.ours(tmp_path)
    assert "| ours, signaled | 70 | 0.700 | 86 | 80% |" in report
    assert "| async TP | 80 | 0.800 | 75 | 60% | PyTorch did not fuse it |" in report
    assert "| dtensor | not measured |" in report and "no \\| such thing" in report
    assert "| gemm |" not in report
    assert "all_reduce, ours, signaled  1 of 1  0.700" in short and "NOT all passed" in short
    chart = ElementTree.parse(tmp_path / "chart.svg").getroot()
    bars = {
        float(bar.get("width"))
        for bar in chart.iter("{http://www.w3.org/2000/svg}rect")
        if bar.get("x")
    }
    assert len(bars) == 3
    (limit,) = chart.iter("{http://www.w3.org/2000/svg}line")
    left = comparison._LABEL
    assert float(limit.get("x1")) - left == pytest.approx(0.6 * max(bars), abs=0.1)


def test_the_report_of_a_run_that_measured_nothing_says_so(parts, tmp_path):
    comparison, plan = parts("comparison"), parts("plan")
    settings = plan.Settings(tmp_path, True, True, "abc")
    comparison.write(tmp_path, [], settings, 1.0, running=True)
    report = (tmp_path / "report.md").read_text()
    assert "not measured" in report and "NOT AT ITS END" in report
    assert not (tmp_path / "chart.svg").exists()
