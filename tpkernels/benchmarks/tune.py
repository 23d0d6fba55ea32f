"""`tpkernels bench --tune`: measure which implementation is fastest, and keep it in the table.

For every op, activation, dtype and bucket of sizes: plain PyTorch, cuBLASLt's epilogue where it
serves, and each tile configuration of the Triton kernels, gated for correctness and timed in
turns. The table is written after every bucket, so that a run that is ended loses nothing.

A winner is no slower than plain PyTorch in two ways: on the device, as inside a CUDA graph, and in
a stream of single calls, where a call takes the longer of its device and its host side.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from math import exp, log
from os import cpu_count
from pathlib import Path

import torch

from tpkernels.benchmarks import options, rows, tuned_ops
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.harness import (
    Case,
    Inputs,
    Measurement,
    Rotation,
    Settings,
    first_line,
    gated,
    measure,
    out_of_memory,
)
from tpkernels.benchmarks.shapes import CUSTOM, Shard
from tpkernels.benchmarks.timers import Sample, Timer, cache_bytes, timer_for
from tpkernels.benchmarks.tuned_ops import CUBLASLT, OPS, REFERENCE, TRITON, Shape, TunedOp
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError
from tpkernels.kernels import available, config, table
from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.table import DeviceLike, Key, TableRow, bucket
from tpkernels.reference.activation import ACTIVATIONS

_MOST_SHAPES = 3  # of one bucket
_FINALISTS = 4  # of a first, short round
_FIRST_ROUND = Settings(seconds=0.05, least=2, most=5)
_FINAL_ROUND = Settings(seconds=0.25, least=7, most=40)


class NotMeasuredError(RuntimeError):
    """A bucket could not be measured; the message says why."""


@dataclass(frozen=True)
class Bucket:
    """What one row of the table is for, and the shapes that it is decided by."""

    op: TunedOp
    act: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]

    @property
    def key(self) -> Key:
        m, n, k = map(bucket, self.shapes[0])
        epilogue = table.epilogue_class(self.act)
        return self.op.name, table.dtype_key(self.dtype), epilogue, m, n, k

    def __str__(self) -> str:
        name, dtype, _, m, n, k = self.key
        return f"{name} {self.act} {dtype} M~{m} N~{n} K~{k}"


@dataclass
class Tuner:
    """Measures buckets and records the winners.

    Attributes:
        device: where tensors are; table_device: whose table is written.
        path: the table's file; None: the user's own.
        configs: the tile configurations of (op, dtype).
        wrong: kernels that failed the gate, in words.
    """

    device: torch.device
    table_device: DeviceLike
    timer: Timer
    budget: Budget
    configs: Callable[[str, torch.dtype], Sequence[GemmConfig]]
    path: Path | None = None
    commit: str = ""
    rotate_bytes: int = 0
    jobs: int = 1
    progress: Progress | None = None
    wrong: list[str] = field(default_factory=list)
    _compiled: set[tuple[object, ...]] = field(default_factory=set)

    def run(self, buckets: Sequence[Bucket], *, retune: bool = False) -> list[TableRow]:
        """Tune what is not yet in the table (with `retune`, all); the rows that were recorded."""
        known = set() if retune else self.known()
        todo = [each for each in buckets if each.key not in known]
        progress = self.progress or Progress(len(todo), self.budget)
        progress.total = len(todo)
        found = []
        try:
            for each in todo:
                if not self.budget.left():
                    progress.skip(str(each), f"no time left of {self.budget.seconds:g} s")
                    continue
                progress.step(str(each))
                try:
                    row = self.decide(each)
                except NotMeasuredError as error:
                    progress.skip(str(each), str(error))
                    continue
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    progress.skip(str(each), f"not enough memory ({first_line(error)[:80]})")
                    continue
                finally:
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()
                table.record([row], self.table_device, path=self.path, commit=self.commit)
                found.append(row)
        finally:
            progress.close()
        return found

    def known(self) -> set[Key]:
        """The table's rows that were measured with the present torch and Triton."""
        if self.path is None:
            present: Iterable[TableRow] = table.table_of(self.table_device).rows.values()
        else:
            file = table.read(self.path, table.describe(self.table_device))
            present = file.rows if file is not None else ()
        versions = (torch.__version__, table.triton_version())
        return {row.key for row in present if (row.torch, row.triton) == versions}

    def decide(self, bucket: Bucket) -> TableRow:
        """The winner of a bucket.

        All variants run a few times at the first shape; the fastest of them, and plain PyTorch,
        then more often at every shape.

        Raises:
            NotMeasuredError: not even plain PyTorch could be measured.
        """
        configs = self.configs(bucket.op.name, bucket.dtype)
        passed, rotation = self._prepare(bucket, bucket.shapes[0], configs)
        measure(passed, rotation, self.timer, _FIRST_ROUND)
        ranked = sorted((each.us[1], each.variant.name) for each in passed if each.samples)
        finalists = [name for _, name in ranked if name != REFERENCE][:_FINALISTS]
        kept = [config for config in configs if f"{TRITON} {config}" in finalists]
        rounds = []
        for shape in bucket.shapes:
            if shape == bucket.shapes[0]:  # gated already
                finals = [Measurement(each.variant) for each in passed]
            else:
                finals, rotation = self._prepare(bucket, shape, kept)
            finals = [m for m in finals if m.variant.name in (REFERENCE, *finalists)]
            measure(finals, rotation, self.timer, _FINAL_ROUND)
            rounds.append(medians(finals))
        rounds = [times for times in rounds if REFERENCE in times]
        if not rounds:
            raise NotMeasuredError("plain PyTorch could not be timed")
        name = winner(rounds)
        implementation, _, tiles = name.partition(" ")
        op, dtype, epilogue, m, n, k = bucket.key
        us, reference_us = rounds[0][name].us, rounds[0][REFERENCE].us
        return TableRow(
            op, dtype, epilogue, m, n, k, implementation, tiles or None, us, reference_us
        )

    def _prepare(
        self, bucket: Bucket, shape: Shape, configs: Sequence[GemmConfig]
    ) -> tuple[list[Measurement], Rotation]:
        """What passed the gate, and the inputs; `wrong` gets what did not."""
        case = tuned_ops.case(bucket.op, bucket.act, bucket.dtype, self.device, shape, configs)
        inputs = case.make_inputs()
        self._compile(bucket, case, inputs)
        measurements = gated(case, inputs)
        for measurement in measurements:
            if measurement.error and measurement.error.startswith("wrong"):
                self.wrong.append(f"{case.title}, {measurement.variant.name}: {measurement.error}")
        if measurements[0].error is not None:
            raise NotMeasuredError(f"plain PyTorch: {measurements[0].error}")
        passed = [measurement for measurement in measurements if measurement.error is None]
        return passed, Rotation(inputs, self.rotate_bytes)

    def _compile(self, bucket: Bucket, case: Case, inputs: Inputs) -> None:
        """Run every kernel once, several at a time: most of a first run is compilation."""
        m, n, k = case.work.gemms[0]
        # What Triton compiles anew for: multiples of 16, and 1.
        kind = (bucket.op.name, bucket.act, bucket.dtype, m == 1, m % 16, n % 16, k % 16)
        if self.jobs < 2 or kind in self._compiled:
            return
        self._compiled.add(kind)

        def once(run: Callable[[Inputs], object]) -> None:
            # The gate runs it again, and reports what is wrong.
            with suppress(Exception), torch.cuda.device(self.device):
                run(inputs)

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(once, [variant.run for variant in case.variants]))
        self.timer.synchronize()


def medians(measurements: Iterable[Measurement]) -> dict[str, Sample]:
    """Of those that were timed, by name."""
    return {m.variant.name: Sample(rounded(m.us[1]), m.host_us) for m in measurements if m.samples}


def rounded(us: float) -> float:
    """As the table keeps it."""
    return rows.digits(us) or us


def winner(rounds: Sequence[dict[str, Sample]]) -> str:
    """The name with the least geometric mean of its device time over plain PyTorch's.

    It must have been timed, and be no slower than plain PyTorch, at every shape; a tie is plain
    PyTorch's.
    """
    best, best_score = REFERENCE, 1.0
    for name in rounds[0]:
        if not all(name in times and _no_slower(times[name], times[REFERENCE]) for times in rounds):
            continue
        ratios = [times[name].us / times[REFERENCE].us for times in rounds]
        score = exp(sum(map(log, ratios)) / len(ratios))
        if score < best_score:
            best, best_score = name, score
    return best


def _no_slower(ours: Sample, reference: Sample) -> bool:
    alone = max(ours.us, ours.host_us or 0.0) <= max(reference.us, reference.host_us or 0.0)
    return alone and ours.us <= reference.us


def buckets(
    shards: Iterable[Shard],
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    acts: Sequence[str] | None = None,
) -> list[Bucket]:
    """What is tuned for `shards`: each op at the MLPs that call it, in their order of M.

    `gemm_act` is also tuned at gated MLPs' sizes, and every op at shapes of no model.
    """
    found: dict[tuple[object, ...], list[Shape]] = {}
    kinds: dict[tuple[object, ...], tuple[TunedOp, str, torch.dtype]] = {}
    shards = list(shards)
    tokens = list(dict.fromkeys(shard.m for shard in shards))
    # What matters most first: the models' own activation at all sizes, then the next.
    most = len(acts) if acts else max(len(OPS[name].acts) for name in ops)
    for place, m, dtype, name in product(range(most), tokens, dtypes, ops):
        op = OPS[name]
        mine = acts or op.acts
        if place >= len(mine):
            continue
        act = mine[place]
        for shard in shards:
            fits = shard.gated == op.gated or op.name == "gemm_act" or shard.model == CUSTOM
            if shard.m != m or not fits:
                continue
            shape = (shard.m, shard.n, shard.k)
            key = (op.name, table.epilogue_class(act), dtype, *map(bucket, shape))
            kinds.setdefault(key, (op, act, dtype))
            shapes = found.setdefault(key, [])
            if shape not in shapes and len(shapes) < _MOST_SHAPES:
                shapes.append(shape)
    return [Bucket(*kinds[key], tuple(shapes)) for key, shapes in found.items()]


def add_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--op", nargs="+", choices=OPS, metavar="OP", help=f"{', '.join(OPS)} (default: all)"
    )
    parser.add_argument(
        "--act",
        nargs="+",
        choices=[act for act in ACTIVATIONS if act != "none"],
        metavar="ACT",
        help="activations (default: both GELUs, and silu for the gated ops)",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=options.DTYPES, default=["bf16"], help="default: bf16"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write this table instead of the user's own"
    )
    parser.add_argument(
        "--retune", action="store_true", help="measure again what these versions have measured"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few shapes: two M, one rank's and eight ranks' shards"
    )
    parser.add_argument(
        "--jobs",
        type=positive,
        default=min(8, cpu_count() or 1),
        metavar="N",
        help="kernels that are compiled at a time (default: up to 8)",
    )


def run(parsed: Namespace) -> int:
    """`tpkernels bench tune`; 1 where a kernel was wrong."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "tuning measures a GPU, and torch sees none. Fix: run it on the machine with the GPU"
        )
    if available.interpreting():
        raise ConfigError(
            "TRITON_INTERPRET is set: the kernels would be interpreted. Fix: unset TRITON_INTERPRET"
        )
    options.check_output("--out", parsed.out)
    device = torch.device("cuda", torch.cuda.current_device())
    status = available.status()
    if not status.available:
        print(f"without Triton's kernels: {status.reason}. Fix: {status.fix}", file=sys.stderr)
    capability = torch.cuda.get_device_capability(device)

    def configs(op: str, dtype: torch.dtype) -> Sequence[GemmConfig]:
        return config.configs(op, dtype, capability) if status.available else ()

    shards = options.chosen_shards(parsed, device, full=False, quick=parsed.quick)
    dtypes = [options.DTYPES[name] for name in parsed.dtype]
    budget = Budget(parsed.budget)
    tuner = Tuner(
        device,
        device,
        timer_for(device),
        budget,
        configs,
        parsed.out,
        parsed.commit or rows.git_commit(),
        cache_bytes(device),
        parsed.jobs,
    )
    asked = buckets(shards, parsed.op or list(OPS), dtypes, parsed.act)
    try:
        found = tuner.run(asked, retune=parsed.retune)
    finally:
        for text in tuner.wrong:
            print(text, file=sys.stderr)
    target = parsed.out or table.user_folder() / f"{table.describe(device).slug}.json"
    print(summary(found, len(asked)))
    print(f"table: {target}" if found else "nothing was written")
    return 1 if tuner.wrong else 0


def summary(found: Sequence[TableRow], asked: int) -> str:
    """How many buckets each implementation won, and by how much, op by op."""
    lines = [f"{len(found)} of {asked} buckets measured in this run"]
    for op in dict.fromkeys(row.op for row in found):
        mine = [row for row in found if row.op == op]
        counts = [
            f"{name} {sum(row.implementation == name for row in mine)}"
            for name in (TRITON, CUBLASLT, REFERENCE)
        ]
        most = max(row.reference_us / row.us for row in mine)
        lines.append(f"  {op}: {', '.join(counts)}; at most {most:.2f} times plain PyTorch's speed")
    return "\n".join(lines)
