"""The build: what is compiled with which flags, what is skipped and why, what is up to date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tpkernels.build import compile as compiling
from tpkernels.build import cuda, extension, record
from tpkernels.build.command import main
from tpkernels.build.sources import PACKAGE, source_files, source_root, sources_hash
from tpkernels.build.toolchain import Compiler, Unavailable, find_compiler
from tpkernels.build.torch_install import find_torch
from tpkernels.errors import ConfigError

CUDA_TORCH = replace(find_torch(), version="2.13.0+cu130", cuda="13.0")
TOOLKIT = cuda.CudaToolkit(Path("/cuda/bin/nvcc"), "13.0", ("8.0", "9.0a"))


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")


# --- CUDA -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "listed", "expected"),
    [
        ("gemm_act.cu", ("8.0", "9.0a"), ["compute_80,code=sm_80", "compute_90a,code=sm_90a"]),
        ("gemm_act_sm80.cu", ("8.0",), ["compute_80,code=sm_80"]),
        ("gemm_act_sm90.cu", ("8.0", "9.0"), ["compute_90a,code=sm_90a"]),
        ("gemm_act_sm90.cu", ("9.0", "9.0a"), ["compute_90a,code=sm_90a"]),
        ("gemm_act_sm90.cu", ("8.0", "10.0"), []),
        ("gemm_act.cu", ("9.0+PTX",), ["compute_90,code=sm_90", "compute_90,code=compute_90"]),
    ],
    ids=str,
)
def test_gencode_flags(name, listed, expected):
    flags = cuda.gencode_flags(Path("csrc/kernels") / name, listed)
    assert flags == [word for code in expected for word in ("-gencode", f"arch={code}")]


def test_architectures_come_from_torch_cuda_arch_list(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a 10.0+PTX")
    assert cuda.architectures() == ("8.0", "9.0a", "10.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(ConfigError, match=r"'Hopper' is not an architecture; allowed: .*Fix: "):
        cuda.architectures()
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert cuda.architectures() == cuda.DEFAULT_ARCHITECTURES


@pytest.mark.parametrize(
    ("torch", "toolkit", "sources", "words"),
    [
        (replace(CUDA_TORCH, cuda=None), TOOLKIT, ["a.cu"], "built without CUDA"),
        (CUDA_TORCH, None, ["a.cu"], "no nvcc"),
        (CUDA_TORCH, replace(TOOLKIT, version="12.8"), ["a.cu"], "the majors differ"),
        (CUDA_TORCH, TOOLKIT, [], "no CUDA sources"),
    ],
    ids=["cpu torch", "no nvcc", "other major", "no sources"],
)
def test_cuda_auto_skips_with_the_reason_and_1_raises_it(
    torch, toolkit, sources, words, monkeypatch, tmp_path
):
    def find_toolkit():
        if toolkit is None:
            raise Unavailable("no nvcc", "install it")
        return toolkit

    monkeypatch.setattr(cuda, "find_toolkit", find_toolkit)
    monkeypatch.setattr(cuda, "cuda_sources", lambda root: sources)
    monkeypatch.setenv("TPKERNELS_CUDA", "auto")
    assert words in cuda.choose(torch, tmp_path)
    monkeypatch.setenv("TPKERNELS_CUDA", "1")
    with pytest.raises(ConfigError, match=f"TPKERNELS_CUDA=1, but .*{words}.*Fix: "):
        cuda.choose(torch, tmp_path)
    monkeypatch.setenv("TPKERNELS_CUDA", "0")
    assert cuda.choose(torch, tmp_path) == "TPKERNELS_CUDA=0"


def test_cuda_is_chosen_where_all_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "find_toolkit", lambda: TOOLKIT)
    monkeypatch.setattr(cuda, "cuda_sources", lambda root: ["a.cu"])
    for mode in ("auto", "1"):
        monkeypatch.setenv("TPKERNELS_CUDA", mode)
        assert cuda.choose(CUDA_TORCH, tmp_path) is TOOLKIT


def test_an_unknown_cuda_mode_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TPKERNELS_CUDA", "yes")
    with pytest.raises(ConfigError, match="allowed: auto, 1, 0"):
        cuda.choose(CUDA_TORCH, tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_a_cuda_source_compiles_with_the_plan_s_flags(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    source = tmp_path / "csrc" / "kernels" / "twice.cu"
    source.parent.mkdir(parents=True)
    source.write_text("__global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n")
    toolkit = cuda.find_toolkit()
    plan = compiling.make_plan(
        tmp_path, tmp_path / "o", CUDA_TORCH, find_compiler(), tmp_path, toolkit
    )
    (step,) = plan.steps
    step.output.parent.mkdir(parents=True)
    subprocess.run(step.command, check=True, timeout=120)
    assert step.output.stat().st_size
    assert "-lcudart" in plan.link


# --- plan -------------------------------------------------------------------------------------


def plan_for(machine, monkeypatch, toolkit=None):
    monkeypatch.setattr(compiling.platform, "machine", lambda: machine)
    compiler = Compiler(("c++",), "a compiler")
    return compiling.make_plan(
        source_root(), Path("/o"), CUDA_TORCH, compiler, Path("/py"), toolkit
    )


def test_every_source_is_compiled_once_and_instruction_sets_get_their_flags(monkeypatch):
    plan = plan_for("x86_64", monkeypatch)
    sources = [step.source for step in plan.steps]
    assert sources == [path for path in source_files(source_root()) if path.suffix == ".cpp"]
    for step in plan.steps:
        expected = {"_avx2": "-march=x86-64-v3", "_avx512": "-march=x86-64-v4"}
        expected["_avx512bf16"] = "-march=x86-64-v4"
        march = [flag for flag in step.command if flag.startswith("-march")]
        assert march == [flag for end, flag in expected.items() if step.source.stem.endswith(end)]


def test_arm_has_no_x86_sources(monkeypatch):
    names = {step.source.name for step in plan_for("aarch64", monkeypatch).steps}
    assert "epilogue_cpu_baseline.cpp" in names
    assert not {name for name in names if "avx" in name}


def test_ninja_and_without_it_make_the_same_library(monkeypatch, tmp_path, capfd):
    root = tmp_path / "a root: with $ in it"
    source = root / "csrc" / "ops" / "a.cpp"
    source.parent.mkdir(parents=True)
    source.write_text('extern "C" int answer() { return 42; }\n')
    plan = compiling.make_plan(
        root, root / "o", find_torch(), find_compiler(), tmp_path, toolkit=None
    )
    (root / "o").mkdir()
    compiling.run(plan, root, root / "o")
    assert plan.output.is_file()
    plan.output.unlink()
    monkeypatch.setattr(compiling, "find_ninja", lambda: None)
    compiling.run(plan, root, root / "o")
    assert plan.output.is_file()
    assert "csrc/ops/a.cpp" in capfd.readouterr().out
    source.write_text("not C++\n")
    with pytest.raises(compiling.CompileError):
        compiling.run(plan, root, root / "o")


def test_the_hash_follows_the_sources(tmp_path):
    shutil.copytree(source_root() / "csrc", tmp_path / "csrc")
    before = sources_hash(tmp_path)
    assert before == sources_hash(tmp_path)
    changed = tmp_path / "csrc" / "common" / "math.h"
    changed.write_text(changed.read_text() + "\n")
    assert sources_hash(tmp_path) != before


# --- command ----------------------------------------------------------------------------------


def test_without_a_compiler_the_record_says_so(no_compiler, tmp_path):
    with pytest.raises(Unavailable, match=r"CXX='/nowhere/c\+\+' names no program .*Fix: "):
        extension.build(tmp_path)
    written = record.read(tmp_path)
    assert written["native"] is False
    assert "names no program" in written["reason"]


def test_without_a_compiler_what_is_there_is_kept(no_compiler, tmp_path, capsys):
    record.extension_path(tmp_path).write_bytes(b"")
    facts = {**record.target(find_torch()), "sources": sources_hash(source_root())}
    record.write(tmp_path, facts)
    assert extension.build(tmp_path) is False
    assert "keeping the extension that is there" in capsys.readouterr().out
    assert record.read(tmp_path) == facts


def test_without_a_compiler_cuda_demanded_is_refused(no_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CUDA", "1")
    with pytest.raises(ConfigError, match="TPKERNELS_CUDA=1, but"):
        extension.build(tmp_path)


@pytest.mark.parametrize(("options", "status"), [([], 1), (["--optional"], 0)], ids=str)
def test_the_command_says_what_is_lost(options, status, monkeypatch, capsys):
    def build(force):
        raise Unavailable("no C++ compiler", "install g++")

    monkeypatch.setattr("tpkernels.build.command.build", build)
    assert main(options) == status
    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0
    assert "no C++ compiler. Fix: install g++" in said


@pytest.mark.skipif(not record.extension_path(PACKAGE).is_file(), reason="no extension is built")
def test_the_command_does_nothing_when_up_to_date():
    modified = record.extension_path(PACKAGE).stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, "-m", "tpkernels", "build"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tpkernels build: up to date\n"
    assert record.extension_path(PACKAGE).stat().st_mtime_ns == modified
