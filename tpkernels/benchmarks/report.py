"""JSONL rows as a markdown table: unfused PyTorch, the best peer, ours, and the limit.

Times of different runs are never compared: the rows of a case belong together, and a case that was
measured again replaces the earlier one whole.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tpkernels.benchmarks import options, rows
from tpkernels.benchmarks.rows import Row
from tpkernels.benchmarks.shapes import CUSTOM, MODELS
from tpkernels.benchmarks.variants import COMPILE, CUBLASLT, EAGER, OURS
from tpkernels.cli import CommandParser, positive
from tpkernels.errors import ConfigError

PEERS = (COMPILE, CUBLASLT)
LARGE_M, SMALL_K = 2048, 2048  # where arithmetic dominates; where a separate pass costs most
_COLUMNS = (
    "model, R",
    "M, N, K",
    "unfused PyTorch, us",
    "best peer, us",
    "ours, us",
    "ours served by",
    "unfused / ours",
    "bound of fusion",
    "ours, % of limit",
)

Key = tuple[str, str, str, str, int, bool]


@dataclass(frozen=True)
class CaseRows:
    """The rows of one case of one run, by implementation."""

    by_name: dict[str, Row]

    @property
    def any(self) -> Row:
        return next(iter(self.by_name.values()))

    @property
    def eager(self) -> Row | None:
        return self.by_name.get(EAGER)

    @property
    def ours(self) -> Row | None:
        return self.by_name.get(OURS)

    @property
    def peer(self) -> Row | None:
        """The fastest that is neither eager nor ours."""
        timed = [row for name in PEERS if (row := self.by_name.get(name)) and row.us]
        return min(timed, key=lambda row: row.us or 0.0, default=None)

    @property
    def label(self) -> str:
        row = self.any
        return "-" if row.model == CUSTOM else f"{row.model}, {row.tp}"

    @property
    def sizes(self) -> str:
        return ", ".join(str(self.any.shape[name]) for name in ("m", "n", "k"))


@dataclass(frozen=True)
class Group:
    """Cases that stand in one table: one op, activation, dtype, device and way to measure."""

    op: str
    act: str
    dtype: str
    device: str
    cases: tuple[CaseRows, ...]

    @property
    def title(self) -> str:
        act = f" ({self.act})" if self.act else ""
        return f"{self.op}{act}, {self.dtype}, {self.device}"

    @property
    def origin(self) -> str:
        """How it was measured, every value that occurs."""
        found = [row for case in self.cases for row in case.by_name.values()]
        row = found[0]
        versions = [
            f"{name} {_each(row.versions[name] for row in found)}"
            for name in ("torch", "triton", "cuda", "tpkernels")
            if any(row.versions.get(name, "none") != "none" for row in found)
        ]
        inputs = "inputs beyond the last-level cache" if row.cold else "warm inputs"
        threads = f", {row.threads} thread{'s' * (row.threads > 1)}"
        on = f"host {row.host_cpu}" if row.device != row.host_cpu else f"CPU{threads}"
        peak = _span([row.peak_tflops for row in found])
        bandwidth = _span([row.bandwidth_gbs for row in found])
        return (
            f"Medians, {inputs}; {', '.join(versions)}; {on}; commit "
            f"{_each(row.commit for row in found)}; {_each(row.date for row in found)}. "
            f"Limit: {peak} TFLOP/s and {bandwidth} GB/s, measured in the same run."
        )


def add_options(parser: CommandParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSONL to read")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the markdown; default: print it")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help="also draw FILE.svg or FILE.png (matplotlib)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*MODELS, CUSTOM],
        metavar="MODEL",
        help="only these (default: all)",
    )
    parser.add_argument("--m", nargs="+", type=positive, metavar="M", help="only these tokens")
    parser.add_argument(
        "--details", action="store_true", help="a table of every implementation as well"
    )


def run(parsed: Namespace) -> int:
    """`tpkernels bench report`."""
    if not parsed.files:
        raise ConfigError("no FILE was given. Fix: tpkernels bench report results.jsonl")
    options.check_output("--out", parsed.out)
    options.check_output("--chart", parsed.chart)
    if parsed.chart is not None and parsed.chart.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"--chart {parsed.chart}: its suffix is {parsed.chart.suffix!r}; allowed: .svg, .png. "
            f"Fix: --chart {parsed.chart.with_suffix('.svg')}"
        )
    found = [
        row
        for row in rows.read(parsed.files)
        if (not parsed.models or row.model in parsed.models)
        and (not parsed.m or row.shape["m"] in parsed.m)
    ]
    if not found:
        raise ConfigError("no row is of these --models and --m. Fix: leave them out")
    if parsed.chart is not None:
        from tpkernels.benchmarks import chart  # matplotlib is optional

        try:
            chart.draw(groups(found), parsed.chart)
        except OSError as error:
            raise rows.unwritable("--chart", parsed.chart, error) from error
    markdown = text(found, details=parsed.details)
    if parsed.out is not None:
        try:
            parsed.out.write_text(markdown + "\n")
        except OSError as error:
            raise rows.unwritable("--out", parsed.out, error) from error
    else:
        print(markdown)
    return 0


def groups(found: Iterable[Row]) -> list[Group]:
    """The rows, case by case, the latest of each; in order of first appearance."""
    runs: list[tuple[tuple[object, ...], dict[str, Row]]] = []
    for row in found:
        identity = (*_key(row), row.model, row.tp, row.act, *sorted(row.shape.items()))
        # A case's rows follow each other, eager first.
        if row.implementation == EAGER or not runs or runs[-1][0] != identity:
            runs.append((identity, {}))
        runs[-1][1][row.implementation] = row
    latest = {identity: CaseRows(by_name) for identity, by_name in runs}
    tables: dict[Key, list[CaseRows]] = {}
    for case in latest.values():
        tables.setdefault(_key(case.any), []).append(case)
    return [Group(*key[:4], tuple(sorted(cases, key=_order))) for key, cases in tables.items()]


def _key(row: Row) -> Key:
    act = row.act if row.op == "gemm_gelu" else ""  # an MLP's is its model's
    return row.op, act, row.dtype, row.device, row.threads, row.cold


def _order(case: CaseRows) -> tuple[int, int, int, int]:
    row = case.any
    place = list(MODELS).index(row.model) if row.model in MODELS else len(MODELS)
    return place, row.tp, row.shape["m"], row.shape["n"]


def text(found: Iterable[Row], *, details: bool = False) -> str:
    """Markdown: a table a group, a summary below each, and what could not be measured."""
    parts = []
    for group in groups(found):
        lines = [f"### {group.title}", "", group.origin, "", *_table(_COLUMNS, _cells(group))]
        lines += ["", *summary(group)]
        if details:
            lines += ["", *_table(("model, R", "M, N, K", *_DETAILS), _details(group))]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts)


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return head + [f"| {' | '.join(cells)} |" for cells in lines]


def _cells(group: Group) -> Iterable[list[str]]:
    for case in group.cases:
        ours, peer = case.ours, case.peer
        yield [
            case.label,
            case.sizes,
            _time(case.eager),
            f"{_time(peer)} ({peer.implementation})" if peer else "-",
            _time(ours),
            _served_by(ours),
            _number(ours.ratio_to_eager if ours else None, 2),
            _number(case.any.fusion_bound, 2),
            _number(ours.percent_of_limit if ours else None, 0),
        ]


_DETAILS = ("implementation", "us", "p20", "p80", "host us", "unfused / it", "error", "note")


def _details(group: Group) -> Iterable[list[str]]:
    for case in group.cases:
        for row in case.by_name.values():
            name = row.implementation
            served = f" = {row.served_by}" if name == OURS and row.served_by else ""
            error = "-" if row.relative_error is None else f"{row.relative_error:.1e}"
            numbers = [_number(v, 1) for v in (row.us, row.p20_us, row.p80_us, row.host_us)]
            ratio, note = _number(row.ratio_to_eager, 2), (row.error or "").replace("|", "/")
            yield [case.label, case.sizes, name + served, *numbers, ratio, error, note]


def summary(group: Group) -> list[str]:
    """Median, least and most of eager's time over ours; then what was not measured, and why."""
    timed = [case.ours for case in group.cases if case.ours and case.ours.ratio_to_eager]
    subsets = (
        ("all", timed),
        (f"M >= {LARGE_M}", [r for r in timed if r.shape["m"] >= LARGE_M]),
        (
            f"M >= {LARGE_M} and K <= {SMALL_K}",
            [r for r in timed if r.shape["m"] >= LARGE_M and r.shape["k"] <= SMALL_K],
        ),
    )
    lines = []
    for name, subset in subsets:
        ratios = [row.ratio_to_eager or 0.0 for row in subset]
        if ratios:
            lines.append(
                f"- unfused / ours, {name} ({len(ratios)}): median {median(ratios):.2f}, "
                f"least {min(ratios):.2f}, most {max(ratios):.2f}"
            )
    bound = [row for row in timed if row.host_us and row.us and row.host_us > row.us]
    if bound:
        lines.append(
            f"- at {len(bound)} of {len(timed)} the host needs longer to enqueue ours than the GPU "
            "to run it: single calls take host_us there, a CUDA graph's the time above"
        )
    errors: dict[tuple[str, str], int] = {}
    for case in group.cases:
        for row in case.by_name.values():
            if row.error:
                key = (row.implementation, row.error)
                errors[key] = errors.get(key, 0) + 1
    for (name, error), count in errors.items():
        lines.append(f"- {name}, not timed ({count}): {error}")
    return lines


def _served_by(row: Row | None) -> str:
    """What ours chose; of several ops without their tiles, which the rows have."""
    if row is None or not row.served_by:
        return "-"
    parts = row.served_by.split(", ")
    return row.served_by if len(parts) == 1 else ", ".join(" ".join(p.split()[:2]) for p in parts)


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.us is None:
        return "wrong" if (row.error or "").startswith("wrong") else "-"
    return f"{row.us:.1f}" if row.us < 1000 else f"{row.us:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _each(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _span(values: Sequence[float]) -> str:
    """One value, or the range, with three digits."""
    texts = dict.fromkeys(_three(value) for value in (min(values), max(values)))
    return " to ".join(texts)


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
