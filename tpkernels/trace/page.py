"""The page: one HTML file with its style, its script and its data inside; it loads nothing.

In ``web``, ``page.html`` has the places for ``page.css`` and for the scripts, which become one in
the order of :data:`SCRIPTS`. The data is JSON in which every ``<`` is written as an escape, so that
no name can end the element that holds it; the script shows names as text, never as markup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpkernels.trace.recording import Interval
from tpkernels.trace.spans import Span
from tpkernels.trace.summary import definitions, phase_of
from tpkernels.trace.timeline import OUTSIDE, Timeline, rows_of

_WEB = Path(__file__).with_name("web")
SCRIPTS = ("text", "ranks", "timeline", "details", "table", "start")


def page(timelines: list[Timeline], summary: dict[str, Any]) -> str:
    """The whole file."""
    data = {
        "summary": summary,
        "definitions": definitions(),
        **_intervals(timelines),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=str)
    parts = {
        "/* style */": (_WEB / "page.css").read_text(),
        "/* script */": "\n".join((_WEB / f"{name}.js").read_text() for name in SCRIPTS),
        "/* data */": text.replace("<", "\\u003c"),
    }
    html = (_WEB / "page.html").read_text()
    for place, content in parts.items():
        before, after = html.split(place)
        html = before + content + after
    return html


class _Table:
    """Texts and details that many intervals share, by number."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._known: dict[str, int] = {}

    def number(self, entry: Any) -> int:
        key = json.dumps(entry, sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append(entry)
        return self._known[key]


def _intervals(timelines: list[Timeline]) -> dict[str, Any]:
    """What the timeline draws.

    ``lanes`` of each rank: operations (outermost), compute, communication; of each row of a lane
    the intervals by time, none overlapping: begin and duration in microseconds, and the number of
    their ``details``. Waits that are exposed are in the row of what is computed: both exclude
    each other.
    """
    details = _Table()
    ranks = []
    for timeline in timelines:
        lanes: dict[str, list[tuple[Span, int]]] = {
            "operation": [],
            "compute": [],
            "communication": [],
        }
        for index, each in enumerate(timeline.intervals):
            if each.kind == "operation" and timeline.outermost[index] != index:
                continue
            number = details.number(_details(timeline, index, each))
            for span in _drawn(timeline, index, each):
                lanes["compute" if each.kind == "exposed" else each.kind].append((span, number))
        ranks.append(
            {
                "rank": timeline.recording.rank,
                "begin": timeline.begun / 1e3,
                "end": timeline.ended / 1e3,
                "lanes": {name: _rows(found) for name, found in lanes.items()},
            }
        )
    return {"details": details.entries, "ranks": ranks}


def _drawn(timeline: Timeline, index: int, each: Interval) -> list[Span]:
    if each.kind == "compute":
        return timeline.alone[index]
    if each.kind == "exposed":
        return timeline.exposed([index])
    return [(each.begin, each.end)]


def _details(timeline: Timeline, index: int, each: Interval) -> dict[str, Any]:
    owner = timeline.outermost[index]
    of = {} if owner in (OUTSIDE, index) else timeline.intervals[owner]._asdict()
    shown = {
        "kind": each.kind,
        "name": each.name,
        "of": of.get("name"),
        "layer": of.get("details", {}).get("layer"),
        **each.details,
    }
    if each.kind == "operation":
        shown["phase"] = phase_of(each.name)
        shown["layer"] = shown["layer"] or each.name
    return {key: value for key, value in shown.items() if value not in (None, "", -1)}


def _rows(found: list[tuple[Span, int]]) -> list[dict[str, list[Any]]]:
    """Columns of numbers, which take the least space."""
    found = sorted(found)
    places = rows_of([span for span, _ in found])
    rows: list[dict[str, list[Any]]] = [
        {"begin": [], "duration": [], "details": []} for _ in range(max(places, default=0) + 1)
    ]
    for ((begin, end), number), place in zip(found, places, strict=True):
        rows[place]["begin"].append(begin / 1e3)
        rows[place]["duration"].append((end - begin) / 1e3)
        rows[place]["details"].append(number)
    return rows
