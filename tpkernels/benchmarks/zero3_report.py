"""The ZeRO-3 rows as markdown: each variant as a multiple of the limit, with the limit's parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpkernels.benchmarks.report import _table
from tpkernels.benchmarks.zero3_rows import Zero3Row, of_model
from tpkernels.benchmarks.zero3_variants import COMPUTE, OURS

Pair = tuple[Zero3Row, Zero3Row]  # forward, and forward with backward

_COLUMNS = (
    "variant",
    "forward, ms (p20 to p80)",
    "/ its limit",
    "/ full limit",
    "forward + backward, ms (p20 to p80)",
    "/ its limit",
    "/ full limit",
    "must send, MB",
    "sent, MB",
    "most gathered, MB",
    "relative error",
)
_PARTS = ("variant", "pass", "compute", "bytes / bandwidth", "first gather", "last reduce", "limit")
_SWEEP = ("blocks a unit", "prefetch", "most gathered, MB", "forward, ms", "forward + backward, ms")


def text(found: Sequence[Zero3Row], *, sweep: bool = False) -> str:
    """Markdown, a section a model; with `sweep`, gathered bytes against time as well."""
    parts = []
    for title, pairs in of_model(found).items():
        lines = [f"### ZeRO-3, {title}", "", _origin(pairs[0][0]), ""]
        lines += [*_table(_COLUMNS, map(_cells, pairs)), ""]
        lines += ["The limits' parts, ms:", "", *_table(_PARTS, _limits(pairs)), ""]
        if sweep:
            lines += ["Gathered bytes against time:", "", *_table(_SWEEP, _swept(pairs)), ""]
        for forward, _ in pairs:
            if forward.error:
                lines.append(f"- {forward.implementation}, not timed: {forward.error}")
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)


def _origin(row: Zero3Row) -> str:
    nominal = f"{row.nominal_mbs:g} MB/s nominal, " if row.nominal_mbs else ""
    versions = ", ".join(f"{n} {v}" for n, v in row.versions.items() if v != "none")
    shape = row.shape
    share = "" if row.core_share is None else f" (it had {row.core_share:.0%} of its core)"
    return (
        f"{shape['blocks']} blocks of d={shape['d_model']}, {shape['tokens']} tokens a rank, "
        f"{row.dtype}, {row.world} ranks of one thread, {row.device}. Link {row.link}: {nominal}"
        f"{row.measured_mbs:.1f} MB/s measured with one send of 8 MB. Medians over "
        f"{row.repetitions} rounds of the slowest rank. Limit: max(compute, bytes / bandwidth) + "
        "first gather + last reduce-scatter, at the measured bandwidth, with the time of compute "
        f"alone in the same run{share}; the full limit is that of gathering in forward and in "
        f"backward. {versions}; commit {row.commit}; {row.date}."
    )


def _cells(pair: Pair) -> list[str]:
    forward, step = pair
    cells = [forward.implementation]
    for row in pair:
        cells += [_time(row), _ratio(row.us, row.limit_us), _ratio(row.us, row.full_limit_us)]
    sizes = (step.wire_bytes, step.sent_bytes, step.peak_gathered_bytes)
    error = "-" if forward.relative_error is None else f"{forward.relative_error:.1e}"
    return [*cells, *map(_megabytes, sizes), error]


def _limits(pairs: Sequence[Pair]) -> Iterable[list[str]]:
    for pair in pairs:
        for row, name in zip(pair, ("forward", "forward + backward"), strict=True):
            if row.limit_us is None or row.wire_bytes is None:
                continue
            wire_us = row.wire_bytes / row.measured_mbs
            times = (row.compute_us, wire_us, row.first_us, row.last_us, row.limit_us)
            yield [row.implementation, name, *(_milliseconds(us) for us in times)]


def _swept(pairs: Sequence[Pair]) -> Iterable[list[str]]:
    for forward, step in swept(pairs):
        yield [
            str(step.blocks_per_unit),
            _label(step),
            _megabytes(step.peak_gathered_bytes),
            _milliseconds(forward.us),
            _milliseconds(step.us),
        ]


def swept(pairs: Sequence[Pair]) -> list[Pair]:
    """Ours, where it was timed."""
    return [pair for pair in pairs if pair[1].implementation.startswith(OURS) and pair[1].us]


def alone(pairs: Sequence[Pair]) -> Pair | None:
    """Compute alone."""
    return next((pair for pair in pairs if pair[1].implementation == COMPUTE), None)


def _label(row: Zero3Row) -> str:
    return row.implementation.partition("prefetch=")[2].partition(" ")[0]


def _time(row: Zero3Row) -> str:
    if row.us is None or row.p20_us is None or row.p80_us is None:
        return "wrong" if (row.error or "").startswith("wrong") else "-"
    spread = f"{row.p20_us / 1e3:.0f} to {row.p80_us / 1e3:.0f}"
    return f"{_milliseconds(row.us)} ({spread})"


def _milliseconds(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us / 1e3:.0f}" if us >= 1e5 else f"{us / 1e3:.1f}"


def _ratio(us: float | None, limit_us: float | None) -> str:
    return f"{us / limit_us:.2f}" if us and limit_us else "-"


def _megabytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"
