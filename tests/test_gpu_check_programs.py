"""What ``bench/gpu_check.sh`` runs: the tests marked gpu in planted trees, the small kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tpkernels.kernels import available

ROOT = Path(__file__).parents[1]

PLANTED = """
import os, signal, time
import pytest

pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
def test_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_after_the_crash(): pass
def test_skips(): pytest.skip("for a reason")
@pytest.fixture
def broken(): raise RuntimeError("a fixture")
def test_with_a_broken_fixture(broken): pass
"""


@pytest.fixture
def planted(tmp_path):
    """A tree whose tests fail in several ways; `planted()` runs them."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_planted.py").write_text(PLANTED)
    (tests / "test_not_marked.py").write_text("def test_other(): raise AssertionError\n")
    (tests / "test_broken.py").write_text("import no_such_module  # pytest.mark.gpu\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\ntimeout = 60\n")
    folder = ROOT / "bench" / "gpu_check"

    def run(*options, seconds=60):
        command = [sys.executable, str(folder / "gpu_tests.py"), "--results", "junit.xml"]
        process = subprocess.Popen(
            [*command, "--scratch", str(tmp_path), "--workers", "2", *options],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            cwd=tmp_path,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        root = ElementTree.parse(tmp_path / "junit.xml").getroot()
        found = {}
        for case in root.iter("testcase"):
            child = next(iter(case), None)
            tag = "passed" if child is None else child.tag
            found[case.get("name")] = (tag, "" if child is None else child.get("message"))
        return process.returncode, output, found

    return run


def test_a_crash_costs_one_test_and_nothing_is_run_twice(planted, tmp_path):
    code, output, found = planted()
    assert code == 1
    assert found == {
        "test_passes": ("passed", ""),
        "test_fails": ("failure", "AssertionError: one is not two"),
        "test_crashes": ("failure", "the process ended before the test did"),
        "test_after_the_crash": ("passed", ""),
        "test_skips": ("skipped", "Skipped: for a reason"),
        "test_with_a_broken_fixture": ("failure", "RuntimeError: a fixture"),
        "tests/test_broken.py": (
            "failure",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
    }
    assert "tests: 2 passed, 4 failed, 1 skipped" in output
    assert "a test process ended early: exit status -11, in tests/test_planted.py::" in output


def test_what_was_found_is_there_before_the_end(planted, tmp_path):
    (tmp_path / "tests" / "test_planted.py").write_text(
        "import pathlib, pytest, time\n"
        "@pytest.mark.gpu\ndef test_quick(): pass\n"
        "@pytest.mark.gpu\ndef test_skipped(): pytest.skip('x')\n"
        "@pytest.mark.gpu\ndef test_looks():\n"
        "    for _ in range(150):\n"
        "        time.sleep(0.1)\n"
        "        file = pathlib.Path('junit.xml')\n"
        "        if file.exists() and 'test_looks' in file.read_text():\n"
        "            pathlib.Path('seen.xml').write_bytes(file.read_bytes())\n"
        "            return\n"
        "    raise AssertionError('no junit.xml')\n"
    )
    (tmp_path / "tests" / "test_broken.py").unlink()
    code, output, _ = planted()
    assert code == 0, output
    cases = ElementTree.parse(tmp_path / "seen.xml").getroot().iter("testcase")
    seen = {case.get("name"): [child.tag for child in case] for case in cases}
    assert seen["test_looks"] == ["skipped"]  # it was running
    assert [] in seen.values()


def test_the_time_limit_keeps_what_was_found(planted, tmp_path):
    (tmp_path / "tests" / "test_planted.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.gpu\ndef test_quick(): pass\n"
        "@pytest.mark.gpu\ndef test_never_ends(): time.sleep(600)\n"
        "@pytest.mark.gpu\ndef test_third(): pass\n"
        "@pytest.mark.gpu\ndef test_behind(): pass\n"
    )
    (tmp_path / "tests" / "test_broken.py").unlink()
    code, _, found = planted(seconds=5)
    assert code == 1
    assert {name: tag for name, (tag, _) in found.items()} == {
        "test_quick": "passed",
        "test_never_ends": "failure",
        "test_third": "passed",
        "test_behind": "skipped",
    }


@pytest.mark.skipif(
    torch.cuda.is_available() or not available.triton_status().available,
    reason="needs Triton's interpreter",
)
def test_what_the_sanitizer_runs_is_right_here():
    program = ROOT / "bench" / "gpu_check" / "small_kernels.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program), "cpu"], capture_output=True, text=True, env=env, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemm_act torch.bfloat16: 128x256x64" in done.stdout and " tma\n" in done.stdout
