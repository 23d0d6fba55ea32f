"""What a run between GPUs found: ``report.md``, ``chart.svg``, and the same in short."""

from __future__ import annotations

import json
import statistics
import time
from html import escape
from pathlib import Path

from check_run import LOG
from plan import Settings
from runner import Result
from summary import markdown_table, text_table

HEADING = "# Multi-GPU check of "  # by which a later run knows whose files these are
FILES = (LOG, "report.md", "results.jsonl", "chart.svg")
_HEAD = ("layer", "implementation", "us", "of plain", "% of limit", "overlap", "note")
_COLOURS = {"plain": "#9e9e9e", "dtensor": "#b8a15b", "async TP": "#5b8db8", "ours": "#d95f3b"}
_WIDTH, _BAR, _LABEL = 900, 16, 330


def ours(out: Path) -> bool:
    """Whether the files of :data:`FILES` in ``out`` are an earlier run's."""
    try:
        return (out / "report.md").read_text(errors="replace").startswith(HEADING)
    except OSError:
        return False


def write(
    out: Path, results: list[Result], settings: Settings, seconds: float, *, running: bool = False
) -> str:
    """Write the report and the chart; return the terminal's text. ``running``: more is to come."""
    rows = _rows(out / "results.jsonl")
    kind = "dry run (2 CPU ranks over Gloo)" if settings.dry_run else "full"
    if settings.quick and not settings.dry_run:
        kind = "quick"
    kind += ", NOT AT ITS END: more steps were to come" if running else ""
    _replace(out / "report.md", _markdown(results, rows, settings, kind, seconds))
    if rows:
        _replace(out / "chart.svg", chart(rows))
    state = [(r.name, _state(r), (r.detail or _last_line(r))[:100]) for r in results]
    lines = ["", *text_table(state)]
    if (cells := _ours_in_short(rows)) and not settings.dry_run:
        lines += ["", *text_table(cells)]
    ran = "passed" if all(result.fine for result in results) else "NOT all passed"
    lines += ["", f"multi_gpu_check: {ran}, {seconds:.0f} s, {out / 'report.md'}"]
    return "\n".join(lines)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)  # whole at any time


def _state(result: Result) -> str:
    return f"{result.state}, {result.seconds:.0f} s" if result.seconds else result.state


def _last_line(result: Result) -> str:
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _rows(path: Path) -> list[dict]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a step that was killed
            continue
    return rows


def _layer(row: dict) -> str:
    shape = row["shape"]
    sizes = f"M={shape['m']} K={shape['k']} N={shape['n']}"
    return f"{row['op']} {row['model']} {sizes} {row['dtype']} x{row['world']}"


def _cells(row: dict) -> tuple[str, ...]:
    if row["us"] is None:
        return (_layer(row), row["implementation"], "not measured", "", "", "", row["error"] or "")
    return (
        _layer(row),
        row["implementation"],
        f"{row['us']:.0f}",
        f"{row['ratio_to_plain']:.3f}",
        f"{row['percent_of_limit']:.0f}",
        f"{100 * row['overlap']:.0f}%",
        row["note"],
    )


def _compared(rows: list[dict]) -> list[dict]:
    """Without the GEMM and the collective alone, of which the limit is made."""
    return [row for row in rows if row["implementation"] not in ("gemm", "collective")]


def _ours_in_short(rows: list[dict]) -> list[tuple[str, ...]]:
    """For each op and implementation: medians over the shapes."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in _compared(rows):
        groups.setdefault((row["op"], row["implementation"]), []).append(row)
    if not groups:
        return []
    cells = [("op, implementation", "shapes", "of plain, median", "% of limit", "overlap")]
    for (op, implementation), found in groups.items():
        timed = [row for row in found if row["us"] is not None]
        figures = ("not measured", "", "")
        if timed:
            ratio, limit, overlap = (
                statistics.median(row[name] for row in timed)
                for name in ("ratio_to_plain", "percent_of_limit", "overlap")
            )
            figures = (f"{ratio:.3f}", f"{limit:.0f}", f"{100 * overlap:.0f}%")
        cells.append((f"{op}, {implementation}", f"{len(timed)} of {len(found)}", *figures))
    return cells


def _markdown(
    results: list[Result], rows: list[dict], settings: Settings, kind: str, seconds: float
) -> str:
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines = [f"{HEADING}{settings.commit}, {date}", ""]
    lines += [f"{kind}, {seconds:.0f} s. Output of all steps: {LOG}", ""]
    lines += markdown_table(
        ("step", "result", "seconds", "figure or first error"),
        [(r.name, r.state, f"{r.seconds:.1f}", r.detail or _last_line(r)) for r in results],
    )
    for name in ("machine", "topology"):
        found = next((r for r in results if r.name == name and r.output), None)
        if found is not None:
            lines += ["", f"## {name.capitalize()}", "", "```", found.output.strip(), "```"]
    lines += ["", "## Overlap", ""]
    if not rows:
        return "\n".join([*lines, "not measured", ""])
    if settings.dry_run:
        lines += ["Of a dry run: it shows that the programs run, and no speed between GPUs.", ""]
    lines += [
        "us: of the slowest rank, median. Of plain: below 1 is faster than GEMM and collective one "
        "after another. Limit: the longer of the GEMM alone and the collective alone. Overlap: "
        "(T_gemm + T_collective - T) / min(T_gemm, T_collective).",
        "",
        *markdown_table(_HEAD, [_cells(row) for row in _compared(rows)]),
        "",
        "![times beside the limits](chart.svg)",
    ]
    return "\n".join(lines) + "\n"


def chart(rows: list[dict]) -> str:
    """SVG, one group of bars a layer: times as parts of plain's, and a mark at the limit."""
    layers: dict[str, list[dict]] = {}
    for row in _compared(rows):
        if row["us"] is not None:
            layers.setdefault(_layer(row), []).append(row)
    timed = [row for group in layers.values() for row in group]
    most = max([1.0, *(row["ratio_to_plain"] for row in timed)])
    scale = (_WIDTH - _LABEL - 80) / most
    parts, y = [], 10
    for layer, group in layers.items():
        parts.append(f'<text x="10" y="{y + 12}" font-weight="bold">{escape(layer)}</text>')
        y += 20
        top = y
        for row in group:
            name = row["implementation"]
            colour = _COLOURS.get(name, _COLOURS["ours"])
            width = row["ratio_to_plain"] * scale
            parts += [
                f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{_LABEL}" y="{y + 2}" width="{width:.1f}" height="{_BAR - 4}" '
                f'fill="{colour}"/>',
                f'<text x="{_LABEL + width + 6:.1f}" y="{y + 12}">{row["us"]:.0f} us</text>',
            ]
            y += _BAR
        limit = _LABEL + group[0]["limit_us"] / group[0]["us"] * group[0]["ratio_to_plain"] * scale
        parts.append(
            f'<line x1="{limit:.1f}" y1="{top}" x2="{limit:.1f}" y2="{y}" stroke="#333" '
            'stroke-dasharray="3 2"/>'
        )
        y += 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 20}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts)
        + f'\n<text x="10" y="{y + 10}">dashed: the longer of the GEMM alone and the collective '
        "alone</text></svg>\n"
    )
