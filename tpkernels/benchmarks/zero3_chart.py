"""The sweep as a chart: the most that was gathered at once against the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpkernels.benchmarks.chart import draw_panels
from tpkernels.benchmarks.zero3_report import Pair, alone, swept
from tpkernels.benchmarks.zero3_rows import Zero3Row, of_model
from tpkernels.errors import ConfigError

_COLORS = ("#d95f3b", "#5b8db8", "#6a9f58", "#8e6bb0")


def draw(found: Sequence[Zero3Row], target: Path) -> None:
    """Write `target` (.svg or .png): one panel a model, one line a unit size.

    Raises:
        ConfigError: matplotlib is not installed, or no variant of ours was timed and counted.
    """
    drawn = [(title, pairs) for title, pairs in of_model(found).items() if _counted(pairs)]
    if not drawn:
        raise ConfigError(
            f"--chart {target}: no row of ours has a time and its gathered bytes. "
            "Fix: --sweep, where ours can run"
        )
    draw_panels(target, drawn, 7.0, _panel)


def _counted(pairs: Sequence[Pair]) -> list[Zero3Row]:
    """Ours, forward and backward, where the most that was gathered is known."""
    return [step for _, step in swept(pairs) if step.peak_gathered_bytes is not None]


def _panel(axis: Any, title: str, pairs: Sequence[Pair]) -> None:
    counted = _counted(pairs)
    for index, blocks in enumerate(sorted({row.blocks_per_unit for row in counted})):
        points = sorted(
            ((row.peak_gathered_bytes or 0.0) / 1e6, (row.us or 0.0) / 1e3)
            for row in counted
            if row.blocks_per_unit == blocks
        )
        label = f"{blocks} block{'s' * (blocks > 1)} a unit"
        color = _COLORS[index % len(_COLORS)]
        axis.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    compute = alone(pairs)
    if compute is not None and compute[1].us:
        us = compute[1].us
        axis.axhline(us / 1e3, color="#9e9e9e", linewidth=1.0, label="compute alone")
    limits = [row.limit_us for row in counted if row.limit_us]
    if limits:
        axis.axhline(min(limits) / 1e3, color="black", linewidth=1.2, label="lowest limit")
    axis.set_xlabel("most gathered at once, MB")
    axis.set_ylabel("forward + backward, ms")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7)
