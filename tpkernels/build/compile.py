"""The commands that make ``_C``, one per source file, run by ninja."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tpkernels.build.cuda import CudaToolkit, gencode_flags
from tpkernels.build.sources import source_files
from tpkernels.build.toolchain import CXX_STANDARD, Compiler, find_ninja
from tpkernels.build.torch_install import TorchInstall

# Files of one instruction set: compiled for it, on that machine only; chosen at run time. The same
# table as in CMakeLists.txt.
ISA_FLAGS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
}
# -fno-math-errno and -fno-trapping-math let loops vectorise; NaN and infinity keep their meaning.
CXX_FLAGS = [
    CXX_STANDARD,
    *("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"),
    # Every torch from 2.11 on is built with the new ABI.
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-D_GLIBCXX_USE_CXX11_ABI=1"),
]
NVCC_FLAGS = [CXX_STANDARD, "-O3", "-DNDEBUG", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


class CompileError(Exception):
    """A compiler or the linker failed; what it said has been printed."""


@dataclass(frozen=True)
class Step:
    """One compilation: ``command`` reads ``source`` and writes ``output`` and ``output.d``."""

    source: Path
    output: Path
    command: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All compilations, and the link after them."""

    steps: tuple[Step, ...]
    link: tuple[str, ...]
    output: Path

    def flags_hash(self) -> str:
        """Changes when any command does."""
        lines = [shlex.join(step.command) for step in self.steps] + [shlex.join(self.link)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def make_plan(
    root: Path,
    objects: Path,
    torch: TorchInstall,
    compiler: Compiler,
    python_include: Path,
    toolkit: CudaToolkit | None,
) -> Plan:
    """The plan for the sources under ``root``, with objects and result under ``objects``."""
    system = [*torch.include_directories, python_include]
    cxx = [*compiler.command, *CXX_FLAGS, f"-I{root / 'csrc'}"]
    extra_cxx = shlex.split(os.environ.get("CXXFLAGS", ""))
    if toolkit is not None:
        system += [
            toolkit.home / "include",
            *sorted(torch.directory.parent.glob("nvidia/*/include")),
        ]
        cxx.append("-DTPKERNELS_WITH_CUDA=1")
    cxx += [word for directory in system for word in ("-isystem", str(directory))]
    steps = []
    for source in source_files(root):
        output = objects / source.relative_to(root).with_suffix(source.suffix + ".o")
        make_dependencies = ["-MD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output)]
        if source.suffix == ".cpp":
            isa = _isa(source)
            if isa is not None and platform.machine().lower() not in ("x86_64", "amd64"):
                continue
            flags = [*cxx, *(ISA_FLAGS[isa] if isa else []), *extra_cxx]
            steps.append(Step(source, output, (*flags, *make_dependencies)))
        elif source.suffix == ".cu" and toolkit is not None:
            gencode = gencode_flags(source, toolkit.architectures)
            if gencode:
                nvcc = [str(toolkit.nvcc), *NVCC_FLAGS, "-ccbin", compiler.command[0]]
                flags = [*nvcc, f"-I{root / 'csrc'}", *gencode]
                steps.append(Step(source, output, (*flags, *make_dependencies)))
    result = objects / "_C.so"
    libraries = [f"-L{torch.library_directory}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    if toolkit is not None:
        libraries += ["-lc10_cuda", "-ltorch_cuda", f"-L{toolkit.home / 'lib64'}", "-lcudart"]
    extra_link = shlex.split(os.environ.get("LDFLAGS", ""))
    inputs = [str(step.output) for step in steps]
    link = (*compiler.command, "-shared", "-o", str(result), *inputs, *libraries, *extra_link)
    return Plan(tuple(steps), link, result)


def _isa(source: Path) -> str | None:
    return next((isa for isa in ISA_FLAGS if source.stem.endswith(f"_{isa}")), None)


def run(plan: Plan, root: Path, objects: Path) -> None:
    """Carry out the plan, showing progress; what is up to date is not compiled again with ninja.

    Raises:
        CompileError: a command failed.
    """
    for step in plan.steps:
        step.output.parent.mkdir(parents=True, exist_ok=True)
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    ninja = find_ninja()
    if ninja is None:
        print("ninja not found: every file is compiled anew (pip install ninja)", flush=True)
        _run_all(plan, root, jobs)
        return
    (objects / "build.ninja").write_text(_ninja_file(plan, root))
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    done = subprocess.run([ninja, "-j", str(jobs)], env=environment, cwd=objects)
    if done.returncode:
        raise CompileError("compiling the native extension failed, see above")


def _ninja_file(plan: Plan, root: Path) -> str:
    def quoted(text: str) -> str:
        return text.replace("$", "$$")

    def path(value: Path) -> str:
        return quoted(str(value)).replace(" ", "$ ").replace(":", "$:")

    lines = ["ninja_required_version = 1.5", "rule run", "  command = $cmd"]
    lines += ["  description = $what", "  depfile = $out.d", "  deps = gcc"]
    lines += ["rule link", "  command = $cmd", "  description = linking _C"]
    for step in plan.steps:
        lines.append(f"build {path(step.output)}: run {path(step.source)}")
        lines.append(f"  cmd = {quoted(shlex.join(step.command))}")
        lines.append(f"  what = {quoted(str(step.source.relative_to(root)))}")
    inputs = " ".join(path(step.output) for step in plan.steps)
    lines += [
        f"build {path(plan.output)}: link {inputs}",
        f"  cmd = {quoted(shlex.join(plan.link))}",
    ]
    return "\n".join(lines) + "\n"


def _run_all(plan: Plan, root: Path, jobs: int) -> None:
    def compile_one(step: Step) -> tuple[Step, subprocess.CompletedProcess[str]]:
        return step, subprocess.run(step.command, capture_output=True, text=True)

    with ThreadPoolExecutor(jobs) as pool:
        for number, (step, done) in enumerate(pool.map(compile_one, plan.steps), start=1):
            print(f"[{number}/{len(plan.steps) + 1}] {step.source.relative_to(root)}", flush=True)
            _check(done)
    print(f"[{len(plan.steps) + 1}/{len(plan.steps) + 1}] linking _C", flush=True)
    _check(subprocess.run(plan.link, capture_output=True, text=True))


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
        raise CompileError("compiling the native extension failed, see above")
