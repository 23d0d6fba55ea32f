"""The `tpkernels` command: one subcommand a program, each with `--help` of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from typing import NoReturn

import tpkernels

USAGE_ERROR = 2
READER_LEFT = 141  # as a shell says of a program that SIGPIPE ends

# name -> (module with main(argv) -> exit status, whether it needs torch, one line of help)
COMMANDS = {
    "demo": (
        "tpkernels.demo.run",
        True,
        "run pretrained models dense and tensor-parallel, and compare",
    ),
    "bench": (
        "tpkernels.benchmarks.command",
        True,
        "measure against plain PyTorch and its peers, tune this GPU's table, report",
    ),
    "comm": (
        "tpkernels.benchmarks.collectives",
        True,
        "measure collectives between ranks, with the columns of nccl-tests",
    ),
    "trace": (
        "tpkernels.trace_command",
        True,
        "run a program and show what each layer computes, communicates and waits for",
    ),
    "doctor": (
        "tpkernels.doctor",
        False,
        "show what is installed, which kernels serve, and how to fix the rest",
    ),
    "build": (
        "tpkernels.build",
        True,
        "compile the native extension in place, against the torch that is installed",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, where the reader's having left can be told from an error
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return READER_LEFT


def _reader_left() -> bool:
    """Whether nobody reads standard output any more, as in `tpkernels doctor | head -1`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: list[str]) -> int:
    if not arguments:
        _parser().print_help(sys.stderr)
        return USAGE_ERROR
    parsed = _parser().parse_args(arguments)
    module, needs_torch, _ = COMMANDS[parsed.command]
    if needs_torch and not tpkernels._HAVE_TORCH:
        return 1  # `import tpkernels` has said that torch is missing, and how to get it
    return importlib.import_module(module).main(parsed.arguments)


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<8} {help_}" for name, (_, _, help_) in COMMANDS.items())
    parser = CommandParser(
        prog="tpkernels",
        description="Tensor-parallel layers whose communication disappears.",
        epilog=f"commands:\n{commands}\n\n`tpkernels COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tpkernels {tpkernels.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}. See {self.prog} --help\n")


def rank_count(text: str) -> int:
    """An argument's type: a number of ranks, at least 1."""
    return _whole(text, 1, "a number of ranks", "--nproc 2")


def positive(text: str) -> int:
    """An argument's type: a whole number, at least 1."""
    return _whole(text, 1, "a whole number", "give such a number")


def not_negative(text: str) -> int:
    """An argument's type: a whole number, at least 0."""
    return _whole(text, 0, "a whole number", "give such a number")


def _whole(text: str, least: int, what: str, fix: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {what}; allowed: {least}, {least + 1}, {least + 2}, and so on. "
            f"Fix: {fix}"
        )
    return int(text)
