"""`tpkernels trace`: programs run as Python runs them, and there is a page whatever they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.recordings import training_step
from tpkernels import cli
from tpkernels.errors import ConfigError
from tpkernels.trace.recording import read
from tpkernels.traced_script import Program

ROOT = Path(__file__).parents[2]
LIMIT = 120

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
import helper  # beside the script
how = sys.argv[1]
import tpkernels as tpk
dist.init_process_group("cpu:tpshm" if how == "kill" else "gloo")
rank = dist.get_rank()
x = torch.ones(8)
tpk.comm.all_reduce_(x)
if rank == 1:
    if how == "raise": raise ValueError("<it> broke")
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit": sys.exit(7)
    if how == "late": time.sleep(1.5)
if how in ("exit", "raise"): time.sleep(60)
tpk.comm.all_reduce_(x)
dist.destroy_process_group()
os.write(1, f"rank {rank} of {how}, {__name__}, {x[0]:g}\\n".encode())  # in one piece
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("")
    return path


def trace(directory, *words, before=(sys.executable, "-m", "tpkernels"), limit="300"):
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [*before, "trace", *map(str, words)],
        cwd=directory,
        env={**kept, "PYTHONPATH": str(ROOT), "TPKERNELS_TIMEOUT": limit},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def summary(directory):
    return json.loads((directory / "trace.summary.json").read_text())


def test_a_script_that_need_not_know(script):
    """One rank is late, and the group is gone when the script ends."""
    done = trace(script.parent, "--nproc", 2, "--", "python", script, "late")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {r} of late, __main__, 4" for r in (0, 1)]
    assert "wrote trace.html" in done.stderr
    found = summary(script.parent)
    assert found["command"] == [str(script), "late"] and found["missing_ranks"] == []
    assert [rank["exit_status"] for rank in found["ranks"]] == [0, 0]
    assert found["ranks"][0]["exposed_ns"] > 10**9  # waited for the late one
    assert 0 < found["ranks"][1]["clock"]["bound_ns"] < 10**9
    assert (script.parent / "trace.html").exists()


@pytest.mark.parametrize(
    ("how", "status", "says"),
    [
        ("raise", 1, "rank 1 raised ValueError: <it> broke"),
        ("exit", 7, "rank 1 died: it exited with status 7"),
        ("kill", 1, "rank 1 died: it was killed by SIGKILL"),
    ],
)
def test_there_is_a_page_whatever_a_rank_does(script, how, status, says):
    """Rank 0 sleeps or waits then: it writes when the launcher ends it."""
    done = trace(script.parent, "--", "python", script, how)
    assert done.returncode == status
    assert says in done.stderr
    found = summary(script.parent)
    if how == "kill":
        assert found["missing_ranks"] == [1] and "nothing is known of rank 1" in done.stderr
        return
    assert found["missing_ranks"] == []
    assert "SIGTERM" in found["ranks"][0]["error"]
    assert found["ranks"][1]["exit_status"] == status
    assert [rank["rows"][0]["operation"] for rank in found["ranks"]] == ["all_reduce"] * 2
    if how == "raise":
        assert "traced_script.py" not in done.stderr and "runpy" not in done.stderr


@pytest.mark.parametrize("how", ["late", "raise"])
def test_under_torchrun_it_joins(script, how):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    before = [*torchrun, "--nproc-per-node", "2", "-m", "tpkernels"]
    done = trace(script.parent, "--", script, how, before=before)
    names = sorted(path.name for path in script.parent.glob("trace.*"))
    if how == "late":
        assert done.returncode == 0, done.stderr
        assert names == ["trace.html", "trace.perfetto.json", "trace.summary.json"]
        return
    assert done.returncode != 0 and "ValueError: <it> broke" in done.stderr
    assert names == ["trace.rank0.json", "trace.rank1.json"]
    assert read([script.parent / names[1]])[0].error == "ValueError: <it> broke"


def test_one_rank_that_needs_no_group(tmp_path):
    code = "import sys; print(sys.argv, __name__)"
    done = trace(tmp_path, "--nproc", 1, "--out", "a/b.html", "--", "python", "-c", code, "x")
    assert done.returncode == 2 and "directory of 'a/b.html' is not there" in done.stderr
    done = trace(tmp_path, "--nproc", 1, "--out", "b", "--", "python", "-c", code, "--nproc")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['-c', '--nproc'] __main__\n"
    assert (tmp_path / "b.html").exists()


def test_ranks_files_can_be_merged_afterwards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        training_step(rank, 3, 2).write(tmp_path / f"x.rank{rank}.json")
    files = ["x.rank0.json", "x.rank1.json"]
    assert cli.main(["trace", "--merge", *files]) == 0
    assert "nothing is known of rank 2" in capsys.readouterr().err
    assert summary(tmp_path)["missing_ranks"] == [2]
    assert cli.main(["trace", "--merge", files[0], files[0]]) == cli.USAGE_ERROR
    assert "both of rank 0" in capsys.readouterr().err
    training_step(1, 2, 2).write(tmp_path / files[1])
    assert cli.main(["trace", "--merge", *files]) == cli.USAGE_ERROR
    assert "runs of 2 and 3 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["python", "-m", "pkg.mod", "-x"], Program("module", "pkg.mod", ["-x"])),
        (["python3.11", "-c", "1", "y"], Program("code", "1", ["y"])),
        (
            ["tpkernels", "demo", "--nproc", "2"],
            Program("module", "tpkernels", ["demo", "--nproc", "2"]),
        ),
        ([__file__, "-m"], Program("script", __file__, ["-m"])),
        (["/usr/bin/python", __file__], Program("script", __file__, [])),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_programs(words, program):
    assert Program.parse(words) == program


@pytest.mark.parametrize(
    "words", [[], ["python"], ["nowhere.py"], ["python", "-u", __file__], ["-m", "x"]], ids=str
)
def test_what_is_no_program_is_refused(words):
    with pytest.raises(ConfigError, match="Fix: "):
        Program.parse(words)


def test_without_a_program_it_is_one_line(capsys):
    assert cli.main(["trace", "--nproc", "2"]) == cli.USAGE_ERROR
    assert capsys.readouterr().err.count("\n") == 1
