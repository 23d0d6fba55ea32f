"""Building the extension into a package directory, unless what is there is up to date."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tpkernels.build import compile as compiling
from tpkernels.build import cuda, record
from tpkernels.build.sources import PACKAGE, is_checkout, source_root, sources_hash
from tpkernels.build.toolchain import Unavailable, find_compiler, find_python_include
from tpkernels.build.torch_install import TorchInstall, find_torch

TORCH_FIX = "pip install 'torch>=2.11'"


def require_torch() -> TorchInstall:
    """The torch to build against.

    Raises:
        Unavailable: there is none, or the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"native code is built on Linux only, this is {sys.platform}", "none yet")
    torch = find_torch()
    if torch is None:
        reason = "torch could not be imported where the extension was to be built"
        raise Unavailable(reason, f"{TORCH_FIX}, then: {record.BUILD_COMMAND}")
    return torch


def build(package: Path = PACKAGE, *, force: bool = False) -> bool:
    """Put the extension and its record into ``package``; False if both were up to date.

    Raises:
        Unavailable: something that native code needs is missing; the record says what.
        CompileError: the compiler failed.
        ConfigError: ``TPKERNELS_CUDA`` or ``TORCH_CUDA_ARCH_LIST`` cannot be met.
    """
    root = source_root()
    try:
        torch = require_torch()
        compiler = find_compiler()
        python_include = find_python_include()
    except Unavailable as missing:
        cuda.refuse_if_demanded(missing)
        if _usable(package, root):
            print(f"keeping the extension that is there: {missing}", flush=True)
            return False
        record.extension_path(package).unlink(missing_ok=True)
        record.write(package, record.without_native(missing))
        raise
    chosen = cuda.choose(torch, root)
    toolkit = None if isinstance(chosen, str) else chosen
    with _objects_directory(torch) as directory:
        objects = Path(directory)
        plan = compiling.make_plan(root, objects, torch, compiler, python_include, toolkit)
        facts: dict[str, Any] = {
            "native": True,
            **record.target(torch),
            "compiler": compiler.version,
            "cxx11_abi": True,
            "cuda": None if toolkit is None else toolkit.version,
            "cuda_architectures": [] if toolkit is None else list(toolkit.architectures),
            "cuda_skipped": chosen if isinstance(chosen, str) else None,
            "sources": sources_hash(root),
            "flags": _flags_key(plan, objects),
        }
        previous = {**record.read(package), "date": None, "seconds": None}
        current = previous == {**facts, "date": None, "seconds": None}
        if current and not force and record.extension_path(package).is_file():
            return False
        began = time.monotonic()
        print(f"building tpkernels._C for torch {torch.version}, {compiler.version}", flush=True)
        compiling.run(plan, root, objects)
        _check_loads(plan.output)
        facts["date"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
        facts["seconds"] = round(time.monotonic() - began, 1)
        _install(plan.output, package, facts)
    return True


def _usable(package: Path, root: Path) -> bool:
    """Whether an extension for this torch, of these sources, is there already."""
    torch, built = find_torch(), record.read(package)
    return (
        torch is not None
        and record.extension_path(package).is_file()
        and record.mismatch(built, torch) is None
        and built.get("sources") == sources_hash(root)
    )


def _objects_directory(torch: TorchInstall) -> AbstractContextManager[str]:
    """In a checkout, kept under build/ for the next time; else a temporary directory."""
    if not is_checkout():
        return tempfile.TemporaryDirectory(prefix="tpkernels-build-")
    tag = f"{record.target(torch)['python']}-torch-{torch.version}"
    directory = source_root() / "build" / "native" / tag
    directory.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(directory))


def _flags_key(plan: compiling.Plan, objects: Path) -> str:
    """The commands' hash; a temporary directory's name is not part of it."""
    if is_checkout():
        return plan.flags_hash()
    steps = tuple(
        compiling.Step(
            step.source,
            step.output,
            tuple(word.replace(str(objects), "") for word in step.command),
        )
        for step in plan.steps
    )
    link = tuple(word.replace(str(objects), "") for word in plan.link)
    return compiling.Plan(steps, link, plan.output).flags_hash()


def _check_loads(library: Path) -> None:
    """Load the result beside torch in a process of its own: a missing symbol shows now."""
    code = (
        "import sys, torch, importlib.util as u; s = u.spec_from_file_location('_C', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.build_info()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)], capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr, flush=True)
        raise compiling.CompileError(
            "the native extension was compiled but does not load, see above"
        )


def _install(library: Path, package: Path, facts: dict[str, Any]) -> None:
    target = record.extension_path(package)
    staged = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(library, staged)
        os.replace(staged, target)  # a process that has the old one mapped keeps it
    finally:
        staged.unlink(missing_ok=True)
    record.write(package, facts)
