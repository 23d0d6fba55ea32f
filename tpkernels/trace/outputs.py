"""The files that one recording gives, side by side."""

from __future__ import annotations

import json
from pathlib import Path

from tpkernels.errors import ConfigError
from tpkernels.trace.page import page
from tpkernels.trace.perfetto import chrome_trace
from tpkernels.trace.recording import Recording
from tpkernels.trace.summary import summarize
from tpkernels.trace.timeline import aligned


class Outputs:
    """Their names: ``path`` is that of the page, with or without ``.html``."""

    def __init__(self, path: str | Path) -> None:
        self._given = given = Path(path)
        stem = given.with_suffix("") if given.suffix.lower() in (".html", ".htm") else given
        self.page = given if stem != given else Path(f"{given}.html")
        self.perfetto = Path(f"{stem}.perfetto.json")
        self.summary = Path(f"{stem}.summary.json")
        self._stem = stem

    @property
    def paths(self) -> list[Path]:
        return [self.page, self.perfetto, self.summary]

    def of_rank(self, rank: int) -> Path:
        """Where a rank writes what it has when it must end alone."""
        return Path(f"{self._stem}.rank{rank}.json")

    def check(self) -> None:
        """Raise :class:`ConfigError` where they cannot be written, before anything is recorded."""
        if self._given.is_dir():
            raise ConfigError(
                f"trace: {str(self._given)!r} is a directory. Fix: give the page's file name, such "
                f"as {str(self._given / 'trace.html')!r}"
            )
        if not self.page.absolute().parent.is_dir():
            raise ConfigError(
                f"trace: the directory of {str(self.page)!r} is not there. Fix: create it"
            )


def write_all(recordings: list[Recording], world_size: int, outputs: Outputs) -> None:
    """The page, the Perfetto trace and the summary of all ranks that recorded."""
    timelines = aligned(recordings)
    summary = summarize(timelines, world_size)
    outputs.summary.write_text(json.dumps(summary, indent=1) + "\n")
    outputs.perfetto.write_text(json.dumps(chrome_trace(timelines), separators=(",", ":")))
    outputs.page.write_text(page(timelines, summary), encoding="utf-8")
