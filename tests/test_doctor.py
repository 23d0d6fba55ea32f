"""`tpkernels doctor`: always 0, and a reason for everything that is off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tpkernels import native
from tpkernels.build import main as build
from tpkernels.build.record import BUILD_COMMAND
from tpkernels.cli import USAGE_ERROR
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


WRONG = {
    "TPKERNELS_GEMM": "foo",
    "TPKERNELS_NATIVE": "7",
    "TPKERNELS_TIMEOUT": "-1",
    "TPKERNELS_CHECK": "x",
    "TPKERNELS_OVERLAP": "fused",
}


def environment_findings(found: dict) -> dict[str, str]:
    """Variable -> fix."""
    findings = [each for each in found["findings"] if each["topic"] == "environment"]
    return {each["state"].split("=")[0]: each["fix"] for each in findings}


@pytest.mark.parametrize("variables", [[name] for name in WRONG] + [list(WRONG)], ids="+".join)
def test_wrong_variables_are_findings(variables, capsys, monkeypatch):
    for variable in variables:
        monkeypatch.setenv(variable, WRONG[variable])
    found = report(capsys)
    fixes = environment_findings(found)
    assert set(fixes) == set(variables)
    assert all(variable in fix for variable, fix in fixes.items())
    assert [each["name"] for each in found["implementations"]] == list(IMPLEMENTATIONS)
    nothing_serves = not {"TPKERNELS_GEMM", "TPKERNELS_NATIVE"}.isdisjoint(variables)
    assert ([each["op"] for each in found["ops"]] == ["every op"]) == nothing_serves
    assert all(os.environ[variable] == WRONG[variable] for variable in variables)


def test_wrong_variables_in_a_new_process():
    """Where importing the ops would raise."""
    command = [sys.executable, "-m", "tpkernels", "doctor", "--json"]
    environment = {**os.environ, **WRONG}
    done = subprocess.run(command, env=environment, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(environment_findings(json.loads(done.stdout))) == set(WRONG)


def test_without_torch_every_implementation_is_off(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    found = report(capsys)
    assert [each["name"] for each in found["implementations"]] == list(IMPLEMENTATIONS)
    for each in found["implementations"]:
        assert not each["available"] and each["reason"] == "needs torch"
        assert each["fix"] == "pip install 'torch>=2.11'"
    assert found["ops"] == []


def test_fixes_are_commands(capsys, monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr("torch.version.cuda", None)
    fixes = {each["topic"]: each["fix"] for each in report(capsys)["findings"]}
    assert fixes["transformers"] == "pip install 'transformers>=5'"
    assert fixes["safetensors"] == "pip install safetensors"
    assert fixes["gguf"] == "pip install 'gguf>=0.17'"
    assert "pip install" in fixes["CUDA"] and fixes["CUDA"].endswith(BUILD_COMMAND)


@pytest.mark.parametrize("command", [main, build])
def test_help_is_plain_text(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    assert "``" not in capsys.readouterr().out


def test_a_usage_error_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--no-such"])
    assert ended.value.code == USAGE_ERROR
    error = capsys.readouterr().err
    assert error.startswith("tpkernels doctor: error: ") and error.count("\n") == 1
