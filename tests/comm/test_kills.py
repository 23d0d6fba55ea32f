"""A rank that is killed: the others say so in time, nothing is left, the next run works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm import kill_rounds
from tpkernels import native

pytestmark = pytest.mark.skipif(
    not native.status().available, reason="tpshm is compiled; this machine has none"
)


def left_in_dev_shm():
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


def run_rounds(rounds, seed):
    before = left_in_dev_shm()
    done = subprocess.run(
        [sys.executable, "-m", "tests.comm.kill_rounds", str(rounds), str(seed)],
        capture_output=True,
        text=True,
        timeout=60 + 8 * rounds,
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if not k.startswith("TPKERNELS_")},
    )
    assert done.returncode == 0, done.stderr
    *killed, last = map(json.loads, done.stdout.splitlines())
    assert len(killed) == rounds
    for number, each in enumerate(killed):
        for survivor in each["survivors"]:
            said = survivor["said"]
            where = f"round {number} of seed {seed}: {each}"
            assert survivor["status"] == kill_rounds.SAID, where
            assert survivor["seconds"] < kill_rounds.LIMIT + 3, where
            assert re.search(rf"rank (\d+, )*{each['victim']}\b", said), where
            assert "wrong sum" not in said and "served by" not in said, where
    assert all(s["status"] == kill_rounds.RAN for s in last["survivors"]), last
    assert left_in_dev_shm() <= before
    return killed


def test_ten_kills():
    run_rounds(10, 1)


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get("CI")), reason="CI runs ten of the hundred rounds")
def test_a_hundred_kills():
    run_rounds(100, 2)
