"""The chart: three bars a shape (unfused PyTorch, the best peer, ours), and the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tpkernels.benchmarks.report import LARGE_M, CaseRows, Group
from tpkernels.benchmarks.rows import Row
from tpkernels.errors import ConfigError

_MOST_CASES = 24  # that can be read side by side
_BARS = (("unfused PyTorch", "#9e9e9e"), ("best peer", "#5b8db8"), ("ours", "#d95f3b"))


def draw(groups: Sequence[Group], target: Path) -> None:
    """Write `target` (.svg or .png): one panel a group, times relative to unfused PyTorch's.

    Raises:
        ConfigError: matplotlib is not installed, or nothing was measured.
    """
    drawn = [(group, cases) for group in groups if (cases := shown(group))]
    if not drawn:
        raise ConfigError(f"--chart {target}: no row has a time. Fix: measure again")
    widest = max(len(cases) for _, cases in drawn)
    draw_panels(target, drawn, max(7.0, 0.55 * widest + 2.0), _panel)


def draw_panels(
    target: Path,
    panels: Sequence[tuple[Any, Any]],
    width: float,
    draw_one: Callable[[Any, Any, Any], None],
) -> None:
    """Write `target`: one panel below the other, each by `draw_one(axis, *panel)`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            f"--chart {target}: matplotlib is not installed. Fix: pip install 'tpkernels[bench]'"
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tpkernels"  # the same rows, the same file
    from matplotlib import pyplot

    size = (width, 4.2 * len(panels))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size, squeeze=False)
    try:
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            draw_one(axis, *panel)
        figure.tight_layout()
        metadata: dict[str, Any] = {"Date": None} if target.suffix == ".svg" else {}
        figure.savefig(target, dpi=120, metadata=metadata)
    finally:
        pyplot.close(figure)


def shown(group: Group) -> list[CaseRows]:
    """The cases of a panel: those with a time of eager's; of too many, those of one M."""
    timed = [case for case in group.cases if case.eager and case.eager.us]
    if len(timed) <= _MOST_CASES:
        return timed
    tokens = sorted({case.any.shape["m"] for case in timed})
    m = LARGE_M if LARGE_M in tokens else tokens[-1]
    return [case for case in timed if case.any.shape["m"] == m][:_MOST_CASES]


def _panel(axis: Any, group: Group, cases: Sequence[CaseRows]) -> None:
    width = 0.27
    for index, (name, color) in enumerate(_BARS):
        places = [place + (index - 1) * width for place in range(len(cases))]
        heights = [_relative(case, _of(case, name)) for case in cases]
        axis.bar(places, heights, width, label=name, color=color)
    limits = [(case.eager.limit_us / case.eager.us) for case in cases if case.eager]  # type: ignore[operator]
    for place, limit in enumerate(limits):
        label = "limit" if place == 0 else None
        axis.hlines(limit, place - 0.45, place + 0.45, color="black", linewidth=1.2, label=label)
    axis.set_xticks(
        range(len(cases)),
        [f"{case.label}\n{case.sizes}" for case in cases],
        rotation=60,
        ha="right",
        fontsize=7,
    )
    axis.set_ylabel("time / unfused PyTorch's")
    axis.set_xlabel("model, ranks / M, N, K", fontsize=7)
    axis.set_ylim(0, 1.15 * axis.get_ylim()[1])  # room for the legend
    left_out = len(group.cases) - len(cases)
    axis.set_title(
        group.title + (f" ({left_out} more in the table)" if left_out else ""), fontsize=9
    )
    axis.legend(fontsize=7, ncols=4, loc="upper center")


def _of(case: CaseRows, bar: str) -> Row | None:
    return {_BARS[0][0]: case.eager, _BARS[1][0]: case.peer, _BARS[2][0]: case.ours}[bar]


def _relative(case: CaseRows, row: Row | None) -> float:
    """Its time over eager's; no bar where it has none."""
    if row is None or not row.us or case.eager is None or not case.eager.us:
        return 0.0
    return row.us / case.eager.us
