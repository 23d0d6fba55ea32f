"""The measured table: into how many chunks a GEMM with its collective is cut, by what carries it.

One JSON file for each carrier (lanes, gloo, tpshm, nccl): shipped in ``tables/`` beside this file,
and the user's own in ``$TPKERNELS_CACHE/overlap``, which wins as a whole. ``tpkernels bench overlap
--tune`` measures and writes it. Where nothing was measured nothing is cut.

    {"format": 1, "backend": "lanes",
     "measured": {"device": "..", "torch": "..", "date": "..", "how": "..", "links": [".."]},
     "chunks": [{"rows": 1024, "row_bytes": 2048, "chunks": 8}]}
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpkernels import envs
from tpkernels.comm.agreement import compare_tables_by
from tpkernels.errors import ConfigError

FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"
BACKENDS = ("lanes", "gloo", "tpshm", "nccl")
TUNE = "tpkernels bench overlap --tune"


@dataclass(frozen=True)
class Entry:
    """The fastest number of chunks for ``rows`` rows of ``row_bytes`` on the wire, and upwards."""

    rows: int
    row_bytes: int
    chunks: int


@dataclass(frozen=True)
class Table:
    """What was measured for one carrier; ``source`` is the file, or why there is none."""

    backend: str
    entries: tuple[Entry, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    source: str = "not measured"

    def chunks(self, rows: int, row_bytes: int) -> int:
        """Chunks for a matrix of that size: those of the largest measured one within it; else 1."""
        within = [e for e in self.entries if e.rows <= rows and e.row_bytes <= row_bytes]
        best = max(within, key=lambda e: (e.rows, e.row_bytes), default=None)
        return 1 if best is None else best.chunks

    def digest(self) -> int:
        """A number that differs where entries do: for ranks to compare."""
        return zlib.crc32(repr(self.entries).encode())


def user_folder() -> Path:
    """Where the user's own tables are kept; it need not exist."""
    return envs.cache() / "overlap"


def table_of(backend: str) -> Table:
    """The table of ``backend``, one of :data:`BACKENDS`; empty where nothing was measured."""
    return _load(backend, user_folder())


@lru_cache
def _load(backend: str, folder: Path) -> Table:
    for path in (folder / f"{backend}.json", SHIPPED / f"{backend}.json"):
        if path.is_file():
            table = read(path)
            if table.backend != backend:
                raise ConfigError(f"{path} is of {table.backend!r}. Fix: delete it, or {TUNE}")
            return table
    return Table(backend)


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        ConfigError: it is not one, and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ConfigError(f"{path}: format {content['format']!r}, and this version reads 1")
        entries = tuple(
            Entry(int(e["rows"]), int(e["row_bytes"]), int(e["chunks"])) for e in content["chunks"]
        )
        backend = str(content["backend"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(
            f"{path} is not an overlap table ({error!r}). Fix: delete it, or measure again: {TUNE}"
        ) from error
    if any(min(e.rows, e.row_bytes, e.chunks) < 1 for e in entries):
        raise ConfigError(f"{path}: rows, row_bytes and chunks must be at least 1. Fix: {TUNE}")
    return Table(backend, entries, dict(content.get("measured", {})), str(path))


def write(table: Table, path: Path) -> None:
    """Write ``table`` where :func:`table_of` finds it; ``measured`` says how it came about."""
    content = {
        "format": FORMAT,
        "backend": table.backend,
        "measured": table.measured,
        "chunks": [vars(entry) for entry in table.entries],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    _load.cache_clear()


def _digest_of_all() -> int:
    return zlib.crc32(repr([table_of(backend).digest() for backend in BACKENDS]).encode())


compare_tables_by(_digest_of_all)
