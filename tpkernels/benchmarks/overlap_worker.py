"""One rank of the overlap benchmark: checks variants, then times those that are right in turns.

Run by `overlap.py` as `python -m tpkernels.benchmarks.overlap_worker ORDER RESULTS`; rank 0 appends
the rows of each measurement to RESULTS as they are made, so that an interrupt keeps them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.benchmarks import gate, overlap_limits, overlap_rows, row_files, rows
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.collectives_backends import GLOO, shared_memory_group
from tpkernels.benchmarks.harness import first_line
from tpkernels.benchmarks.overlap_block import BLOCKS, BlockProblem
from tpkernels.benchmarks.overlap_layers import LAYERS, LayerProblem
from tpkernels.benchmarks.overlap_rows import Measured, Result
from tpkernels.benchmarks.overlap_trace import TRACED, trace_variants
from tpkernels.benchmarks.overlap_variants import (
    COMM,
    COMM_OURS,
    GEMM,
    Call,
    Problem,
    plans_of,
)
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.shaped_hosts import shape_link
from tpkernels.benchmarks.turns import Timed, Turns, measure
from tpkernels.overlap.plan import carrier_of

_SET_UP_GBITS = 10.0  # while variants are made and checked
_FEW = Turns(
    seconds=0.5, least=5, most=20, warm_up=1
)  # of the arithmetic, before the link's rate is known


@dataclass(frozen=True)
class Case:
    """One op at one size: `size` is (M, K, N) of a layer, (tokens, d) of a block."""

    op: str
    size: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.size))} {self.dtype}"

    def problem(self, group: dist.ProcessGroup) -> Problem:
        if self.op in BLOCKS:
            tokens, d = self.size
            return BlockProblem(self.op, tokens, d, self.dtype, group)
        m, k, n = self.size
        return LayerProblem(self.op, m, k, n, self.dtype, group)


@dataclass(frozen=True)
class Link:
    """Of what rate: `gbits` Gbit/s, or so that wire time is `ratio` of the arithmetic's; neither:
    the ranks share a host."""

    gbits: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        if self.gbits is not None:
            return f"{self.gbits:g} Gbit/s"
        return "one host" if self.ratio is None else f"wire {self.ratio:g} of compute"


@dataclass(frozen=True)
class Order:
    """What the ranks are asked for.

    Attributes:
        backends: of the groups that everything is measured on.
        variants: beside the arithmetic and the collectives alone.
        turns: (seconds, least, most) of each case on each link.
        timeout: seconds that a rank waits for another.
        trace: a folder for the pages of layers' traces; None: nothing is traced.
    """

    cases: list[Case]
    links: list[Link]
    backends: list[str]
    variants: list[str]
    turns: tuple[float, int, int]
    timeout: float
    commit: str | None
    trace: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Order:
        given = json.loads(text)
        given["cases"] = [Case(c["op"], tuple(c["size"]), c["dtype"]) for c in given["cases"]]
        given["links"] = [Link(**link) for link in given["links"]]
        given["turns"] = tuple(given["turns"])
        return Order(**given)


def main(argv: Sequence[str]) -> int:
    warnings.simplefilter("ignore")  # peers' deprecations, once a rank
    order, results = Order.from_json(argv[0]), Path(argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=order.timeout))
    world, cores = dist.get_world_size(), os.cpu_count() or 1
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    ranks = Ranks(
        dist.get_rank(),
        world,
        torch.device("cpu"),
        dist.group.WORLD,
        core if world <= cores else None,
        cores,
    )
    origin = rows.origin(ranks.device, order.commit)
    total = len(order.cases) * len(order.links) * len(order.backends)
    progress = Progress(total, Budget())
    for backend in order.backends:
        group: Any = dist.new_group() if backend == GLOO else shared_memory_group()
        carrier = carrier_of(group.group_name, ranks.device)
        for case in order.cases:
            for measured in run_case(case, order, group, ranks, progress):
                made = overlap_rows.make_rows(measured, backend, carrier, origin, ranks)
                if ranks.rank == 0:
                    ranks.note(overlap_rows.line(made))
                    with results.open("a") as stream:
                        row_files.write(made, stream)
            gc.collect()
    dist.destroy_process_group()
    return 0


@dataclass(frozen=True)
class _Ready:
    """A problem with its variants made and checked: calls of those that are right."""

    problem: Problem
    calls: dict[str, Call]
    results: dict[str, Result]
    gemm: Call
    wire_bytes: int


def run_case(
    case: Case, order: Order, group: dist.ProcessGroup, ranks: Ranks, progress: Progress
) -> Iterator[Measured]:
    """Check each variant once, and time those that are right on every link; collective."""
    if Link() not in order.links:
        _set_rate(_SET_UP_GBITS, ranks)
    if ranks.rank == 0:
        progress.stream.write(f"{case}: check\n")
    problem = case.problem(group)
    size = overlap_limits.wire_bytes(
        problem.op, problem.tokens, problem.width, problem.dtype.itemsize, ranks.world
    )
    ready = _Ready(problem, *checked(problem, order.variants, ranks), problem.gemm(), size)
    for link in order.links:
        if ranks.rank == 0:
            progress.step(f"{case}, {link}")
        gbits = link.gbits
        if link.ratio is not None:
            alone = Timed(GEMM, [ready.gemm])
            measure([alone], ranks, _FEW)
            gbits = overlap_limits.rate_of(size, link.ratio, alone.percentiles[1])
        if gbits is not None:
            _set_rate(gbits, ranks)
        yield _timed(ready, gbits, link.ratio, order, ranks)


def _set_rate(gbits: float, ranks: Ranks) -> None:
    """Of what every host sends from now on; collective."""
    ranks.barrier()
    shape_link(f"{round(gbits * 1e6)}kbit")
    ranks.barrier()


def checked(
    problem: Problem, names: Sequence[str], ranks: Ranks
) -> tuple[dict[str, Call], dict[str, Result]]:
    """(calls of what is right, what became of each variant); collective."""
    eager, truths = problem.right()
    calls: dict[str, Call] = {}
    results: dict[str, Result] = {}
    for name in names:
        if problem.refusal(name) is not None:
            continue
        call, error, relative = None, None, float("nan")
        try:
            call = problem.build(name)
            outputs = problem.outputs(name, call())
            relative, wrong = gate.check(outputs, eager, truths)
            error = f"wrong: {wrong}" if wrong else None
        except Exception as failed:  # whatever a peer raises is its row's result
            error = f"cannot run: {first_line(failed)}"
        error = ranks.first_error(error)
        (relative,) = ranks.largest([relative])
        plan, saved = None, None
        if call is not None and error is None:
            calls[name] = call
            saved = problem.saved_bytes(name, call)
            plan = plans_of(call)
        results[name] = Result(name, plan, relative, saved, error)
    return calls, results


def _timed(
    ready: _Ready, gbits: float | None, ratio: float | None, order: Order, ranks: Ranks
) -> Measured:
    """All in turns, then traced where that was asked for; collective."""
    problem, calls = ready.problem, ready.calls
    comm, alone = problem.collectives(), problem.alone()
    timed = [Timed(GEMM, [ready.gemm]), Timed(COMM, [comm], comm.refresh, comm.lasting)]
    if alone is not None:
        timed.append(Timed(COMM_OURS, [alone]))
    timed += [Timed(name, [call]) for name, call in calls.items()]
    others = measure(timed, ranks, Turns(*order.turns, warm_up=1))
    traced = None
    if order.trace is not None and problem.op in LAYERS and set(TRACED) <= set(calls):
        sizes = "x".join(map(str, problem.shape.values()))
        place = "one_host" if gbits is None else f"{gbits:.4g}gbit"
        backend = dist.get_backend(problem.group)
        page = f"{problem.op}_{sizes}_{_name(problem.dtype)}_{backend}_{place}.html"
        traced = trace_variants(calls, Path(order.trace) / page, ranks)
    return Measured(
        op=problem.op,
        shape=problem.shape,
        dtype=_name(problem.dtype),
        wire_bytes=ready.wire_bytes,
        gbits=gbits,
        wire_ratio=ratio,
        timed=timed,
        results=ready.results,
        others_share=others,
        traced=traced,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
