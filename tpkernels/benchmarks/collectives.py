"""Collectives between ranks: backends in turns, checked exactly, with nccl-tests' columns.

`tpkernels bench collectives`, also `tpkernels comm`. Rank 0 prints and writes each row as it is
measured, so that an interrupt keeps it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tpkernels.benchmarks import collectives_rows, options, row_files, rows
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.collectives_backends import (
    NAMES,
    Backend,
    absent,
    connect,
)
from tpkernels.benchmarks.collectives_ops import (
    BARRIER,
    REDUCING,
    SPLITTING,
    Buffers,
    Exchange,
    wrong_elements,
)
from tpkernels.benchmarks.collectives_options import QUICK_SECONDS, SECONDS, check, counts
from tpkernels.benchmarks.collectives_rows import Case, CollectiveRow, Result
from tpkernels.benchmarks.harness import first_line
from tpkernels.benchmarks.ranks import Ranks, WrongResultError, chosen_world
from tpkernels.benchmarks.ranks import run as run_ranks
from tpkernels.benchmarks.timers import cache_bytes
from tpkernels.benchmarks.turns import Timed, Turns, measure
from tpkernels.errors import ConfigError

DESCRIPTION = "Collectives on tpshm against Gloo, DeepSpeed's op and NCCL; nccl-tests' columns"


def main(argv: list[str]) -> int:
    """`tpkernels comm`."""
    from tpkernels.benchmarks import command

    return command.main(["comm", *argv])


def run(parsed: Namespace, argv: Sequence[str]) -> int:
    """`tpkernels bench collectives ARGV`; 1 where a result was wrong or a rank failed."""
    for option in ("out", "markdown"):
        options.check_output(f"--{option}", getattr(parsed, option))
    if parsed.read is not None:
        show_markdown(collectives_rows.text(collectives_rows.read(parsed.read)), parsed.markdown)
        return 0
    world = chosen_world(parsed.nproc)
    check(parsed, world)
    return run_ranks(
        ["bench", "collectives", *argv], world, parsed, torch.device(parsed.device), _measure
    )


def show_markdown(markdown: str, path: Path | None) -> None:
    """Print it, or write it where that was asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        print(markdown, flush=True)
        return
    try:
        path.write_text(markdown + "\n")
    except OSError as error:
        raise rows.unwritable("--markdown", path, error) from error


def _cases(parsed: Namespace, ranks: Ranks) -> list[Exchange]:
    """All combinations; what is split is a multiple of the ranks, rounded down."""
    found: dict[Exchange, None] = {}
    for op in parsed.ops:
        for dtype in parsed.dtype if op != BARRIER else parsed.dtype[:1]:
            for redop in parsed.redop if op in REDUCING else ["sum"]:
                every = [0] if op == BARRIER else counts(parsed, dtype, ranks.world)
                for count in every:
                    whole = count // ranks.world * ranks.world if op in SPLITTING else count
                    found[
                        Exchange(op, whole, dtype, redop, ranks.rank, ranks.world, ranks.device)
                    ] = None
    return list(found)


def _measure(ranks: Ranks, parsed: Namespace) -> None:
    """As one rank; rank 0 prints and writes.

    Raises:
        WrongResultError: on all ranks, after the last row.
    """
    asked = parsed.backends is not None
    names = parsed.backends or NAMES[parsed.device]
    for name in names if not asked else ():
        why = absent(name, parsed.device)
        if why is not None:
            ranks.note(f"left out {name}: {why}")
    names = [name for name in names if absent(name, parsed.device) is None]
    backends = connect(names, asked, ranks)
    rotate = cache_bytes(ranks.device) if parsed.rotate else 0
    turns = Turns(parsed.seconds or (QUICK_SECONDS if parsed.quick else SECONDS))
    origin = rows.origin(ranks.device, parsed.commit)
    origin = replace(origin, versions={**origin.versions, **peer_versions("deepspeed")})
    found: list[CollectiveRow] = []
    with contextlib.ExitStack() as stack:
        out = None
        if parsed.out is not None and ranks.rank == 0:
            out = stack.enter_context(rows.appending(parsed.out))
        cases = _cases(parsed, ranks)
        progress = Progress(len(cases), Budget())
        ranks.say(f"# {ranks.placed()}; {'rotated' if rotate else 'warm'}; {origin.device}")
        earlier = None
        for exchange in cases:
            if ranks.rank == 0:
                progress.step(f"{exchange.op} {exchange.elements} {exchange.dtype}")
            results = run_exchange(exchange, backends, ranks, turns, rotate)
            made = collectives_rows.make_rows(_case(exchange, ranks, rotate), results, origin)
            found += made
            if exchange.op != earlier:
                form = "in place" if exchange.in_place else "out of place"
                ranks.say(f"#\n# {exchange.op}, {form}\n{collectives_rows.heading()}")
                earlier = exchange.op
            for row in made:
                ranks.say(collectives_rows.line(row))
            if out is not None:
                row_files.write(made, out)
    if ranks.rank == 0 and parsed.markdown is not None:
        show_markdown(collectives_rows.text(found), parsed.markdown)
    if parsed.out is not None:
        ranks.say(f"# {len(found)} rows appended to {parsed.out}")
    wrong = [row for row in found if row.wrong]
    if wrong:
        raise WrongResultError(
            f"{len(wrong)} results were wrong, the first: {wrong[0].op} of {wrong[0].count} "
            f"{wrong[0].dtype} on {wrong[0].backend}: {wrong[0].error}"
        )


def peer_versions(*names: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _case(exchange: Exchange, ranks: Ranks, rotate: int) -> Case:
    return Case(
        op=exchange.op,
        size=exchange.size,
        count=exchange.count,
        dtype=exchange.dtype,
        redop=exchange.redop,
        world=ranks.world,
        in_place=exchange.in_place,
        cold=rotate > 0,
        pinned=ranks.core is not None,
        cores=ranks.cores,
    )


def run_exchange(
    exchange: Exchange,
    backends: Sequence[Backend],
    ranks: Ranks,
    turns: Turns,
    rotate_bytes: int = 0,
) -> list[Result]:
    """Check each backend that has this exchange, time those that are right, check again;
    collective."""
    results: list[Result] = []
    running: list[tuple[Timed, Buffers]] = []
    for backend in backends:
        if backend.refusal(exchange) is not None:
            continue
        buffers = Buffers(exchange, rotate_bytes)
        calls = [
            backend.call(exchange, given, taken)
            for given, taken in zip(buffers.inputs, buffers.outputs, strict=True)
        ]
        timed = Timed(backend.name, calls, buffers.refresh, exchange.lasting)
        result = _checked(exchange, timed, buffers, ranks)
        results.append(result)
        if result.error is None:
            running.append((timed, buffers))
    others = None
    if running:
        others = measure([timed for timed, _ in running], ranks, turns)
    for timed, buffers in running:
        after = _checked(exchange, timed, buffers, ranks)
        if after.error is None:
            after = replace(
                after,
                percentiles=timed.percentiles,
                repetitions=len(timed.us),
                calls=timed.batch,
                others_share=others,
            )
        results = [after if each.backend == timed.name else each for each in results]
    return results


def _checked(exchange: Exchange, timed: Timed, buffers: Buffers, ranks: Ranks) -> Result:
    error, wrong = None, 0
    try:
        wrong = wrong_elements(exchange, timed.calls[0], buffers)
    except ConfigError:
        raise
    except Exception as failed:  # whatever a backend raises is its row's result
        error = f"cannot run: {first_line(failed)}"
    error = ranks.first_error(error)
    if error is not None:
        return Result(timed.name, None, error)
    wrong = ranks.total(wrong)
    buffers.refresh()
    return Result(timed.name, wrong, f"wrong: {wrong} elements" if wrong else None)
