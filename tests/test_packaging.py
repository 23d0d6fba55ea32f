"""`pip install .` as a user does it: quick and whole without torch, and what is in the wheel."""

from __future__ import annotations

import shutil
import subprocess
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tpkernels.build.sources import PACKAGE, is_checkout, source_files

ROOT = PACKAGE.parent

pytestmark = pytest.mark.skipif(not is_checkout(), reason="needs the repository")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy without anything that was built in it."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("csrc", "python", "tpkernels"):
        ignored = shutil.ignore_patterns("__pycache__", "_C*", "_build_info.json", "_sources")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """An empty virtual environment."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=True)
    return directory


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def installed(repository, environment) -> Path:
    """The environment, after an isolated `pip install --no-deps .`."""
    began = time.monotonic()
    pip = environment / "bin" / "pip"
    done = run(pip, "install", "--no-deps", "--disable-pip-version-check", repository)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    assert seconds < 60
    return environment


def test_import_without_torch_is_one_line(installed, tmp_path):
    done = run(installed / "bin" / "python", "-c", "import tpkernels", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "torch is not installed" in line
    assert "pip install 'torch>=2.11'" in line


def test_doctor_without_torch(installed, tmp_path):
    done = run(installed / "bin" / "tpkernels", "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout
    assert "fix: pip install 'torch>=2.11'" in done.stdout


def test_build_without_torch_names_the_fix(installed, tmp_path):
    command = (installed / "bin" / "python", "-m", "tpkernels.build")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'torch>=2.11'" in done.stderr


def test_the_wheel_holds_the_sources_and_nothing_built(repository, environment, tmp_path):
    pip = environment / "bin" / "pip"
    done = run(pip, "wheel", "--no-deps", "-w", tmp_path, repository)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in source_files(ROOT)}
    assert {f"tpkernels/_sources/{name}" for name in sources} <= names
    assert not {name for name in names if name.endswith(".so") or "/tests/" in name}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {name for name in modules if "_sources" not in name} <= names
