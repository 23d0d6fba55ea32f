"""One run of benchmarks: cases within a budget, rows as they come, a table at the end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import torch

from tpkernels.benchmarks import rows as row_files
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.ceilings import Ceilings, measure_ceilings
from tpkernels.benchmarks.harness import (
    Case,
    Measurement,
    Settings,
    first_line,
    out_of_memory,
    run_case,
)
from tpkernels.benchmarks.rows import Origin, Row, digits
from tpkernels.benchmarks.shapes import Shard
from tpkernels.benchmarks.timers import timer_for


@dataclass(frozen=True)
class Job:
    """A case that is made only when its turn comes."""

    title: str
    shard: Shard
    act: str
    make: Callable[[], Case]


@dataclass
class Session:
    """What the cases of one run share."""

    device: torch.device
    dtype: torch.dtype
    origin: Origin
    settings: Settings
    budget: Budget
    out: TextIO | None = None
    progress_to: TextIO | None = None

    def run(self, jobs: Sequence[Job]) -> Iterator[list[Row]]:
        """The rows of each case, written to `out` before they are given."""
        progress = Progress(len(jobs), self.budget, self.progress_to)
        timer = timer_for(self.device)
        ceilings: Ceilings | None = None
        try:
            for job in jobs:
                if not self.budget.left():
                    progress.skip(job.title, f"no time left of {self.budget.seconds:g} s")
                    continue
                progress.step(job.title)
                try:
                    ceilings = ceilings or measure_ceilings(self.device, self.dtype, timer)
                    case = job.make()
                    rows = self._rows(job, case, run_case(case, timer, self._settings()), ceilings)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    progress.skip(job.title, f"not enough memory ({first_line(error)[:80]})")
                    continue
                finally:
                    self._release()
                if self.out is not None:
                    row_files.write(rows, self.out)
                yield rows
        finally:
            progress.close()

    def _settings(self) -> Settings:
        """The case's time is bounded by what is left, down to the least number of repetitions."""
        settings = self.settings
        seconds = min(settings.seconds, self.budget.left())
        return Settings(seconds, settings.least, settings.most, settings.rotate_bytes)

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(
        self, job: Job, case: Case, measurements: Sequence[Measurement], ceilings: Ceilings
    ) -> list[Row]:
        itemsize, cold = self.dtype.itemsize, self.settings.rotate_bytes > 0
        limit = case.work.limit_us(ceilings, itemsize, cold)
        eager_us = measurements[0].us[1] if measurements[0].samples else None
        shard = job.shard
        rows = []
        for measurement in measurements:
            p20, p50, p80 = measurement.us if measurement.samples else (None, None, None)
            rows.append(
                Row(
                    op=case.op,
                    shape={"m": shard.m, "n": shard.n, "k": shard.k},
                    model=shard.model,
                    tp=shard.tp,
                    world=1,
                    act=job.act,
                    dtype=str(self.dtype).removeprefix("torch."),
                    implementation=measurement.variant.name,
                    served_by=measurement.variant.served_by,
                    us=digits(p50),
                    p20_us=digits(p20),
                    p80_us=digits(p80),
                    host_us=digits(measurement.host_us),
                    repetitions=len(measurement.samples),
                    limit_us=digits(limit) or 0.0,
                    percent_of_limit=digits(100 * limit / p50 if p50 else None),
                    ratio_to_eager=digits(eager_us / p50 if p50 and eager_us else None),
                    fusion_bound=digits(case.work.fusion_bound(ceilings, itemsize)),
                    relative_error=digits(measurement.relative_error),
                    error=measurement.error,
                    cold=cold,
                    device=self.origin.device,
                    host_cpu=self.origin.host_cpu,
                    threads=self.origin.threads,
                    peak_tflops=digits(ceilings.flops / 1e12) or 0.0,
                    bandwidth_gbs=digits(ceilings.bandwidth / 1e9) or 0.0,
                    versions=self.origin.versions,
                    commit=self.origin.commit,
                    date=self.origin.date,
                )
            )
        return rows


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch's CPU threads, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
