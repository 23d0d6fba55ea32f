"""The options of the benchmark of collectives, and what they stand for."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from pathlib import Path

import torch

from tpkernels.benchmarks import options
from tpkernels.benchmarks.collectives_backends import NAMES, absent, only_all_reduce
from tpkernels.benchmarks.collectives_ops import ALL_REDUCE, DTYPES, OPS, REDOPS
from tpkernels.benchmarks.ranks import add_nproc
from tpkernels.cli import CommandParser
from tpkernels.errors import ConfigError

# One token of d=768; a few; what a DDP bucket and a large activation have.
_SIZES = (768, 12_288, 524_288, 2_097_152)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # as nccl-tests reads -b and -e
_MOST_SIZES = 64
SECONDS, QUICK_SECONDS = 2.0, 0.2  # of one collective and size, all backends together


def sizes(text: str) -> list[int]:
    """An argument's type: element counts, `768,12288`."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of sizes; allowed: numbers of elements from 1, joined by "
            "commas. Fix: --sizes 768,524288"
        )
    return [int(part) for part in parts]


def byte_count(text: str) -> int:
    """An argument's type: `1024`, `8K`, `128M`, `1G`."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of bytes; allowed: from 1, with K, M or G after it. "
            "Fix: -b 8K"
        )
    return int(found[1]) * _UNITS[found[2]]


def factor(text: str) -> float:
    """An argument's type: greater than 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 < value < 1e6:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a factor; allowed: greater than 1. Fix: -f 2"
        )
    return value


def add_options(parser: CommandParser) -> None:
    add_nproc(parser)
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=OPS,
        metavar="OP",
        default=list(OPS),
        help=f"which: {', '.join(OPS)} (default: all)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=sizes,
        metavar="N,N",
        help=f"elements of the whole (default: {','.join(map(str, _SIZES))})",
    )
    for flag, name, which in (("-b", "--min-bytes", "smallest"), ("-e", "--max-bytes", "largest")):
        parser.add_argument(
            flag, name, type=byte_count, metavar="BYTES", help=f"instead: {which} size, 8K, 128M"
        )
    parser.add_argument(
        "-f", "--factor", type=factor, default=2.0, help="from one size to the next (default: 2)"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="TYPE",
        default=["fp32"],
        help=f"{', '.join(DTYPES)} (default: fp32)",
    )
    parser.add_argument(
        "--redop",
        nargs="+",
        choices=REDOPS,
        metavar="OP",
        default=["sum"],
        help=f"of all_reduce and reduce_scatter: {', '.join(REDOPS)} (default: sum)",
    )
    every = dict.fromkeys(name for names in NAMES.values() for name in names)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=every,
        metavar="NAME",
        help=f"{', '.join(every)} (default: those that are there; direct and deepspeed have only "
        "all_reduce)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu; cuda: a GPU a rank"
    )
    caches = parser.add_mutually_exclusive_group()
    caches.add_argument(
        "--warm", action="store_true", help="the same buffers each time (the default)"
    )
    caches.add_argument(
        "--rotate", action="store_true", help="buffers in turn, beyond the last-level cache"
    )
    parser.add_argument(
        "--seconds",
        type=options.seconds,
        metavar="S",
        help=f"for each collective and size (default: {SECONDS:g})",
    )
    parser.add_argument("--quick", action="store_true", help=f"--seconds {QUICK_SECONDS:g}")
    add_files(parser)


def add_files(parser: CommandParser) -> None:
    """`--out`, `--markdown`, `--read`, `--commit`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows, JSONL")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="show these rows; nothing is measured"
    )
    parser.add_argument(
        "--commit", metavar="TEXT", help="the commit to name in the results, without git"
    )


def check(parsed: Namespace, world: int) -> None:
    """Refuse what cannot work, before ranks start."""
    if parsed.device == "cuda" and torch.cuda.device_count() < world:
        raise ConfigError(
            f"--device cuda: {world} ranks need a GPU each, torch sees {torch.cuda.device_count()}."
            " Fix: --device cpu"
        )
    if parsed.sizes and (parsed.min_bytes or parsed.max_bytes):
        raise ConfigError("--sizes and --min-bytes exclude each other. Fix: leave one of them out")
    for dtype in parsed.dtype:
        counts(parsed, dtype, world)
    for name in parsed.backends or ():
        why = absent(name, parsed.device)
        if why is not None:
            raise ConfigError(f"--backends {name}: {why}")
        reasons = [
            only_all_reduce(name, op, dtype, redop)
            for op in parsed.ops
            for dtype in parsed.dtype
            for redop in parsed.redop
        ]
        if all(reasons):
            raise ConfigError(
                f"--backends {name}: {reasons[0]}. Fix: --ops {ALL_REDUCE} --redop sum "
                "--dtype fp32, or leave it out"
            )


def counts(parsed: Namespace, dtype: str, world: int) -> list[int]:
    """Elements of the whole, as they were asked for.

    Raises:
        ConfigError: less than one a rank, or too many sizes.
    """
    if parsed.min_bytes or parsed.max_bytes:
        least = parsed.min_bytes or parsed.max_bytes
        most = parsed.max_bytes or least
        if most < least:
            raise ConfigError(
                f"--max-bytes {most} is below --min-bytes {least}. Fix: exchange them"
            )
        found: list[int] = []
        size = float(least)
        while size <= most and len(found) <= _MOST_SIZES:
            found.append(int(size) // DTYPES[dtype].itemsize)
            size = max(size * parsed.factor, size + DTYPES[dtype].itemsize)
        if len(found) > _MOST_SIZES:
            raise ConfigError(
                f"--factor {parsed.factor:g}: more than {_MOST_SIZES} sizes. Fix: a larger factor"
            )
    else:
        found = [size for part in parsed.sizes or [_SIZES] for size in part]
    if min(found) < world:
        raise ConfigError(
            f"a size of {min(found)} elements of {dtype} is less than one a rank. "
            f"Fix: --sizes {world} or more"
        )
    return found
