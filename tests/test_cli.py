"""The `tpkernels` command: what it offers works, and what it does not is one line."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tpkernels
from tpkernels import cli

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> int:
    """Exit status of the command in this process."""
    try:
        return cli.main(list(arguments))
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tpkernels {tpkernels.__version__}\n"


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    shown = capsys.readouterr().out
    for name, (_, _, help_) in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert help_ in shown


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_exists_and_has_help(command, capsys):
    module, _, _ = cli.COMMANDS[command]
    assert callable(importlib.import_module(module).main)
    assert run(command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: tpkernels {command}")


def test_no_command_shows_the_help(capsys):
    assert run() == cli.USAGE_ERROR
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"]], ids=str)
def test_an_unknown_command_is_one_line(arguments, capsys):
    assert run(*arguments) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tpkernels --help" in error


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_rank_count_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"allowed: 1, 2, 3.*Fix: --nproc 2"):
        cli.rank_count(text)


def test_rank_count_reads():
    assert cli.rank_count("3") == 3


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--version"], 0), (["demo"], 1)], ids=["version", "demo"]
)
def test_without_torch_it_is_one_line(arguments, status):
    """`-S` leaves site-packages out, and torch with them."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        f"from tpkernels.cli import main; sys.exit(main({arguments}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr.count("\n") == 1 and "torch is not installed" in done.stderr


def test_a_reader_that_leaves_ends_it_quietly():
    """As `tpkernels doctor --json | head -1` does; `-S` leaves torch out, which takes its time."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tpkernels import cli; "
        "cli._run = lambda arguments: print('line\\n' * 10**5); sys.exit(cli.main(['doctor']))"
    )
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(write)
    assert "BrokenPipe" not in done.stderr and done.returncode == cli.READER_LEFT


def test_another_broken_pipe_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr(cli, "_run", lambda arguments: os.write(_broken(), b"x"))
    with pytest.raises(BrokenPipeError):
        cli.main(["doctor"])


def _broken() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def test_python_dash_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "tpkernels", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == f"tpkernels {tpkernels.__version__}\n"
