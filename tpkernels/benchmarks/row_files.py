"""JSONL files of one kind of row each: a frozen dataclass with a field `schema`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tpkernels.benchmarks.rows import unwritable
from tpkernels.errors import ConfigError

T = TypeVar("T")


def write(found: Iterable[Any], stream: TextIO) -> None:
    """Append, one line a row, and flush: what is written survives an interrupt.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        stream.writelines(json.dumps(asdict(row), allow_nan=False) + "\n" for row in found)
        stream.flush()
    except OSError as error:
        raise unwritable("--out", getattr(stream, "name", "stream"), error) from error


def read(path: Path, kind: type[T], schema: str, make: str) -> list[T]:
    """The rows of a file; `make` says how to write such a file.

    Raises:
        ConfigError: naming file and line: not there, or not rows of this kind.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Fix: {make}") from error
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON. Fix: {make}") from error
        named = given.get("schema") if isinstance(given, dict) else None
        if named != schema or set(given) != names:
            raise ConfigError(
                f"{path}, line {number}: not a row of this benchmark: its schema is {named!r}, "
                f"allowed: {schema!r} with its fields. Fix: {make}"
            )
        found.append(kind(**given))
    if not found:
        raise ConfigError(f"{path} has no rows. Fix: {make}")
    return found
