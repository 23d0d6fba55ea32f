"""The rows of the benchmark of collectives: nccl-tests' columns, as JSONL, text and markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpkernels.benchmarks import row_files
from tpkernels.benchmarks.collectives_backends import DEEPSPEED, DIRECT, GLOO
from tpkernels.benchmarks.report import _table
from tpkernels.benchmarks.rows import Origin, digits

SCHEMA = "tpkernels-bench-collectives-1"
_QUIET = 0.05  # of the cores; ASSUMPTION: less moves no median by more than its own spread
_MAKE = "write it with `tpkernels bench collectives --out FILE`"
_COLUMNS = (
    "size (B)",
    "count",
    "type",
    "redop",
    "backend",
    "time (us)",
    "p20 to p80",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "#wrong",
    "gloo / this",
)
_WIDTHS = (12, 12, 6, 6, 10, 10, 19, 13, 13, 7, 12)


@dataclass(frozen=True)
class CollectiveRow:
    """One backend, one collective, one size.

    Attributes:
        op: `all_reduce`, ... `size`: bytes of the whole; `count`: elements, of a rank's part where
            the whole is split; both as nccl-tests counts them.
        us, p20_us, p80_us: a call, on the slowest rank; None where not measured.
        algbw_gbs: size / us. busbw_gbs: that times `bus_factor`.
        wrong: elements that differ from the exact result, over all ranks, before and after timing.
        ratio_to_gloo: Gloo's us / us, of the same run: above 1 is faster than Gloo.
        repetitions: samples; calls: that each is the mean of.
        in_place: the result overwrites the input, where torch.distributed has only that.
        cold: buffers rotate beyond the last-level cache.
        pinned: each rank has a core of its own, of `cores`; others_share: of all cores, that other
            programs took meanwhile.
        error: why there is no time, or None.
    """

    op: str
    size: int
    count: int
    dtype: str
    redop: str
    backend: str
    world: int
    us: float | None
    p20_us: float | None
    p80_us: float | None
    algbw_gbs: float | None
    busbw_gbs: float | None
    wrong: int | None
    ratio_to_gloo: float | None
    repetitions: int
    calls: int
    in_place: bool
    cold: bool
    pinned: bool
    cores: int
    others_share: float | None
    error: str | None
    device: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    schema: str = SCHEMA


def bus_factor(op: str, world: int) -> float:
    """busbw / algbw: NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Summary"."""
    if op == "all_reduce":
        return 2 * (world - 1) / world
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (world - 1) / world
    return 1.0


def bandwidths(op: str, size: int, us: float | None, world: int) -> tuple[float, float] | None:
    """(algbw, busbw) in GB/s; None where nothing was measured, or nothing is moved."""
    if not us or not size:
        return None
    algorithm = size / us / 1e3
    return algorithm, algorithm * bus_factor(op, world)


@dataclass(frozen=True)
class Result:
    """What became of one backend, on all ranks."""

    backend: str
    wrong: int | None
    error: str | None
    percentiles: tuple[float, float, float] | None = None
    repetitions: int = 0
    calls: int = 0
    others_share: float | None = None


@dataclass(frozen=True)
class Case:
    """What the rows of one collective and size share."""

    op: str
    size: int
    count: int
    dtype: str
    redop: str
    world: int
    in_place: bool
    cold: bool
    pinned: bool
    cores: int


def make_rows(case: Case, results: Sequence[Result], origin: Origin) -> list[CollectiveRow]:
    """One a result, in their order."""
    gloo = next((r.percentiles[1] for r in results if r.backend == GLOO and r.percentiles), None)
    found = []
    for result in results:
        p20, p50, p80 = result.percentiles or (None, None, None)
        speeds = bandwidths(case.op, case.size, p50, case.world) or (None, None)
        found.append(
            CollectiveRow(
                op=case.op,
                size=case.size,
                count=case.count,
                dtype=case.dtype,
                redop=case.redop,
                backend=result.backend,
                world=case.world,
                us=digits(p50),
                p20_us=digits(p20),
                p80_us=digits(p80),
                algbw_gbs=digits(speeds[0]),
                busbw_gbs=digits(speeds[1]),
                wrong=result.wrong,
                ratio_to_gloo=digits(gloo / p50 if gloo and p50 else None),
                repetitions=result.repetitions,
                calls=result.calls,
                in_place=case.in_place,
                cold=case.cold,
                pinned=case.pinned,
                cores=case.cores,
                others_share=digits(result.others_share),
                error=result.error,
                device=origin.device,
                threads=1,
                versions=origin.versions,
                commit=origin.commit,
                date=origin.date,
            )
        )
    return found


def read(path: Path) -> list[CollectiveRow]:
    """The rows of a file.

    Raises:
        ConfigError: naming file and line: not there, or not rows of this benchmark.
    """
    return row_files.read(path, CollectiveRow, SCHEMA, _MAKE)


def heading() -> str:
    """Of the lines that `line` gives."""
    return "#" + "".join(f"{name:>{width}}" for name, width in _laid_out(_COLUMNS))[1:]


def line(row: CollectiveRow) -> str:
    """The row under `heading`, and why there is no time."""
    text = "".join(f"{cell:>{width}}" for cell, width in _laid_out(_cells(row)))
    return f"{text}  # {row.error}" if row.error else text


def _laid_out(cells: Sequence[str]) -> Iterator[tuple[str, int]]:
    return zip(cells, _WIDTHS, strict=True)


def _cells(row: CollectiveRow) -> list[str]:
    spread = "-" if row.p20_us is None else f"{_number(row.p20_us)} to {_number(row.p80_us)}"
    reducing = row.op in ("all_reduce", "reduce_scatter")
    return [
        str(row.size),
        str(row.count),
        row.dtype,
        row.redop if reducing else "none",
        row.backend,
        _number(row.us),
        spread,
        _number(row.algbw_gbs),
        _number(row.busbw_gbs),
        "N/A" if row.wrong is None else str(row.wrong),
        _number(row.ratio_to_gloo),
    ]


def text(found: Iterable[CollectiveRow]) -> str:
    """Markdown: a section a collective, dtype and placement of buffers, the latest of each row."""
    sections: dict[tuple[object, ...], dict[tuple[object, ...], CollectiveRow]] = {}
    for row in found:
        section = (row.op, row.dtype, row.redop, row.world, row.cold)
        sections.setdefault(section, {})[row.size, row.backend] = row
    return "\n\n".join(_section(list(rows.values())) for rows in sections.values())


def _section(found: Sequence[CollectiveRow]) -> str:
    first = found[0]
    title = f"### {first.op}, {first.dtype}, {first.world} ranks"
    title += f", {first.redop}" if first.op in ("all_reduce", "reduce_scatter") else ""
    title += ", buffers rotated beyond the cache" if first.cold else ", warm"
    lines = [title, "", _origin(first), "", *_table(_COLUMNS, map(_cells, found)), ""]
    lines += [f"- {row.backend}, {row.count}, not timed: {row.error}" for row in found if row.error]
    lines += [f"- {text}" for text in disturbances([row.others_share for row in found])]
    lines += [f"- {text}" for text in _against_deepspeed(found)]
    return "\n".join(lines).rstrip()


def _origin(row: CollectiveRow) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in row.versions.items() if v != "none")
    place = "pinned to a core each" if row.pinned else f"not pinned, on {row.cores} cores"
    form = "in place" if row.in_place else "out of place"
    return (
        f"Medians on the slowest rank, backends in turns in one run, {form}; one thread a rank, "
        f"{place}; {row.device}; {versions}; commit {row.commit}; {row.date}."
    )


def disturbances(shares: Sequence[float | None]) -> Iterator[str]:
    """What other programs took of the cores, where it matters."""
    known = [share for share in shares if share is not None]
    if known and max(known) > _QUIET:
        yield (
            f"other programs took {min(known):.0%} to {max(known):.0%} of the cores meanwhile: "
            "times are too long, and ratios uncertain"
        )


def _against_deepspeed(found: Sequence[CollectiveRow]) -> Iterator[str]:
    by_size: dict[int, dict[str, CollectiveRow]] = {}
    for row in found:
        by_size.setdefault(row.count, {})[row.backend] = row
    ratios = [
        f"{count}: {theirs.us / ours.us:.2f}"
        for count, rows in by_size.items()
        if (theirs := rows.get(DEEPSPEED)) and (ours := rows.get(DIRECT)) and theirs.us and ours.us
    ]
    if ratios:
        yield f"deepspeed / direct: {', '.join(ratios)}"


def _number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"
