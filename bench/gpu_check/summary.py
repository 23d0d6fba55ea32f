"""What a run found: ``summary.md``, and the same in short for the terminal."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from xml.etree import ElementTree

from check_run import LOG
from plan import Settings
from runner import Result

HEADING = "# GPU check of "  # by which a later run knows whose files these are
FILES = (LOG, "summary.md", "junit.xml", "results.jsonl", "table.json", "report.md", "chart.svg")
_SHOWN = {"terminal": 12, "file": 200}  # failing tests
_WIDE = 2048  # tokens from which on a GEMM keeps a large GPU busy


def ours(out: Path) -> bool:
    """Whether the files of :data:`FILES` in ``out`` are an earlier run's."""
    try:
        return (out / "summary.md").read_text(errors="replace").startswith(HEADING)
    except OSError:
        return False


def write(
    out: Path, results: list[Result], settings: Settings, seconds: float, *, running: bool = False
) -> str:
    """Write ``summary.md``; return the terminal's text. ``running``: more is to come."""
    results = [_with_figure(result, out) for result in results]
    failing = failing_tests(out / "junit.xml")
    medians = bench_medians(out / "results.jsonl")
    kind = "dry run (no CUDA)" if settings.dry_run else "quick" if settings.quick else "full"
    kind += ", NOT AT ITS END: more steps were to come" if running else ""
    part = out / "summary.md.part"
    part.write_text(_markdown(results, failing, medians, settings.commit, kind, seconds))
    part.replace(out / "summary.md")  # whole at any time
    lines = ["", *text_table([(r.name, _state(r), r.detail[:100]) for r in results])]
    if failing:
        lines += ["", f"{len(failing)} tests failed:"]
        lines += [f"  {name}: {told[:110]}" for name, told in failing[: _SHOWN["terminal"]]]
        if len(failing) > _SHOWN["terminal"]:
            lines.append(f"  and {len(failing) - _SHOWN['terminal']} more: see summary.md")
    if medians:
        lines += ["", *text_table([_MEDIAN_HEAD, *map(_median_cells, medians[:24])])]
    passed = all(result.fine for result in results)
    ran = "passed" if passed else "NOT all passed"
    lines += ["", f"gpu_check: {ran}, {seconds:.0f} s, {out / 'summary.md'}"]
    return "\n".join(lines)


def _state(result: Result) -> str:
    return f"{result.state}, {result.seconds:.0f} s" if result.seconds else result.state


def _with_figure(result: Result, out: Path) -> Result:
    """The result with the figure that its output or its files give, where it has no error line."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    figure = ""
    if result.name in ("build", "memcheck", "racecheck", "cuda-check", "zero"):
        figure = lines[-1][:160] if lines else "up to date" if result.name == "build" else ""
    elif result.name == "machine":
        found = [li for li in lines if li.startswith(("gpu 0:", "torch:"))]
        figure = "; ".join(found)
    elif result.name == "tests" and (out / "junit.xml").exists():
        found = [li for li in lines if li.startswith(("tests: ", "a test process"))]
        figure = "; ".join(found)
    elif result.name.startswith("bench "):
        op = result.name.removeprefix("bench ")
        count = sum(row["op"].startswith(op) for row in _rows(out / "results.jsonl"))
        figure = f"{count} rows"
    elif result.name.startswith("tune "):
        figure = f"the table has {_table_rows(out / 'table.json')} rows"
    if result.state in ("skipped", "not run") or (result.detail and result.name != "tests"):
        return result
    values = {**vars(result), "detail": figure or result.detail}
    return Result(**values)


def _table_rows(path: Path) -> int:
    try:
        return len(json.loads(path.read_text())["rows"])
    except (OSError, ValueError, KeyError):
        return 0


def failing_tests(path: Path) -> list[tuple[str, str]]:
    """(name, what it said) of every failure in a JUnit file; empty without one."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return []
    found = []
    for case in root.iter("testcase"):
        for failure in case.iter("failure"):
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            found.append((name.removeprefix("tests."), failure.get("message", "")))
    return found


def _rows(path: Path) -> list[dict]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a bench that was killed
            continue
        if isinstance(row, dict) and "op" in row:
            rows.append(row)
    return rows


def bench_medians(path: Path) -> list[dict]:
    """For each op, dtype and implementation: over the shapes, eager's time over its own."""
    groups: dict[tuple[str, ...], list[dict]] = {}
    for row in _rows(path):
        names = (row["op"], row.get("dtype", ""), row.get("implementation", ""))
        groups.setdefault(names, []).append(row)
    found = []
    for (op, dtype, implementation), rows in sorted(groups.items()):
        ratios = [r["ratio_to_eager"] for r in rows if r.get("ratio_to_eager") is not None]
        wide = [
            r["ratio_to_eager"]
            for r in rows
            if r.get("ratio_to_eager") is not None and r.get("shape", {}).get("m", 0) >= _WIDE
        ]
        found.append(
            {
                "op": op,
                "dtype": dtype,
                "implementation": implementation,
                "shapes": len(rows),
                "unmeasured": len(rows) - len(ratios),
                "median": statistics.median(ratios) if ratios else None,
                "wide_median": statistics.median(wide) if wide else None,
                "wide_lowest": min(wide) if wide else None,
            }
        )
    return found


_MEDIAN_HEAD = (
    "op, dtype, implementation",
    "shapes",
    "eager / it, median",
    f"M >= {_WIDE}: median",
    "lowest",
)


def _median_cells(median: dict) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    shapes = str(median["shapes"])
    if median["unmeasured"]:
        shapes += f" ({median['unmeasured']} not measured)"
    return (
        f"{median['op']} {median['dtype']} {median['implementation']}",
        shapes,
        figure(median["median"]),
        figure(median["wide_median"]),
        figure(median["wide_lowest"]),
    )


def text_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0] if rows else ()))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _markdown(
    results: list[Result],
    failing: list[tuple[str, str]],
    medians: list[dict],
    commit: str,
    kind: str,
    seconds: float,
) -> str:
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    lines = [f"{HEADING}{commit}, {date}", ""]
    lines += [f"{kind}, {seconds:.0f} s. Output of all steps: {LOG}", ""]
    lines += markdown_table(
        ("step", "result", "seconds", "figure or first error"),
        [(r.name, r.state, f"{r.seconds:.1f}", r.detail) for r in results],
    )
    machine = next((r for r in results if r.name == "machine"), None)
    if machine is not None:
        lines += ["", "## Machine", "", "```", machine.output.strip(), "```"]
    if failing:
        lines += ["", f"## {len(failing)} tests failed", ""]
        lines += [f"- `{name}`: {told}" for name, told in failing[: _SHOWN["file"]]]
    lines += ["", "## Benchmarks", ""]
    if medians:
        lines += ["Above 1 is faster than eager PyTorch.", ""]
        lines += markdown_table(_MEDIAN_HEAD, [_median_cells(m) for m in medians])
    else:
        lines.append("not measured")
    return "\n".join(lines) + "\n"


def markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(("---",) * len(head)), *map(line, rows)]
