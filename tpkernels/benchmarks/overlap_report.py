"""The overlap rows as markdown: each pass against its parts, its limit, DTensor, and no overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from tpkernels.benchmarks.collectives_rows import disturbances
from tpkernels.benchmarks.overlap_block import BLOCKS
from tpkernels.benchmarks.overlap_limits import COMPARABLE
from tpkernels.benchmarks.overlap_rows import OverlapRow, size_of
from tpkernels.benchmarks.overlap_variants import (
    COMM,
    COMM_OURS,
    DTENSOR,
    GEMM,
    NAMES,
    OFF,
    OURS,
    chunks_of,
)
from tpkernels.benchmarks.report import _table

_TOLD_APART = 0.05  # of a call: smaller gains are within the noise of its clock

Case = dict[str, OverlapRow]  # by implementation: one op at one size on one link

_COLUMNS = (
    "size",
    "link",
    "wire / compute",
    "gemm",
    "comm",
    "comm ours",
    "off",
    "dtensor",
    "ours (p20 to p80)",
    "limit",
    "ours, % of limit",
    "effective overlap: off",
    "dtensor",
    "ours",
    "ours / off (95%)",
    "dtensor / ours",
)
_LEGEND = (
    "Milliseconds, medians on the slowest rank, variants in turns in one run. gemm: the arithmetic "
    "alone; comm: torch.distributed's collectives alone; comm ours: ours alone; limit: max(gemm, "
    "bytes that must be sent / rate). Effective overlap: (gemm + comm - time) / min(gemm, comm), "
    "with the faster of both comm; *: links by which it is judged. A link lets 256 KB pass at once "
    "after a pause. Sizes of layers: M tokens x K, a rank's part of the wide dimension, x N, the "
    "model's width."
)


def text(found: Iterable[OverlapRow]) -> str:
    """Markdown: what the columns are, then a section an op, dtype and backend; of a case that was
    measured again, the last."""
    sections: dict[tuple[object, ...], dict[tuple[object, ...], Case]] = {}
    for row in found:
        key = (row.op, row.dtype, row.world, row.backend, row.carrier)
        size = (*row.shape.values(), row.wire_ratio, row.wire_ratio or row.gbits)
        sections.setdefault(key, {}).setdefault(size, {})[row.implementation] = row
    return "\n\n".join([_LEGEND, *(_section(list(cases.values())) for cases in sections.values())])


def _section(cases: Sequence[Case]) -> str:
    first = _any(cases[0])
    carrier = "" if first.carrier == first.backend else f", ours over {first.carrier}"
    title = f"{first.op}, {first.dtype}, {first.world} ranks, {first.backend}{carrier}"
    lines = [f"### Overlap of {title}", "", _origin(first), ""]
    lines += [*_table(_COLUMNS, map(_cells, cases)), ""]
    swept = [each for each in cases if any(chunks_of(name) for name in each)]
    if swept:
        names = list(dict.fromkeys(name for each in swept for name in each if chunks_of(name)))
        columns = ["size", "link", OFF, *names, OURS]
        lines += ["Ours by the number of chunks, ms:", "", *_table(columns, _sweep(swept, names))]
        lines.append("")
    lines += [f"- {line}" for line in _summary(cases)]
    return "\n".join(lines).rstrip()


def _any(case: Case) -> OverlapRow:
    return next(iter(case.values()))


def _origin(row: OverlapRow) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in row.versions.items() if v != "none")
    place = "pinned to a core each" if row.pinned else "not pinned"
    return (
        f"Ranks of one thread, {place}. {row.device}; {versions}; commit {row.commit}; {row.date}."
    )


def _cells(case: Case) -> list[str]:
    first, ours = _any(case), case.get(OURS)
    ratio = "-" if first.wire_us is None else f"{first.wire_us / first.gemm_us:.2f}"
    ratio += " *" * first.comparable
    cells = [size_of(first), first.link, ratio]
    cells += [_time(case.get(name)) for name in (GEMM, COMM, COMM_OURS, OFF, DTENSOR)]
    cells += [_spread(ours), _milliseconds(first.limit_us)]
    cells.append(_number(ours, "percent_of_limit", "{:.0f}"))
    cells += [_number(case.get(name), "effective_overlap", "{:.0%}") for name in NAMES]
    return [*cells, _to_off(ours), _number(ours, "dtensor_ratio", "{:.2f}")]


def _sweep(cases: Sequence[Case], names: Sequence[str]) -> Iterator[list[str]]:
    for case in cases:
        first = _any(case)
        times = [_time(case.get(name)) for name in (OFF, *names, OURS)]
        yield [size_of(first), first.link, *times]


def _summary(cases: Sequence[Case]) -> Iterator[str]:
    yield from overlap_lines(cases)
    yield from _slowest(cases)
    first = _any(cases[0])
    if first.op in BLOCKS:
        yield from _saved(cases)
    yield from _traced(cases)
    plans = {row.plan: None for case in cases if (row := case.get(OURS)) and row.plan}
    yield from (f"plan: {plan}" for plan in plans)
    yield from disturbances([_any(case).others_share for case in cases])
    errors = {(r.implementation, size_of(r), r.error): None for c in cases for r in c.values()}
    yield from (f"{name}, {size}, not timed: {error}" for name, size, error in errors if error)


def overlap_lines(cases: Sequence[Case]) -> Iterator[str]:
    """Each variant's effective overlap, the median over sizes of each one's median, where wire
    time is comparable with compute time."""
    low, high = COMPARABLE
    where = f"where wire is {low:g} to {high:g} of compute"
    judged = [case for case in cases if _any(case).comparable]
    if not judged:
        yield f"effective overlap {where}: nothing was measured there"
        return
    for name in NAMES:
        by_size: dict[str, list[float]] = {}
        for case in judged:
            row = case.get(name)
            if row is not None and row.effective_overlap is not None:
                by_size.setdefault(size_of(row), []).append(row.effective_overlap)
        if by_size:
            medians = {size: median(values) for size, values in by_size.items()}
            each = ", ".join(f"{size}: {value:.0%}" for size, value in medians.items())
            count = sum(map(len, by_size.values()))
            yield (
                f"effective overlap {where}, {name}: median {median(medians.values()):.0%} over "
                f"{len(medians)} sizes ({each}; {count} links)"
            )


def _slowest(cases: Sequence[Case]) -> Iterator[str]:
    """Where ours loses most against no overlap."""
    rows = [row for case in cases if (row := case.get(OURS)) and row.ratio_to_off]
    if rows:
        worst = max(rows, key=lambda row: row.ratio_to_off or 0.0)
        yield f"ours / off is at most {_to_off(worst)}: {size_of(worst)}, {worst.link}"


def _saved(cases: Sequence[Case]) -> Iterator[str]:
    for size, case in {size_of(_any(case)): case for case in cases}.items():
        each = [
            f"{name} {row.saved_bytes / 1e6:.1f}"
            for name in NAMES
            if (row := case.get(name)) and row.saved_bytes
        ]
        if each:
            yield f"kept by a rank for the backward pass, {size}, MB: {', '.join(each)}"


def _traced(cases: Sequence[Case]) -> Iterator[str]:
    """Whether the trace's exposed communication explains what the clock says was gained."""
    for case in cases:
        off, ours = case.get(OFF), case.get(OURS)
        if off and ours and off.traced_us and ours.traced_us:
            exposed = ((off.exposed_us or 0.0) - (ours.exposed_us or 0.0)) / 1e3
            clock = (off.traced_us - ours.traced_us) / 1e3
            large = abs(off.traced_us - ours.traced_us) > _TOLD_APART * off.traced_us
            share = f": {exposed / clock:.0%}" if large else ", too little to compare"
            yield (
                f"trace, {size_of(off)}, {off.link}: off waits {exposed:.2f} ms longer than ours "
                f"and computes nothing; by the clock it takes {clock:.2f} ms longer{share}"
            )


def _to_off(row: OverlapRow | None) -> str:
    if row is None or row.ratio_to_off is None:
        return "-"
    if row.ratio_to_off_low is None or row.ratio_to_off_high is None:
        return f"{row.ratio_to_off:.3f}"
    return f"{row.ratio_to_off:.3f} ({row.ratio_to_off_low:.3f} to {row.ratio_to_off_high:.3f})"


def _spread(row: OverlapRow | None) -> str:
    if row is None or row.p20_us is None or row.p80_us is None:
        return _time(row)
    return f"{_time(row)} ({_milliseconds(row.p20_us)} to {_milliseconds(row.p80_us)})"


def _time(row: OverlapRow | None) -> str:
    if row is None or row.us is None:
        return "wrong" if row is not None and (row.error or "").startswith("wrong") else "-"
    return _milliseconds(row.us)


def _milliseconds(us: float) -> str:
    ms = us / 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _number(row: OverlapRow | None, name: str, form: str) -> str:
    value = None if row is None else getattr(row, name)
    return "-" if value is None else form.format(value)
