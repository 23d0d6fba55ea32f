"""Ranks of a command: they start quietly, end together, and fail with one message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpkernels import launch

ROOT = Path(__file__).parents[1]
LIMIT = 60


def started(how: str, **env: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from tpkernels.launch import start_ranks; "
        f"sys.exit(start_ranks(['tests.launched', {how!r}], 2))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**inherited, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_inside_rank():
    assert launch.inside_rank({"RANK": "0", "WORLD_SIZE": "2"})
    assert not launch.inside_rank({})


def test_ranks_start_and_say_nothing_but_their_own():
    process = started("well")
    out, err = process.communicate(timeout=LIMIT)
    threads = max(1, (os.cpu_count() or 1) // 2)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [f"rank {r} of 2 on {threads} threads" for r in (0, 1)]
    assert err == ""


def test_threads_that_were_asked_for_are_kept():
    process = started("well", OMP_NUM_THREADS="3")
    out, _ = process.communicate(timeout=LIMIT)
    assert out.count("on 3 threads") == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "tpkernels: rank 1 died: it was killed by SIGKILL"),
        ("refuse", "tpkernels: rank 1 raised ConfigError: tp=3 does not divide 8 heads. Fix: tp=2"),
    ],
)
def test_a_rank_that_fails_is_one_line(how, message):
    process = started(how)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    # A dead rank's peer may have written about its lost connection; the last line is the cause.
    assert err.splitlines()[-1] == message
    assert "Traceback" not in err


def test_a_bug_in_a_rank_shows_its_traceback_once():
    process = started("bug")
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "tpkernels: rank 1 raised KeyError: 'missing'" in err
    assert err.count("Traceback") == 1 and "in misbehave" in err


def test_ctrl_c_ends_everything():
    process = started("sleep")
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith("sleeping"))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == launch.INTERRUPTED
    assert err.splitlines() == ["tpkernels: interrupted; all ranks were ended"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(line.split()[1]), 0)
