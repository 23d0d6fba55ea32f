"""`python bench/bench_trace_overhead.py [--out FILE]`: what recording costs, on and off.

    stubbed   every call of `tpkernels.instrument` replaced by one that does nothing
    off       as shipped, nobody records
    on        `tpkernels.trace` records

On two CPU ranks over `tpshm`, an encoder layer and its MLP alone (d = 768), in turns within one
process; a sample is a batch of calls, on the slowest rank. Each turn gives one ratio of `off` and
one of `on` to its neighbour; shown are the median and the 95% interval of the median (bootstrap).
The bars: the interval's upper end under 1% for off against stubbed, under 3% for on against off.

`direct` does not depend on what else the machine does: what a call tells is replayed, some thousand
times, and timed by the thread's CPU clock in each state; the difference is in microseconds a call,
and in percent of the median time of a call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

import tpkernels
from tpkernels import instrument, launch
from tpkernels.benchmarks.collectives_backends import shared_memory_group
from tpkernels.benchmarks.mlp_ranks_variants import Dense
from tpkernels.benchmarks.ranks import Ranks, join
from tpkernels.benchmarks.rows import git_commit, host_cpu
from tpkernels.benchmarks.turns import Timed, Turns, measure
from tpkernels.cli import positive
from tpkernels.comm import collectives
from tpkernels.trace.recorder import IntervalRecorder

BARS = {"off": 1.0, "on": 3.0}  # percent
AGAINST = {"off": "stubbed", "on": "off"}
D, HEADS, HIDDEN = 768, 12, 3072
ROWS = (16, 64, 128, 512)
RESAMPLES = 2000
DIRECT_TURNS, DIRECT_CALLS = 25, 100


class _Nothing:
    """In place of an operation or interval."""

    plan: Any = None
    implementation: Any = None

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


_NOTHING = _Nothing()
_STUBS: dict[str, Any] = {
    "operation": lambda *_: _NOTHING,
    "computing": lambda *_: _NOTHING,
    "waiting": lambda *_: _NOTHING,
    "exchanging": lambda *_: _NOTHING,
    "communication": lambda *_: None,
    "arrived": lambda *_: None,
}
_REAL = {name: getattr(instrument, name) for name in _STUBS}


class Switch:
    """Puts the process into one of the three states; nearly free where it is in it."""

    def __init__(self) -> None:
        self.state = "off"

    def __call__(self, state: str) -> None:
        if state == self.state:
            return
        self.state = state
        for name, real in _REAL.items():
            chosen = _STUBS[name] if state == "stubbed" else real
            for module in (instrument, collectives):
                if hasattr(module, name):
                    setattr(module, name, chosen)
        instrument.record_to(IntervalRecorder() if state == "on" else None)


class Told:
    """What one call of a layer tells a recorder, in order, to be told again."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def begin(self, kind: str, name: str, tensor: torch.Tensor, details: dict[str, Any]) -> int:
        self.events.append((kind, name, details.get("layer", ""), details.get("group", "")))
        return len(self.events) - 1

    def end(self, token: int, details: dict[str, Any]) -> None:
        self.events.append(("end", token, details.get("plan")))

    def again(self, x: torch.Tensor) -> None:
        """The same calls of `tpkernels.instrument`."""
        begun: list[Any] = []
        for kind, name, *more in self.events:
            if kind == "end":
                entered = begun[name]
                begun.append(None)
                if self.events[name][0] == "communication":
                    instrument.arrived(entered)
                    continue
                if self.events[name][0] == "operation":
                    entered.plan = more[0]
                entered.__exit__(None, None, None)
            elif kind == "communication":
                begun.append(instrument.communication(name, more[1], x))
            else:
                if kind == "operation":
                    entered = instrument.operation(name, more[0], more[1], x)
                elif kind == "compute":
                    entered = instrument.computing(name, x)
                else:
                    entered = instrument.waiting(name, x)
                entered.__enter__()
                begun.append(entered)


def direct(call: Callable[[], object], switch: Switch) -> dict[str, float]:
    """Microseconds of CPU time that one call's telling takes in each state: medians, by turns."""
    told, x = Told(), torch.ones(1)
    switch("off")
    instrument.record_to(told)
    call()
    instrument.record_to(None)
    samples: dict[str, list[float]] = {"stubbed": [], "off": [], "on": []}
    for _ in range(DIRECT_TURNS):
        for state, found in samples.items():
            switch(state)
            began = time.thread_time_ns()
            for _ in range(DIRECT_CALLS):
                told.again(x)
            found.append((time.thread_time_ns() - began) / 1e3 / DIRECT_CALLS)
    switch("off")
    return {state: median(found) for state, found in samples.items()}


@dataclass(frozen=True)
class Row:
    """One comparison; `percent` is what it costs more, `low` and `high` its 95% interval.

    `direct_us` is what the calls cost alone, for one call of the layer.
    """

    layer: str
    rows: int
    what: str
    state: str
    against: str
    us: float
    against_us: float
    percent: float
    low: float
    high: float
    direct_us: float
    direct_percent: float
    bar: float
    samples: int
    d_model: int
    world: int
    host_cpu: str
    placed: str
    others_share: float | None
    torch: str
    commit: str
    date: str
    schema: str = "tpkernels.bench.trace_overhead/1"


def cases(group: Any) -> list[tuple[str, int, str, Callable[[], object]]]:
    """(layer, rows, forward or forward + backward, call), the same on every rank."""
    torch.manual_seed(0)
    dense = Dense(D, HIDDEN, torch.float32)
    encoder = nn.TransformerEncoderLayer(D, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    found = []
    for name, model in (("mlp", nn.ModuleDict({"mlp": dense})["mlp"]), ("encoder layer", encoder)):
        holder = nn.Sequential(model)
        tpkernels.parallelize(holder, group)
        for rows in ROWS:
            x = torch.randn(1, rows, D)
            for train in (False, True):
                what = "forward + backward" if train else "forward"
                found.append((name, rows, what, call_of(holder, x, train)))
    return found


def call_of(model: nn.Module, x: torch.Tensor, train: bool) -> Callable[[], object]:
    def forward() -> object:
        with torch.inference_mode():
            return model(x)

    def step() -> object:
        model.zero_grad(set_to_none=True)
        return model(x).sum().backward()

    return step if train else forward


def interval(ratios: list[float], draw: random.Random) -> tuple[float, float]:
    """Of the median, 95%, by resampling."""
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def compare(ranks: Ranks, seconds: float, chosen: str) -> list[Row]:
    switch, rows = Switch(), []
    draw = random.Random(0)
    for layer, count, what, call in cases(shared_memory_group()):
        if chosen not in f"{layer} {count} {what}":
            continue

        def timed(state: str, call: Callable[[], object] = call) -> Timed:
            def run() -> object:
                switch(state)
                return call()

            return Timed(state, [run])

        variants = {state: timed(state) for state in ("stubbed", "off", "on")}
        for _ in range(20):
            call()
        share = measure(list(variants.values()), ranks, Turns(seconds, 20, 4000))
        cost = direct(call, switch)
        for state, against in AGAINST.items():
            mine, other = variants[state].us, variants[against].us
            ratios = [100 * (a / b - 1) for a, b in zip(mine, other, strict=True)]
            low, high = interval(ratios, draw)
            row = Row(
                layer,
                count,
                what,
                state,
                against,
                median(mine),
                median(other),
                median(ratios),
                low,
                high,
                cost[state] - cost[against],
                100 * (cost[state] - cost[against]) / median(other),
                BARS[state],
                len(ratios),
                D,
                ranks.world,
                host_cpu(),
                ranks.placed(),
                share,
                torch.__version__,
                git_commit(),
                datetime.now(UTC).strftime("%Y-%m-%d"),
            )
            rows.append(row)
            verdict = "" if high < row.bar else f"   above the bar of {row.bar:g}%"
            ranks.say(
                f"{layer:<14}{count:>4} rows  {what:<19}{state:>3} against {against:<8}"
                f"{row.us:>9.1f} us  {row.percent:+6.2f}%  [{low:+.2f}, {high:+.2f}]  "
                f"direct {row.direct_us:.2f} us, {row.direct_percent:.2f}%{verdict}"
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append JSON lines")
    parser.add_argument("--seconds", type=positive, default=10, help="a case (default: 10)")
    parser.add_argument("--only", default="", help="cases whose name has this, such as 'mlp 16'")
    options = parser.parse_args()
    if not launch.inside_rank():
        here = Path(__file__).resolve().parent
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(here), str(here.parent), *([before] if before else [])]
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        return launch.start_ranks([Path(__file__).stem, *sys.argv[1:]], 2)
    launch.prepare_rank()
    try:
        ranks = join(torch.device("cpu"))
        rows = compare(ranks, options.seconds, options.only)
        out = options.out.open("a") if options.out and ranks.rank == 0 else nullcontext()
        with out as stream:
            for row in rows if stream else ():
                print(json.dumps(asdict(row)), file=stream)
        dist.destroy_process_group()
    except Exception as error:
        return launch.report_failure(error)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
