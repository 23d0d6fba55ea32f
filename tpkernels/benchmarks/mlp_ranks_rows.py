"""The rows of the MLP between CPU ranks: JSONL, and a markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpkernels.benchmarks import row_files
from tpkernels.benchmarks.collectives_rows import disturbances
from tpkernels.benchmarks.mlp_ranks_variants import DENSE, DTENSOR, NAMES, OURS, Shape
from tpkernels.benchmarks.report import _table
from tpkernels.benchmarks.rows import Origin, digits

SCHEMA = "tpkernels-bench-mlp-ranks-1"
OP = "mlp_ranks_forward"
_MAKE = "write it with `tpkernels bench mlp --nproc N --out FILE`"


@dataclass(frozen=True)
class Ceilings:
    """Measured in the run itself, on all ranks at once, the slowest of them.

    Attributes:
        flops: of one large GEMM, a second, of one thread.
        read: bytes a second that one thread reads, of as much as its weights are: in `dense` of
            all, in `split` of a rank's part.
    """

    flops: float
    dense_read: float
    split_read: float


@dataclass(frozen=True)
class MLPRanksRow:
    """One variant at one shape, forward, without autograd.

    Attributes:
        shape: {"m": tokens, "d": d_model, "h": d_ff}, of the whole MLP.
        implementation: see mlp_ranks_variants.py; served_by: what ours chose.
        us, p20_us, p80_us: a call, on the slowest rank.
        ratio_to_dense, ratio_to_dtensor: the other's us / us, of the same run: above 1 is faster
            than dense on one thread, than DTensor over Gloo.
        weight_bytes: that one rank must read; limit_us: the larger of that at `read_gbs`, and its
            share of the arithmetic at `peak_tflops`; percent_of_limit: 100 limit_us / us.
        repetitions: samples; calls: that each is the mean of.
        relative_error: against float64, the largest of the ranks'.
        cold: copies of the weights rotate beyond the last-level cache.
        pinned: each rank has a core of its own; others_share: of all cores, that other programs
            took meanwhile. error: why there is no time, or None.
    """

    op: str
    shape: dict[str, int]
    act: str
    dtype: str
    world: int
    implementation: str
    served_by: str | None
    us: float | None
    p20_us: float | None
    p80_us: float | None
    ratio_to_dense: float | None
    ratio_to_dtensor: float | None
    weight_bytes: int
    read_gbs: float
    peak_tflops: float
    limit_us: float
    percent_of_limit: float | None
    repetitions: int
    calls: int
    relative_error: float | None
    error: str | None
    cold: bool
    pinned: bool
    others_share: float | None
    device: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    schema: str = SCHEMA


@dataclass(frozen=True)
class Result:
    """What became of one variant, on all ranks."""

    name: str
    served_by: str | None
    relative_error: float | None
    error: str | None
    percentiles: tuple[float, float, float] | None = None
    repetitions: int = 0
    calls: int = 0
    others_share: float | None = None


def make_rows(
    shape: Shape,
    dtype: str,
    itemsize: int,
    world: int,
    results: Sequence[Result],
    ceilings: Ceilings,
    origin: Origin,
    *,
    cold: bool,
    pinned: bool,
) -> list[MLPRanksRow]:
    """One a result, in their order."""
    medians = {each.name: each.percentiles[1] for each in results if each.percentiles}
    found = []
    for result in results:
        p20, p50, p80 = result.percentiles or (None, None, None)
        parts = 1 if result.name == DENSE else world
        read = ceilings.dense_read if result.name == DENSE else ceilings.split_read
        size = shape.weights * itemsize // parts
        limit = max(size / read, shape.flops / parts / ceilings.flops) * 1e6
        found.append(
            MLPRanksRow(
                op=OP,
                shape={"m": shape.m, "d": shape.d, "h": shape.h},
                act="gelu",
                dtype=dtype,
                world=world,
                implementation=result.name,
                served_by=result.served_by,
                us=digits(p50),
                p20_us=digits(p20),
                p80_us=digits(p80),
                ratio_to_dense=_ratio(medians.get(DENSE), p50),
                ratio_to_dtensor=_ratio(medians.get(DTENSOR), p50),
                weight_bytes=size,
                read_gbs=digits(read / 1e9) or 0.0,
                peak_tflops=digits(ceilings.flops / 1e12) or 0.0,
                limit_us=digits(limit) or 0.0,
                percent_of_limit=digits(100 * limit / p50 if p50 else None),
                repetitions=result.repetitions,
                calls=result.calls,
                relative_error=digits(result.relative_error),
                error=result.error,
                cold=cold,
                pinned=pinned,
                others_share=digits(result.others_share),
                device=origin.device,
                threads=1,
                versions=origin.versions,
                commit=origin.commit,
                date=origin.date,
            )
        )
    return found


def _ratio(other_us: float | None, us: float | None) -> float | None:
    return digits(other_us / us) if other_us and us else None


def read(path: Path) -> list[MLPRanksRow]:
    """The rows of a file.

    Raises:
        ConfigError: naming file and line: not there, or not rows of this benchmark.
    """
    return row_files.read(path, MLPRanksRow, SCHEMA, _MAKE)


def text(found: Iterable[MLPRanksRow]) -> str:
    """Markdown: a section a dtype and placement of weights, a line a shape; the latest rows."""
    Key = tuple[int, ...]
    sections: dict[tuple[object, ...], dict[Key, dict[str, MLPRanksRow]]] = {}
    for row in found:
        shapes = sections.setdefault((row.dtype, row.cold, row.world), {})
        key = (row.shape["d"], row.shape["h"], row.shape["m"])
        shapes.setdefault(key, {})[row.implementation] = row
    return "\n\n".join(
        _section([shapes[key] for key in sorted(shapes)]) for shapes in sections.values()
    )


def _section(cases: Sequence[dict[str, MLPRanksRow]]) -> str:
    first = next(iter(cases[0].values()))
    names = [name for name in NAMES if any(name in case for case in cases)]
    weights = "weights rotated beyond the cache" if first.cold else "weights warm"
    columns = ["M, d, h", *(f"{name}, us" for name in names)]
    if OURS in names:
        columns += ["ours served by", "dense / ours", "dtensor gloo / ours"]
        columns += ["ours' limit, us", "ours, % of limit", "dense, % of its limit"]
    lines = [f"### MLP forward, {first.dtype}, {first.world} ranks, {weights}", "", _origin(first)]
    lines += ["", *_table(columns, (_cells(case, names) for case in cases)), ""]
    shares = [row.others_share for case in cases for row in case.values()]
    lines += [f"- {text}" for text in disturbances(shares)]
    for case in cases:
        lines += [
            f"- {row.implementation}, M={row.shape['m']}, not timed: {row.error}"
            for row in case.values()
            if row.error
        ]
    return "\n".join(lines).rstrip()


def _cells(case: dict[str, MLPRanksRow], names: Sequence[str]) -> list[str]:
    shape = next(iter(case.values())).shape
    cells = [f"{shape['m']}, {shape['d']}, {shape['h']}"]
    cells += [_time(case.get(name)) for name in names]
    if OURS not in names:
        return cells
    return [*cells, *_of_ours(case.get(OURS), case.get(DENSE))]


def _of_ours(ours: MLPRanksRow | None, dense: MLPRanksRow | None) -> Iterator[str]:
    yield (ours.served_by or "-") if ours else "-"
    for value in (ours.ratio_to_dense, ours.ratio_to_dtensor) if ours else (None, None):
        yield "-" if value is None else f"{value:.2f}"
    yield _number(ours.limit_us) if ours else "-"
    for row in (ours, dense):
        yield "-" if row is None or row.percent_of_limit is None else f"{row.percent_of_limit:.0f}"


def _origin(row: MLPRanksRow) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in row.versions.items() if v != "none")
    place = "pinned to a core each" if row.pinned else "not pinned"
    return (
        "Medians on the slowest rank (p20 to p80), variants in turns in one run; a thread a rank, "
        f"{place}; dense is one thread of one rank, while the others sleep. Limit: the "
        "larger of weights over the bandwidth of one thread that reads as much, and arithmetic at "
        f"{1e3 * row.peak_tflops:.0f} GFLOP/s, both measured in the same run on all ranks at once. "
        f"{row.device}; {versions}; commit {row.commit}; {row.date}."
    )


def _time(row: MLPRanksRow | None) -> str:
    if row is None or row.us is None:
        return "-" if row is None or not (row.error or "").startswith("wrong") else "wrong"
    return f"{_number(row.us)} ({_number(row.p20_us)} to {_number(row.p80_us)})"


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:.0f}" if us >= 100 else f"{us:.1f}"
