"""The programs of `tpkernels bench` and their options: measure, tune, report, between ranks."""

from __future__ import annotations

import contextlib
from argparse import Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch

from tpkernels import launch
from tpkernels.benchmarks import (
    collectives,
    collectives_options,
    gemm_gelu,
    mlp,
    mlp_ranks,
    options,
    overlap,
    report,
    rows,
    session,
    tune,
    zero3,
)
from tpkernels.benchmarks.budget import Budget
from tpkernels.benchmarks.harness import Settings
from tpkernels.benchmarks.session import Job, Session
from tpkernels.benchmarks.shapes import Shard, custom
from tpkernels.benchmarks.timers import cache_bytes
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError

PROGRAMS = {
    "gemm_gelu": "Forward GEMM + GELU against eager, torch.compile and cuBLASLt's epilogue",
    "mlp": "A whole MLP shard, forward and forward + backward; with --nproc, between CPU ranks",
    "tune": "Measure which implementation serves each op and size fastest on this GPU, and keep it",
    "report": "JSONL rows as a markdown table and a chart",
    "zero3": zero3.DESCRIPTION,
    "overlap": overlap.DESCRIPTION,
    "collectives": collectives.DESCRIPTION,
}
# Programs with options of their own. `mlp` between ranks is one, under the name of the other.
_MLP_RANKS = "mlp --nproc N"
_COMM = "comm"  # `tpkernels comm`: the same as `tpkernels bench collectives`
_OWN_OPTIONS = {
    _COMM: (collectives.DESCRIPTION, collectives_options.add_options),
    "collectives": (collectives.DESCRIPTION, collectives_options.add_options),
    _MLP_RANKS: (mlp_ranks.DESCRIPTION, mlp_ranks.add_options),
    "overlap": (overlap.DESCRIPTION, overlap.add_options),
    "report": (PROGRAMS["report"], report.add_options),
    "zero3": (PROGRAMS["zero3"], zero3.add_options),
}
_QUICK_SECONDS, _QUICK_MOST = 0.3, 10


def run(argv: list[str]) -> int:
    """What `tpkernels.benchmarks.command.main` does, but for how errors are shown."""
    arguments = list(argv)
    program = None
    if arguments[:1] != ["overlap"]:  # it has a --tune of its own
        for flag in ("--tune", "--report"):
            if program is None and flag in arguments:
                arguments.remove(flag)
                program = flag.removeprefix("--")
    if program is None and arguments and not arguments[0].startswith("-"):
        program = arguments.pop(0)
    if program == "mlp" and _between_ranks(arguments):
        program = _MLP_RANKS
    parser = _parser(program)
    if program not in (None, *PROGRAMS, *_OWN_OPTIONS):
        parser.error(f"{program!r} is not a benchmark; allowed: {', '.join(PROGRAMS)}")
    parsed = parser.parse_args(arguments)
    if program in ("collectives", _COMM):
        return collectives.run(parsed, arguments)
    if program == _MLP_RANKS:
        return mlp_ranks.run(parsed, arguments)
    if program == "tune":
        return tune.run(parsed)
    if program == "report":
        return report.run(parsed)
    if program == "zero3":
        return zero3.run(parsed)
    if program == "overlap":
        return overlap.run(parsed, arguments)
    return _measure(parsed, [program] if program else ["gemm_gelu", "mlp"])


def _between_ranks(arguments: list[str]) -> bool:
    return launch.inside_rank() or any(a.partition("=")[0] == "--nproc" for a in arguments)


def _parser(program: str | None) -> CommandParser:
    if program in _OWN_OPTIONS:
        description, add_options = _OWN_OPTIONS[program]
        name = "tpkernels comm" if program == _COMM else f"tpkernels bench {program}"
        parser = CommandParser(prog=name, usage=f"{name} [options]", description=f"{description}.")
        add_options(parser)
        return parser
    known = program in PROGRAMS
    programs = "\n".join(f"  {name:<12} {text}" for name, text in PROGRAMS.items())
    parser = CommandParser(
        prog=f"tpkernels bench {program}" if known else "tpkernels bench",
        usage=None if known else "tpkernels bench [PROGRAM] [options]",
        description=f"{PROGRAMS[program]}."
        if program in PROGRAMS
        else "Measure gemm_gelu and mlp, or what PROGRAM says.",
        epilog=None
        if known
        else f"programs:\n{programs}\n\n`tpkernels bench PROGRAM --help` shows a program's "
        "options; `bench --tune` is `bench tune`.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    options.add_shapes(parser)
    options.add_run(parser)
    if program == "tune":
        tune.add_options(parser)
        return parser
    _add_options(parser, program)
    return parser


def _add_options(parser: CommandParser, program: str | None) -> None:
    options.add_device(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the rows, JSONL")
    parser.add_argument(
        "--full", action="store_true", help="all shapes also on a CPU: hours, and tens of GB"
    )
    parser.add_argument("--quick", action="store_true", help="few shapes and repetitions")
    parser.add_argument(
        "--threads", type=positive, default=1, help="CPU threads of PyTorch (default: 1)"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="the same inputs each time, instead of copies beyond the last-level cache",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    if program != "mlp":
        parser.add_argument(
            "--act",
            nargs="+",
            choices=gemm_gelu.ACTS,
            default=[gemm_gelu.ACTS[0]],
            help=f"which GELU gemm_gelu has (default: {gemm_gelu.ACTS[0]})",
        )
    if program == "mlp":
        parser.add_argument(
            "--nproc",
            metavar="N",
            help="measure the whole MLP between N CPU ranks instead; `tpkernels bench mlp --nproc "
            "2 --help` shows the options of that",
        )
    if program != "gemm_gelu":
        parser.add_argument(
            "--gated", action="store_true", help="with --shapes: mlp is a gated one, with SiLU"
        )


def _measure(parsed: Namespace, programs: list[str]) -> int:
    device = options.chosen_device(parsed)
    dtype = options.chosen_dtype(parsed, device)
    shards = options.chosen_shards(parsed, device, full=parsed.full, quick=parsed.quick)
    gated = getattr(parsed, "gated", False)
    if gated and not parsed.shapes:
        raise ConfigError("--gated goes with --shapes: a model says itself. Fix: leave it out")
    options.check_output("--out", parsed.out)
    if device.type == "cpu":
        settings = Settings(1.0, 5, 20, 0 if parsed.warm else cache_bytes(device))
    else:
        settings = Settings(0.5, 7, 100, 0 if parsed.warm else cache_bytes(device))
    if parsed.quick:
        settings = Settings(_QUICK_SECONDS, 3, _QUICK_MOST, settings.rotate_bytes)
    mlps = custom(parsed.shapes, "silu", True) if gated else shards
    acts = parsed.act if "gemm_gelu" in programs else []
    jobs: list[Job] = []
    for shard, whole in zip(shards, mlps, strict=True):  # so that a budget serves both programs
        jobs += [_gemm_job(shard, act, dtype, device, not parsed.no_compile) for act in acts]
        if "mlp" in programs:
            for op in (mlp.FORWARD_BACKWARD, mlp.FORWARD):
                jobs.append(_mlp_job(op, whole, dtype, device, not parsed.no_compile))
    found: list[rows.Row] = []
    with session.threads(parsed.threads), contextlib.ExitStack() as stack:
        out = stack.enter_context(rows.appending(parsed.out)) if parsed.out else None
        run = Session(
            device, dtype, rows.origin(device, parsed.commit), settings, Budget(parsed.budget), out
        )
        try:
            for case_rows in run.run(jobs):
                found += case_rows
        finally:
            _show(found, parsed.out)
    return 1 if any(row.error and row.error.startswith("wrong") for row in found) else 0


def _gemm_job(
    shard: Shard, act: str, dtype: torch.dtype, device: torch.device, compile: bool
) -> Job:
    return Job(
        f"gemm_gelu {shard} {act}",
        shard,
        act,
        lambda: gemm_gelu.case(shard, act, dtype, device, compile=compile),
    )


def _mlp_job(op: str, shard: Shard, dtype: torch.dtype, device: torch.device, compile: bool) -> Job:
    return Job(
        f"{op} {shard}",
        shard,
        shard.act,
        lambda: mlp.case(op, shard, dtype, device, compile=compile),
    )


def _show(found: list[rows.Row], out: Path | None) -> None:
    if found:
        print(report.text(found), flush=True)
    if out is not None:
        print(f"{len(found)} rows appended to {out}", flush=True)
