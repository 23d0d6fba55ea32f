"""`tpkernels doctor`: always 0, and a reason for everything that is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tpkernels import native
from tpkernels.doctor import main
from tpkernels.envs import IMPLEMENTATIONS
from tpkernels.library import OP_NAMES


def report(capsys) -> dict:
    assert main(["--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_implementation_and_op_has_a_reason(capsys):
    found = report(capsys)
    assert [each["name"] for each in found["implementations"]] == list(IMPLEMENTATIONS)
    assert all(each["reason"] for each in found["implementations"])
    assert {each["op"] for each in found["ops"]} == set(OP_NAMES)
    assert all(each["implementation"] and each["reason"] for each in found["ops"])
    topics = {each["topic"] for each in found["findings"]}
    assert {"torch", "python", "C++ compiler", "nvcc", "extension", "CUDA"} <= topics


def test_the_extension_s_state_is_shown(capsys, monkeypatch):
    status = native.status()
    assert status.reason in str(report(capsys)["findings"])
    monkeypatch.setenv("TPKERNELS_NATIVE", "0")
    (extension,) = [f for f in report(capsys)["findings"] if f["topic"] == "extension"]
    assert extension["state"] == "TPKERNELS_NATIVE=0"
    assert extension["fix"] == "unset TPKERNELS_NATIVE"


def test_text_names_what_is_off(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in IMPLEMENTATIONS:
        assert f"  {name} " in text


@pytest.mark.parametrize("code", ["import tpkernels", "import tpkernels.ops"])
def test_import_does_not_initialise_cuda(code):
    check = f"{code}; import torch; assert not torch.cuda.is_initialized()"
    environment = {**os.environ, "TPKERNELS_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", check], env=environment, timeout=60)
    assert done.returncode == 0
