"""`tpkernels doctor`: always 0, and a reason for everything that is off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tpkernels import doctor, native
from tpkernels.build import main as build
from tpkernels.build.record import BUILD_COMMAND
from tpkernels.cli import USAGE_ERROR
from tpkernels.doctor import main
from tpkernels.envs import IMPLEMENTATIONS
from tpkernels.kernels import available, table
from tpkernels.library import OP_NAMES
from tpkernels.ops import choice


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


def row(**given):
    fields = {
        "op": "gemm_act",
        "dtype": "bfloat16",
        "epilogue": "gelu",
        "m": 16,
        "n": 4096,
        "k": 1024,
        "implementation": "triton",
        "config": "16x128x128 g8 s4 w4 tma",
        "us": 9,
        "reference_us": 10,
    }
    return table.TableRow(**{**fields, **given})


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """A machine with an H200 and Triton, simulated."""
    device = table.DeviceDescription("NVIDIA H200", (9, 0))
    monkeypatch.setattr("tpkernels.doctor._gpus", lambda: [device])
    monkeypatch.setattr(available, "status", lambda: available.Availability(True, "Triton 3.6.0"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("TPKERNELS_GEMM", raising=False)
    table.invalidate()
    yield device
    monkeypatch.undo()
    table.invalidate()


def tables(found: dict) -> list[dict]:
    return [each for each in found["findings"] if each["topic"] == "measured table"]


def test_a_gpu_that_was_not_tuned(capsys, h200, tmp_path):
    none, cache = tables(report(capsys))
    assert none["state"].startswith("none for NVIDIA H200: plain PyTorch serves")
    assert none["fix"] == "tpkernels bench --tune"
    assert str(tmp_path / "tables") in cache["state"]
    served = report(capsys)["gpus"]["NVIDIA H200"]
    assert {each["op"] for each in served} == set(choice.LOCAL_OPS)
    assert all(each["implementation"] == "reference" for each in served)
    assert all(each["reason"] == "not tuned: tpkernels bench --tune" for each in served)


def test_a_gpu_with_tables(capsys, h200):
    table.record([row(), row(m=32, us=11)], h200)
    shipped = table.SHIPPED / "NVIDIA_H200.json"
    table.record([row(m=64, torch="2.11.0", triton="3.6.0")], h200, path=shipped)
    from_us, from_user, _ = tables(report(capsys))
    assert from_us["state"].startswith(f"NVIDIA H200: 1 row, shipped ({shipped}), of 20")
    assert "measured with torch 2.11.0 and Triton 3.6.0, here are torch" in from_us["state"]
    assert from_us["fix"] == "tpkernels bench --tune"
    assert from_user["state"].startswith("NVIDIA H200: 2 rows, the user's (")
    assert "measured with" not in from_user["state"] and from_user["fix"] is None
    served = {each["op"]: each for each in report(capsys)["gpus"]["NVIDIA H200"]}
    assert served["gemm_act"]["implementation"] == "reference 1, triton 2"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "what serves each op on this machine's NVIDIA H200" in text
    assert "reference 1, triton 2  by measured shape; else reference" in text


def test_a_variable_that_cannot_serve_is_said_for_every_place(capsys, h200, monkeypatch):
    monkeypatch.setenv("TPKERNELS_GEMM", "cuda")
    found = report(capsys)
    for served in (found["ops"], found["gpus"]["NVIDIA H200"]):
        assert [each["op"] for each in served] == ["every op"]
        assert "TPKERNELS_GEMM=cuda was asked for and cannot" in served[0]["reason"]


def test_without_a_gpu_there_is_no_table(capsys, monkeypatch):
    monkeypatch.setattr("tpkernels.doctor._gpus", list)
    found = report(capsys)
    assert found["gpus"] == {}
    assert [each["state"].split(";")[0] for each in tables(found)] == ["no GPU to need one"]


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_triton_s_state_and_fix(capsys, monkeypatch, interpret):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    state = available.status()
    (triton,) = [e for e in report(capsys)["implementations"] if e["name"] == "triton"]
    assert (triton["available"], triton["reason"]) == (state.available, state.reason)
    assert triton["fix"] == state.fix
    missing = available.Availability(False, "Triton is not installed", "pip install 'triton>=3.6'")
    monkeypatch.setattr(available, "status", lambda: missing)
    (triton,) = [e for e in report(capsys)["implementations"] if e["name"] == "triton"]
    assert not triton["available"] and triton["fix"] == "pip install 'triton>=3.6'"


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
    "TPKERNELS_OVERLAP": "sideways",
    "TPKERNELS_CACHE": __file__,
}


@pytest.mark.parametrize("fix", ["pip install 'triton>=3.6'", None])
def test_a_strategy_that_cannot_serve_here_is_a_finding(capsys, monkeypatch, fix):
    monkeypatch.setenv("TPKERNELS_OVERLAP", "signaled")
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    missing = available.Availability(False, "Triton is not here", fix)
    monkeypatch.setattr(available, "status", lambda: missing)
    (found,) = [f for f in report(capsys)["findings"] if f["topic"] == "environment"]
    assert found["state"] == "TPKERNELS_OVERLAP=signaled: cannot serve here: Triton is not here"
    unset = "unset TPKERNELS_OVERLAP"
    assert found["fix"] == (f"{fix}, or {unset}" if fix else unset)
    monkeypatch.setattr(available, "status", lambda: available.Availability(True, "Triton 3.6"))
    assert environment_findings(report(capsys)) == {}
    monkeypatch.setattr(available, "status", lambda: missing)
    for other in ("off", "chunked", "auto"):
        monkeypatch.setenv("TPKERNELS_OVERLAP", other)
        assert environment_findings(report(capsys)) == {}


def test_without_a_gpu_the_signaled_strategy_is_served_by_its_twin(capsys, monkeypatch):
    monkeypatch.setenv("TPKERNELS_OVERLAP", "signaled")
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    monkeypatch.setattr(
        available, "status", lambda: available.Availability(False, "Triton is not here", None)
    )
    assert environment_findings(report(capsys)) == {}


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
