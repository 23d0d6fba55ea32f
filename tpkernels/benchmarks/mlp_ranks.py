"""The whole tensor-parallel MLP between CPU ranks, forward: `tpkernels bench mlp --nproc N`.

Variants in turns in one run (mlp_ranks_variants.py), each checked against float64 first. Rank 0
prints and writes the rows of a shape as they are measured, so that an interrupt keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.benchmarks import gate, mlp_ranks_rows, options, row_files, rows
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.collectives import show_markdown
from tpkernels.benchmarks.collectives_backends import TPSHM, absent
from tpkernels.benchmarks.collectives_options import add_files
from tpkernels.benchmarks.harness import first_line
from tpkernels.benchmarks.mlp_ranks_rows import Ceilings, MLPRanksRow, Result
from tpkernels.benchmarks.mlp_ranks_variants import (
    DENSE,
    NAMES,
    ON_TPSHM,
    Shape,
    build,
    connect,
    served_by,
    state,
    truth,
)
from tpkernels.benchmarks.ranks import Ranks, WrongResultError, add_nproc, chosen_world
from tpkernels.benchmarks.ranks import run as run_ranks
from tpkernels.benchmarks.timers import cache_bytes
from tpkernels.benchmarks.turns import Timed, Turns, measure
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError

DESCRIPTION = "The whole MLP between CPU ranks, forward: dense, DTensor, and ours"
_M = (1, 16, 128, 512)
_WIDTHS = ((768, 3072), (1024, 4096))
_QUICK_M, _QUICK_WIDTHS = (1, 16), ((256, 1024),)
_SECONDS, _QUICK_SECONDS = 3.0, 0.3  # of one shape, all variants together
_GEMM_SIZE, _CEILING_CALLS = 1024, 25
_MOST_COPIES = 64


def widths(text: str) -> tuple[int, int]:
    """An argument's type: `d,h`."""
    parts = text.split(",")
    if len(parts) != 2 or not all(p.isascii() and p.isdecimal() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not d_model,d_ff; allowed: two whole numbers from 1. "
            "Fix: --widths 768,3072"
        )
    return int(parts[0]), int(parts[1])


def add_options(parser: CommandParser) -> None:
    add_nproc(parser)
    parser.add_argument(
        "--m",
        nargs="+",
        type=positive,
        metavar="M",
        help=f"tokens (default: {' '.join(map(str, _M))})",
    )
    shown = " ".join(f"{d},{h}" for d, h in _WIDTHS)
    parser.add_argument(
        "--widths",
        nargs="+",
        type=widths,
        metavar="D,H",
        help=f"d_model,d_ff of the whole MLP (default: {shown})",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=options.DTYPES,
        metavar="TYPE",
        default=["fp32", "bf16"],
        help=f"{', '.join(options.DTYPES)} (default: fp32 bf16)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"only these, beside {DENSE}: {', '.join(map(repr, NAMES[1:]))} (default: those that "
        "can run)",
    )
    caches = parser.add_mutually_exclusive_group()
    caches.add_argument("--warm", action="store_true", help="only with the same weights each time")
    caches.add_argument(
        "--rotate",
        action="store_true",
        help="only with copies of the weights in turn, beyond the last-level cache (default: both)",
    )
    parser.add_argument(
        "--seconds",
        type=options.seconds,
        metavar="S",
        help=f"for each shape, warm and rotated (default: {_SECONDS:g})",
    )
    parser.add_argument("--quick", action="store_true", help="a small MLP, and few repetitions")
    add_files(parser)


def run(parsed: Namespace, argv: Sequence[str]) -> int:
    """`tpkernels bench mlp ARGV`; 1 where a result was wrong or a rank failed."""
    for option in ("out", "markdown"):
        options.check_output(f"--{option}", getattr(parsed, option))
    if parsed.read is not None:
        show_markdown(mlp_ranks_rows.text(mlp_ranks_rows.read(parsed.read)), parsed.markdown)
        return 0
    world = chosen_world(parsed.nproc)
    shared = [name for name in parsed.variants or () if name in ON_TPSHM]
    why = absent(TPSHM, "cpu")
    if shared and why is not None:
        raise ConfigError(f"--variants {shared[0]!r}: {why}")
    for d, h in parsed.widths or ():
        if h < world:
            raise ConfigError(
                f"--widths {d},{h}: d_ff must be at least the {world} ranks. Fix: a larger one"
            )
    return run_ranks(["bench", "mlp", *argv], world, parsed, torch.device("cpu"), _measure)


def _measure(ranks: Ranks, parsed: Namespace) -> None:
    """As one rank; rank 0 prints and writes.

    Raises:
        WrongResultError: on all ranks, after the last row.
    """
    names = [name for name in NAMES if name == DENSE or name in (parsed.variants or NAMES)]
    groups = connect(names, parsed.variants is not None, ranks)
    shapes = [
        Shape(m, d, h)
        for d, h in parsed.widths or (_QUICK_WIDTHS if parsed.quick else _WIDTHS)
        for m in parsed.m or (_QUICK_M if parsed.quick else _M)
    ]
    colds = [cold for cold in (False, True) if not (parsed.rotate if not cold else parsed.warm)]
    cases = [(dtype, shape, cold) for cold in colds for dtype in parsed.dtype for shape in shapes]
    turns = Turns(parsed.seconds or (_QUICK_SECONDS if parsed.quick else _SECONDS))
    origin = rows.origin(ranks.device, parsed.commit)
    found: list[MLPRanksRow] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        out = None
        if parsed.out is not None and ranks.rank == 0:
            out = stack.enter_context(rows.appending(parsed.out))
        progress, ceiling = Progress(len(cases), Budget()), Ceiling(ranks)
        ranks.say(f"# {ranks.placed()}; {origin.device}")
        for name, shape, cold in cases:
            if ranks.rank == 0:
                progress.step(f"{name} {shape} {'rotated' if cold else 'warm'}")
            dtype = options.DTYPES[name]
            rotate = cache_bytes(ranks.device) if cold else 0
            made = mlp_ranks_rows.make_rows(
                shape,
                str(dtype).removeprefix("torch."),
                dtype.itemsize,
                ranks.world,
                run_shape(shape, dtype, groups, ranks, turns, rotate),
                ceiling.of(shape, dtype, rotate),
                origin,
                cold=cold,
                pinned=ranks.core is not None,
            )
            found += made
            for row in made:
                ranks.say(_line(row))
            if out is not None:
                row_files.write(made, out)
    if ranks.rank == 0:
        markdown = mlp_ranks_rows.text(found)
        print(f"\n{markdown}", flush=True)
        if parsed.markdown is not None:
            show_markdown(markdown, parsed.markdown)
    if parsed.out is not None:
        ranks.say(f"{len(found)} rows appended to {parsed.out}")
    wrong = [row for row in found if (row.error or "").startswith("wrong")]
    if wrong:
        raise WrongResultError(
            f"{len(wrong)} results were wrong, the first: {wrong[0].implementation}, "
            f"M={wrong[0].shape['m']}, {wrong[0].dtype}: {wrong[0].error}"
        )


def run_shape(
    shape: Shape,
    dtype: torch.dtype,
    groups: Mapping[str, Any],
    ranks: Ranks,
    turns: Turns,
    rotate_bytes: int = 0,
) -> list[Result]:
    """Check each variant of `groups`, `dense` first, and time those that are right; collective."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.m, shape.d, generator=generator).to(dtype)
    weights = state(shape, dtype, 0)
    exact = truth(shape, weights, x)
    eager = build(DENSE, shape, weights, dtype, None)(x)
    results, running = [], []
    for name, group in groups.items():
        parts = 1 if name == DENSE else ranks.world
        part_bytes = shape.weights * dtype.itemsize // parts
        copies = min(_MOST_COPIES, 1 + -(-rotate_bytes // part_bytes)) if rotate_bytes else 1
        modules: list[nn.Module] = []
        error, relative = None, float("nan")
        try:
            modules.append(build(name, shape, weights, dtype, group))
            relative, wrong = gate.check(
                [_output(modules[0], x)], [eager], [gate.Truth("y", lambda y: y, exact)]
            )
            error = f"wrong: {wrong}" if wrong else None
            if error is None:
                for seed in range(1, copies):
                    other = state(shape, dtype, seed)
                    modules.append(build(name, shape, other, dtype, group))
        except Exception as failed:  # whatever a peer raises is its row's result
            error = f"cannot run: {first_line(failed)}"
        error = ranks.first_error(error)
        (relative,) = ranks.largest([relative])
        served = served_by(name, modules[0], x) if modules else None
        results.append(Result(name, served, relative, error))
        if error is None:
            calls = [partial(module, x) for module in modules]
            running.append(Timed(name, calls, alone=name == DENSE))
    others = measure(running, ranks, turns) if running else None
    timed = {each.name: each for each in running}
    gc.collect()
    return [
        replace(
            each,
            percentiles=timed[each.name].percentiles,
            repetitions=len(timed[each.name].us),
            calls=timed[each.name].batch,
            others_share=others,
        )
        if each.name in timed
        else each
        for each in results
    ]


def _output(module: nn.Module, x: Tensor) -> Tensor:
    y = module(x)
    return y.full_tensor() if hasattr(y, "full_tensor") else y


class Ceiling:
    """What the hardware allows, measured once for each dtype and size of weights; collective."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._flops: dict[torch.dtype, float] = {}
        self._read: dict[tuple[int, int], float] = {}

    def of(self, shape: Shape, dtype: torch.dtype, rotate_bytes: int) -> Ceilings:
        size = shape.weights * dtype.itemsize
        return Ceilings(
            self._flops_of(dtype),
            self._read_of(size, rotate_bytes),
            self._read_of(size // self.ranks.world, rotate_bytes),
        )

    def _flops_of(self, dtype: torch.dtype) -> float:
        if dtype not in self._flops:
            a, b = (torch.rand(_GEMM_SIZE, _GEMM_SIZE).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            seconds = self._least_seconds([partial(torch.mm, a, b, out=out)])
            self._flops[dtype] = 2 * _GEMM_SIZE**3 / seconds
        return self._flops[dtype]

    def _read_of(self, size: int, rotate_bytes: int) -> float:
        """Bytes/s of a dot product of two halves."""
        if (size, rotate_bytes) not in self._read:
            copies = 1 + -(-rotate_bytes // size) if rotate_bytes else 1
            data = torch.rand(copies, 2, max(1, size // 8))
            seconds = self._least_seconds([partial(torch.dot, a, b) for a, b in data])
            self._read[size, rotate_bytes] = size / seconds
        return self._read[size, rotate_bytes]

    def _least_seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of one of the calls, which all ranks make at once; the slowest rank's."""
        self.ranks.barrier()
        best = float("inf")
        for number in range(_CEILING_CALLS + len(calls)):
            start = time.perf_counter()
            calls[number % len(calls)]()
            best = min(best, time.perf_counter() - start)
        (slowest,) = self.ranks.largest([best])
        return slowest


def _line(row: MLPRanksRow) -> str:
    shape = row.shape
    where = f"{row.dtype} M={shape['m']} d={shape['d']} {'rotated' if row.cold else 'warm'}"
    if row.us is None:
        return f"{where:<32}{row.implementation:<15}{row.error}"
    ratios = [
        f"{name} / this {value:.2f}"
        for name, value in (("dense", row.ratio_to_dense), ("dtensor gloo", row.ratio_to_dtensor))
        if value is not None
    ]
    return (
        f"{where:<32}{row.implementation:<15}{row.us:>10.1f} us ({row.p20_us:.1f} to "
        f"{row.p80_us:.1f}); {', '.join(ratios)}; {row.percent_of_limit:.0f}% of limit"
    )
