"""``tpkernels doctor``: what is here, which implementation serves each op, why the rest is off."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import tpkernels
from tpkernels import envs, native
from tpkernels.build.record import BUILD_COMMAND
from tpkernels.cli import CommandParser
from tpkernels.cli import main as command
from tpkernels.errors import ConfigError

if TYPE_CHECKING:
    from tpkernels.kernels.table import DeviceDescription, TableFile

_INSTALL_TORCH = "pip install 'torch>=2.11'"
_OPTIONAL = {  # package -> (what it is for, the command that gets it)
    "transformers": ("Hugging Face models and the demo", "pip install 'transformers>=5'"),
    "safetensors": ("loading the demo's weights", "pip install safetensors"),
    "gguf": ("the demo's SmolLM2", "pip install 'gguf>=0.17'"),
}
_VARIABLES = {
    "TPKERNELS_GEMM": envs.gemm,
    "TPKERNELS_NATIVE": envs.native,
    "TPKERNELS_OVERLAP": envs.overlap,
    "TPKERNELS_CHECK": envs.check,
    "TPKERNELS_TIMEOUT": envs.timeout,
    "TPKERNELS_CACHE": envs.cache,
}
_CPU = "CPU"
Served = tuple[str, str, str]  # op, implementation, reason
_READ_BY_EVERY_OP = ("TPKERNELS_GEMM", "TPKERNELS_NATIVE")


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``fix`` is a command or an action, where there is one."""

    topic: str
    state: str
    fix: str | None = None


def main(argv: list[str]) -> int:
    """Print the report; always 0, since a missing part is a finding and not a failure."""
    parser = CommandParser(
        prog="tpkernels doctor",
        description="Show what is here, which implementation serves each op, and why the rest "
        "is off.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args(argv)
    refused = _refused_variables()
    with _unset(refused):  # importing the ops reads them
        findings = [*_machine(), *refused.values(), *_signaled(), *_torch(), *_tables()]
        implementations, ops = _implementations()
        build_info = native.status().build_info
    for variable in _READ_BY_EVERY_OP:
        if variable in refused:
            ops = {place: [("every op", "none", refused[variable].state)] for place in ops}
    if options.json:
        report = {
            "findings": [asdict(finding) for finding in findings],
            "implementations": implementations,
            "ops": _as_objects(ops.pop(_CPU, [])),
            "gpus": {device: _as_objects(served) for device, served in ops.items()},
            "build": build_info,
        }
        print(json.dumps(report, indent=2))
        return 0
    _print(findings, implementations, ops)
    return 0


def _as_objects(served: list[Served]) -> list[dict[str, str]]:
    return [dict(zip(("op", "implementation", "reason"), each, strict=True)) for each in served]


def _print(
    findings: list[Finding], implementations: list[dict[str, Any]], ops: dict[str, list[Served]]
) -> None:
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.topic:<{width}}  {finding.state}")
        if finding.fix:
            print(f"{'':<{width}}  fix: {finding.fix}")
    if implementations:
        print("\nimplementations of the local ops")
    for each in implementations:
        print(f"  {each['name']:<10} {'on ' if each['available'] else 'off'}  {each['reason']}")
        if each["fix"]:
            print(f"  {'':<10}      fix: {each['fix']}")
    for place, served in ops.items():
        print(f"\nwhat serves each op on this machine's {place}")
        width = max(10, *(len(implementation) for _, implementation, _ in served))
        for op, implementation, reason in served:
            print(f"  {op:<28} {implementation:<{width}}  {reason}")


def _refused_variables() -> dict[str, Finding]:
    """The environment variables whose value raises when it is read, each with its fix."""
    refused = {}
    for variable, read in _VARIABLES.items():
        try:
            read()
        except ConfigError as error:
            state, _, fix = str(error).partition(". Fix: ")
            refused[variable] = Finding("environment", state, fix)
    return refused


def _signaled() -> list[Finding]:
    """That the signaled strategy was asked for where its kernels cannot run, and why.

    On CPU its twin serves.
    """
    if envs.overlap() != "signaled" or not _has_gpu():
        return []
    from tpkernels.kernels import available

    triton = available.status()
    if triton.available:
        return []
    state = f"TPKERNELS_OVERLAP=signaled: cannot serve here: {triton.reason}"
    unset = "unset TPKERNELS_OVERLAP"
    return [Finding("environment", state, f"{triton.fix}, or {unset}" if triton.fix else unset)]


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def _unset(variables: Iterable[str]) -> Iterator[None]:
    values = {variable: os.environ.pop(variable) for variable in variables}
    try:
        yield
    finally:
        os.environ.update(values)


def _machine() -> list[Finding]:
    findings = [
        Finding("tpkernels", tpkernels.__version__),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
    ]
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        install = f"install g++ or clang++, then: {BUILD_COMMAND}"
        findings.append(Finding("C++ compiler", "none: plain PyTorch serves all ops", install))
    else:
        findings.append(Finding("C++ compiler", _first_line([compiler, "--version"])))
    nvcc = shutil.which("nvcc")
    findings.append(Finding("nvcc", _last_line([nvcc, "--version"]) if nvcc else "none"))
    for package, (use, install) in _OPTIONAL.items():
        version = _version(package)
        fix = None if version else install
        findings.append(Finding(package, version or f"not installed: needed for {use}", fix))
    return findings


def _torch() -> list[Finding]:
    status = native.status()
    extension = Finding("extension", status.reason, status.fix)
    if importlib.util.find_spec("torch") is None:
        missing = "not installed: every tensor feature needs it"
        return [Finding("torch", missing, _INSTALL_TORCH), extension]
    import torch
    import torch.distributed as dist

    findings = [Finding("torch", torch.__version__), extension]
    backends = [
        name
        for name, available in (
            ("gloo", dist.is_gloo_available()),
            ("nccl", dist.is_nccl_available()),
        )
        if available
    ]
    findings.append(Finding("backends", ", ".join(backends) or "none"))
    findings.append(_tpshm())
    if torch.version.cuda is None:
        # --force-reinstall: pip takes the CPU build of the same version for good enough
        fix = f"pip install --force-reinstall torch (a CUDA build), then: {BUILD_COMMAND}"
        findings.append(Finding("CUDA", "this torch is a CPU build", fix))
        return findings
    count = torch.cuda.device_count()
    if not count:
        findings.append(Finding("CUDA", f"torch has CUDA {torch.version.cuda}, but sees no GPU"))
        return findings
    findings.append(Finding("CUDA", torch.version.cuda))
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        peers = [
            str(other)
            for other in range(count)
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        access = f"; peer access to {', '.join(peers)}" if peers else "; no peer access"
        findings.append(Finding(f"GPU {index}", f"{name}, sm_{major}{minor}{access}"))
    return findings


def _tpshm() -> Finding:
    from tpkernels.comm import tpshm

    available, reason, fix = tpshm.availability()
    return Finding(tpshm.NAME, f"{'available' if available else 'not available'}: {reason}", fix)


def _gpus() -> list[DeviceDescription]:
    """The CUDA devices here, one of each name."""
    import torch

    from tpkernels.kernels import table

    found = [table.describe(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    return list(dict.fromkeys(found))


def _tables() -> list[Finding]:
    """Which measured tables are used, and whether they were measured with what is here."""
    if importlib.util.find_spec("torch") is None:
        return []
    from tpkernels.kernels import table

    found = []
    for device in _gpus():
        for file in table.table_of(device).files:
            found.append(_table(device.name, file))
        if not table.table_of(device).files:
            state = f"none for {device.name}: plain PyTorch serves what was not measured"
            found.append(Finding("measured table", state, table.TUNE))
    where = f"the user's own are kept in {table.user_folder()}"
    return [*found, Finding("measured table", where if found else f"no GPU to need one; {where}")]


def _table(device: str, file: TableFile) -> Finding:
    import torch

    from tpkernels.kernels import table

    origin = "shipped" if file.path.parent == table.SHIPPED else "the user's"
    rows = len(file.rows)
    state = f"{device}: {rows} row{'s' * (rows != 1)}, {origin} ({file.path}), of "
    state += file.head["date"] or "unknown date"
    here = (torch.__version__, table.triton_version())
    others = {(row.torch, row.triton) for row in file.rows} - {here}
    if not others:
        return Finding("measured table", state)
    with_ = ", ".join(f"torch {torch_} and Triton {triton}" for torch_, triton in sorted(others))
    state += f"; measured with {with_}, here are torch {here[0]} and Triton {here[1] or 'none'}"
    return Finding("measured table", state, table.TUNE)


def _implementations() -> tuple[list[dict[str, Any]], dict[str, list[Served]]]:
    """Every implementation, and what serves each op: place -> op, implementation, reason."""
    if importlib.util.find_spec("torch") is None:
        off = {"available": False, "reason": "needs torch", "fix": _INSTALL_TORCH}
        return [{"name": name, **off} for name in envs.IMPLEMENTATIONS], {}
    from tpkernels import modules  # noqa: F401 (defines every op)
    from tpkernels.ops import choice, implementations

    ops = {_CPU: _served(choice.resolve_all)}
    for device in _gpus():
        ops[device.name] = _served(choice.resolve_on, device)
    return [asdict(status) for status in implementations.implementations()], ops


def _served(resolve: Callable[..., list[Served]], *args: Any) -> list[Served]:
    try:
        return resolve(*args)
    except ConfigError as error:  # TPKERNELS_GEMM asks for what cannot serve
        return [("every op", "none", str(error))]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    return _output(command).splitlines()[0]


def _last_line(command: list[str]) -> str:
    return _output(command).splitlines()[-1]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {error}"
    return done.stdout.strip() or f"{command[0]} exits {done.returncode} without a word"


if __name__ == "__main__":
    sys.exit(command(["doctor", *sys.argv[1:]]))
