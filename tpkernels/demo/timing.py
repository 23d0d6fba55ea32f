"""Times of a dense and a tensor-parallel model, measured so that they can be compared.

The variants take turns within one process, so that whatever else the machine does meets all of
them. The dense model runs on rank 0 while the other ranks sleep in a barrier.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tpkernels.benchmarks.timers import percentile
from tpkernels.demo.session import Session, counted
from tpkernels.report import ParallelReport

WARM_UP = 1  # beside the runs whose results are compared
# Enough for a median; more where time allows.
DEFAULT_REPEAT = 10
BUDGET_SECONDS = 5.0
LEAST_REPEAT = 3


@dataclass
class Variant:
    """Something to time.

    Attributes:
        run: one repetition.
        every_rank: whether all ranks take part; otherwise only rank 0.
        threads: CPU threads of a rank that takes part.
        parameter_bytes: held by a rank that takes part.
        seconds: the measurements, the slowest rank's each.
    """

    name: str
    run: Callable[[], object]
    every_rank: bool
    threads: int
    parameter_bytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def percentiles(self) -> tuple[float, float, float]:
        """p20, p50 and p80 in seconds."""
        p20, p50, p80 = (percentile(self.seconds, percent) for percent in (20, 50, 80))
        return p20, p50, p80


def compare(
    session: Session,
    title: str,
    dense: Callable[[], object],
    parallel: Callable[[], object],
    report: ParallelReport,
) -> list[Variant]:
    """Time the dense run on one rank's threads and on all ranks', and the parallel run.

    Nothing, if `session.repeat` is 0.
    """
    if session.repeat == 0:
        return []
    with session.step(f"timing: {title}"):
        variants = _variants(session, dense, parallel, report)
        _measure(session, variants)
    return variants


def _variants(
    session: Session,
    dense: Callable[[], object],
    parallel: Callable[[], object],
    report: ParallelReport,
) -> list[Variant]:
    threads, world = torch.get_num_threads(), session.world_size
    all_threads = min(threads * world, os.cpu_count() or 1)
    on_cpu = session.device.type == "cpu"
    variants = [Variant("dense, 1 rank", dense, False, threads, report.dense_bytes)]
    if on_cpu and all_threads > threads:
        variants.append(Variant("dense, 1 rank", dense, False, all_threads, report.dense_bytes))
    name = f"tensor-parallel, {counted(world, 'rank')}"
    variants.append(Variant(name, parallel, True, threads, report.parameter_bytes))
    if on_cpu:
        for variant in variants:
            variant.name += f" x {counted(variant.threads, 'thread')}"
    return variants


def _measure(session: Session, variants: Sequence[Variant]) -> None:
    """Fill in `seconds` of every variant, all in turn, `session.repeat` times after a warm-up.

    Without `session.repeat` it is `DEFAULT_REPEAT` times, or as often as `BUDGET_SECONDS` allow.
    """
    threads = torch.get_num_threads()
    start = time.monotonic()
    for turn in range(WARM_UP + (session.repeat or DEFAULT_REPEAT)):
        (elapsed,) = session.largest([time.monotonic() - start])  # so that all ranks decide alike
        late = session.repeat is None and elapsed > BUDGET_SECONDS
        if late and turn >= WARM_UP + LEAST_REPEAT:
            break
        for variant in variants:
            dist.barrier(group=session.group)
            seconds = 0.0
            if variant.every_rank or session.rank == 0:
                torch.set_num_threads(variant.threads)
                seconds = _seconds(variant.run, session.device)
                torch.set_num_threads(threads)
            if turn >= WARM_UP:
                variant.seconds.append(seconds)
    for variant in variants:
        variant.seconds = session.largest(variant.seconds)


def show(session: Session, timings: dict[str, list[Variant]]) -> None:
    """Print a table for every title that has variants."""
    for title, variants in timings.items():
        if variants:
            session.say("\n" + table(title, variants))
    session.say()


def table(title: str, variants: Sequence[Variant]) -> str:
    """A table of the variants, the first being what the others are compared with."""
    title += f" ({counted(len(variants[0].seconds), 'run')})"
    width = max(len(title), *(len(variant.name) for variant in variants))
    header = f"{title:<{width}}  {'p20 ms':>8}  {'p50 ms':>8}  {'p80 ms':>8}  {'ratio':>6}"
    lines = [f"{header}  {'MB a rank':>9}", "-" * (len(header) + 11)]
    base = variants[0].percentiles[1]
    for variant in variants:
        times = "".join(f"  {1e3 * seconds:8.1f}" for seconds in variant.percentiles)
        ratio = variant.percentiles[1] / base
        megabytes = variant.parameter_bytes / 1e6
        lines.append(f"{variant.name:<{width}}{times}  {ratio:6.2f}  {megabytes:9.1f}")
    return "\n".join(lines)


def as_rows(variants: Sequence[Variant]) -> list[dict[str, object]]:
    """The variants for JSON."""
    return [
        {
            "variant": variant.name,
            "threads": variant.threads,
            "parameter_bytes": variant.parameter_bytes,
            **{
                name: 1e3 * seconds
                for name, seconds in zip(
                    ("p20_ms", "p50_ms", "p80_ms"), variant.percentiles, strict=True
                )
            },
        }
        for variant in variants
    ]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
