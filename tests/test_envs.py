"""Environment variables: read when needed, and a wrong value names the variable and the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpkernels import envs
from tpkernels.errors import ConfigError

READERS = {
    "TPKERNELS_GEMM": (envs.gemm, "auto", "cpu"),
    "TPKERNELS_OVERLAP": (envs.overlap, "auto", "chunked"),
    "TPKERNELS_CHECK": (envs.check, "first", "always"),
    "TPKERNELS_NATIVE": (envs.native, True, "0"),
    "TPKERNELS_TIMEOUT": (envs.timeout, 300.0, "12.5"),
}


@pytest.mark.parametrize("variable", READERS)
def test_default_set_empty_and_wrong(variable, monkeypatch):
    read, default, other = READERS[variable]
    monkeypatch.delenv(variable, raising=False)
    assert read() == default
    monkeypatch.setenv(variable, other)
    assert str(read()) in (other, "False")
    monkeypatch.setenv(variable, "")
    assert read() == default  # as a shell script unsets it
    monkeypatch.setenv(variable, "sometimes")
    with pytest.raises(ConfigError, match=rf"{variable}='sometimes'.*allowed: .*Fix: "):
        read()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_is_above_zero(seconds, monkeypatch):
    monkeypatch.setenv("TPKERNELS_TIMEOUT", seconds)
    with pytest.raises(ConfigError, match="allowed: a number of seconds greater than 0"):
        envs.timeout()


def test_the_cache_is_a_directory_that_need_not_exist(monkeypatch, tmp_path):
    monkeypatch.delenv("TPKERNELS_CACHE", raising=False)
    assert envs.cache() == Path.home() / ".cache" / "tpkernels"
    monkeypatch.setenv("TPKERNELS_CACHE", "")
    assert envs.cache() == Path.home() / ".cache" / "tpkernels"
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path / "made later"))
    assert envs.cache() == tmp_path / "made later"
    monkeypatch.setenv("TPKERNELS_CACHE", "~/x")
    assert envs.cache() == Path.home() / "x"
    monkeypatch.setenv("TPKERNELS_CACHE", __file__)
    with pytest.raises(ConfigError, match=r"TPKERNELS_CACHE=.* is a file; allowed: .*Fix: unset"):
        envs.cache()


def test_the_table_names_every_variable():
    named = [*READERS, "TPKERNELS_CACHE"]
    assert all(f"``{variable}``" in envs.__doc__ for variable in named)


def test_the_table_names_every_value():
    words = envs.__doc__.replace(",", " ").replace(":", " ").split()
    assert set(envs.IMPLEMENTATIONS) | set(envs.OVERLAP_STRATEGIES) <= set(words)


def test_importing_with_a_wrong_value_warns_in_one_line():
    environment = {**os.environ, "TPKERNELS_NATIVE": "7"}
    command = [sys.executable, "-c", "import tpkernels"]
    done = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "TPKernelsWarning: TPKERNELS_NATIVE='7' is not known" in done.stderr
