"""Prints the machine's facts, one ``name: value`` a line; also finds the commit of a checkout."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("triton", "numpy", "pytest", "hypothesis", "matplotlib", "transformers")


def commit_of(root: Path) -> str:
    """The checkout's commit, ``+`` after it where files have changed; ``unknown`` without git."""
    found = []
    for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"]):
        done = _output(["git", "-C", str(root), *words])
        if done is None:
            return "unknown"
        found.append(done)
    return found[0] + ("+" if found[1] else "")


def nvcc() -> str | None:
    """nvcc of CUDA_HOME, of PATH or of /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    beside = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    candidates = [beside[0]] if len(beside) > 1 else []
    candidates += [shutil.which("nvcc") or "", beside[-1]]
    return next((path for path in candidates if path and Path(path).is_file()), None)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(commit: str) -> int:
    """Print; 0 if torch can be imported."""
    print(f"commit: {commit}")
    print(f"python: {platform.python_version()} ({sys.executable})")
    print(f"cpu: {os.cpu_count()} cores, {platform.machine()}")
    for name in _PACKAGES:
        there = importlib.util.find_spec(name) is not None
        print(f"{name}: {_version(name) if there else 'none'}")
    compiler = nvcc()
    print(f"nvcc: {_release(compiler) if compiler else 'none'}", flush=True)
    import torch

    print(f"torch: {torch.__version__}", flush=True)  # known, whatever the GPU's driver does next
    there = torch.cuda.is_available()
    print(f"cuda: {'yes' if there else 'no'}", flush=True)
    if there:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            memory = f"{found.total_memory / 2**30:.0f} GiB"
            capability = f"sm_{found.major}{found.minor}"
            count = f"{found.multi_processor_count} SMs"
            print(f"gpu {index}: {found.name}, {capability}, {count}, {memory}")
        print(f"cudnn: {torch.backends.cudnn.version()}")
        fields = "name,driver_version,clocks.max.sm,power.limit,temperature.gpu"
        smi = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        print(f"nvidia-smi: {smi or 'none'}")
    return 0


def _release(compiler: str) -> str:
    """The line of ``nvcc --version`` that names the release."""
    lines = [line.strip() for line in (_output([compiler, "--version"]) or "").splitlines()]
    told = next((line for line in lines if "release" in line), lines[-1] if lines else "")
    return told or f"{compiler}, of unknown version"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of unknown version"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
