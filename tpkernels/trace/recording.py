"""What one rank has recorded, and its file: readable without the process that wrote it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tpkernels.errors import ConfigError
from tpkernels.trace.clock import SyncPoint

SCHEMA = "tpkernels.trace.recording/1"
KINDS = ("operation", "compute", "communication", "exposed")


class Interval(NamedTuple):
    """From ``begin`` to ``end``, nanoseconds of the rank's own clock.

    Attributes:
        kind: one of :data:`KINDS`.
        lane: the thread, or the stream of a device, in which it began; those of one nest.
        operation: index of the operation that was open there, the innermost; -1: none.
        details: of an operation: layer, group, plan, implementation, error; of a communication:
            group, bytes (of the tensor), sent_bytes (-1: not known). ``open``: it never ended.
    """

    kind: str
    name: str
    begin: int
    end: int
    lane: int
    operation: int
    details: dict[str, Any]


@dataclass
class Recording:
    """One rank's.

    Attributes:
        begun, ended: of the recording, nanoseconds of the rank's own clock.
        clock: where that clock was compared with rank 0's; empty on rank 0.
        left_out: intervals beyond the most that are kept.
        error: what ended it early, in words.
        exit_status: of a script that was traced.
    """

    rank: int
    world_size: int
    host: str
    device: str
    begun: int
    ended: int
    intervals: list[Interval]
    clock: list[SyncPoint] = field(default_factory=list)
    left_out: int = 0
    error: str | None = None
    exit_status: int | None = None
    command: list[str] | None = None
    schema: str = SCHEMA

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"), default=str)

    @staticmethod
    def from_json(text: str, origin: str) -> Recording:
        """The reverse; ``origin`` says in errors where ``text`` is from.

        Raises:
            ConfigError: it is not a recording, or one of another version.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{origin}: not JSON ({error}). Fix: record again") from error
        schema = given.get("schema") if isinstance(given, dict) else None
        if schema != SCHEMA:
            raise ConfigError(
                f"{origin}: not a rank's recording: its schema is {schema!r}, allowed: {SCHEMA!r}. "
                "Fix: give the files *.rank0.json, *.rank1.json that recording wrote"
            )
        intervals = [Interval(*each) for each in given.pop("intervals")]
        clock = [SyncPoint(**each) for each in given.pop("clock")]
        return Recording(intervals=intervals, clock=clock, **given)

    def write(self, path: Path) -> None:
        """Whole or not at all: readers never see half a file."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(self.to_json())
        partial.replace(path)


def read(paths: Iterable[Path]) -> list[Recording]:
    """The recordings of all files, by rank.

    Raises:
        ConfigError: naming the file: not there, or not a recording; or two of one rank.
    """
    found: dict[int, tuple[Path, Recording]] = {}
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Fix: record again") from error
        recording = Recording.from_json(text, str(path))
        other = found.setdefault(recording.rank, (path, recording))[0]
        if other is not path:
            raise ConfigError(
                f"{path} and {other} are both of rank {recording.rank}. Fix: give one file a rank"
            )
    return [found[rank][1] for rank in sorted(found)]
