"""Finding the C++ compiler, the Python headers and ninja, or saying what is missing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CXX_STANDARD = "-std=c++20"


class Unavailable(Exception):
    """Native code cannot be built here: the reason, and the one-line fix."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}. Fix: {fix}")
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that has compiled a C++20 file."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """``$CXX``, else the first of c++, g++ and clang++ that is there.

    Raises:
        Unavailable: there is none, or it does not compile C++20.
    """
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]
    fix = "install g++ 11 or clang++ 14 or newer (Debian, Ubuntu: apt-get install g++)"
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        version = _first_line([*command, "--version"])
        probe = subprocess.run(
            [*command, CXX_STANDARD, "-x", "c++", "-fsyntax-only", "-"],
            input="#include <bit>\nint main() { return std::bit_cast<int>(0.0f); }\n",
            capture_output=True,
            text=True,
        )
        if probe.returncode:
            error = (probe.stderr.strip().splitlines() or ["no message"])[0]
            raise Unavailable(
                f"{' '.join(command)} ({version}) does not compile C++20: {error}", fix
            )
        return Compiler(tuple(command), version)
    if asked:
        raise Unavailable(f"CXX={asked!r} names no program on PATH", f"unset CXX, or {fix}")
    raise Unavailable("no C++ compiler (looked for c++, g++, clang++)", fix)


def find_python_include() -> Path:
    """The directory of ``Python.h``.

    Raises:
        Unavailable: it is not installed.
    """
    include = Path(sysconfig.get_path("include"))
    if (include / "Python.h").is_file():
        return include
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise Unavailable(
        f"no Python headers ({include / 'Python.h'} is missing)",
        f"Debian, Ubuntu: apt-get install python{version}-dev",
    )


def find_ninja() -> str | None:
    """ninja on PATH or beside this interpreter, or None."""
    found = shutil.which("ninja")
    beside = Path(sys.executable).parent / "ninja"
    return found or (str(beside) if beside.is_file() else None)


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return ((done.stdout or done.stderr).strip().splitlines() or ["unknown version"])[0]
