"""Command-line options that the benchmarks share, and what they stand for."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import torch

from tpkernels.benchmarks import rows, shapes
from tpkernels.benchmarks.shapes import Shard
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shape(text: str) -> tuple[int, int, int]:
    """An argument's type: `M,N,K`."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isascii() and p.isdecimal() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; allowed: M,N,K, each a whole number from 1. "
            "Fix: --shapes 2048,1600,6400"
        )
    m, n, k = map(int, parts)
    return m, n, k


def seconds(text: str) -> float:
    """An argument's type: a time greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e8:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; allowed: seconds, greater than 0. Fix: for example 60"
        )
    return value


def add_shapes(parser: CommandParser) -> None:
    """`--models`, `--tp`, `--m`, `--shapes`."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=shapes.MODELS,
        metavar="MODEL",
        help=f"whose MLPs: {', '.join(shapes.MODELS)} (default: all)",
    )
    parser.add_argument(
        "--tp",
        nargs="+",
        type=positive,
        metavar="R",
        help=f"ranks that share an MLP (default: {' '.join(map(str, shapes.TP))})",
    )
    parser.add_argument(
        "--m",
        nargs="+",
        type=positive,
        metavar="M",
        help=f"tokens (default: {' '.join(map(str, sorted(shapes.M)))})",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="M,N,K",
        help="these instead of models': tokens, d_ff of the rank, d_model",
    )


def add_run(parser: CommandParser) -> None:
    """What every measurement has."""
    parser.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help="start no case after that (default: none)"
    )
    parser.add_argument(
        "--commit", metavar="TEXT", help="the commit to name in the results, without git"
    )


def add_device(parser: CommandParser) -> None:
    """`--device` and one `--dtype`."""
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where torch sees a GPU"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on cuda, fp32 on cpu")


def chosen_device(options: argparse.Namespace) -> torch.device:
    """`--device`, or what is there.

    Raises:
        ConfigError: cuda was asked for and torch sees no GPU.
    """
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise ConfigError("--device cuda: torch sees no GPU. Fix: --device cpu")
    if options.device == "cpu" or not there:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def chosen_dtype(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    return DTYPES[options.dtype or ("fp32" if device.type == "cpu" else "bf16")]


def chosen_shards(
    options: argparse.Namespace, device: torch.device, *, full: bool, quick: bool
) -> list[Shard]:
    """By `--shapes`, or by models, ranks and tokens; else what suits the device.

    Raises:
        ConfigError: options that contradict each other.
    """
    named = [name for name in ("models", "tp", "m") if getattr(options, name)]
    if options.shapes:
        taken = [f"--{name}" for name in named] + ["--full"] * full
        if taken:
            raise ConfigError(
                f"--shapes and {taken[0]} exclude each other. Fix: leave one of them out"
            )
        return shapes.custom(options.shapes)
    if full and quick:
        raise ConfigError("--full and --quick exclude each other. Fix: leave one of them out")
    if not named and quick:
        return shapes.quick(device.type)
    if not named and not full and device.type == "cpu":
        return shapes.small()
    return list(
        shapes.shards(
            options.models or shapes.MODELS, options.tp or shapes.TP, options.m or shapes.M
        )
    )


def check_output(option: str, path: Path | None) -> None:
    """Refuse, before anything is measured, a file that could not be written at the end.

    Raises:
        ConfigError: a directory, a missing directory, or no permission.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(
            f"{option} {path}: it is a directory. Fix: {option} {path / 'rows.jsonl'}"
        )
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: its directory is not there. Fix: mkdir -p {folder}")
    there = path.exists()
    try:
        if there and not path.is_file():  # opening a pipe waits for who reads it
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            path.open("a").close()  # the one certain test: file systems have rules of their own
            if not there:
                path.resolve().unlink()
    except OSError as error:
        raise rows.unwritable(option, path, error) from error
