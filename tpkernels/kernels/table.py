"""The measured table: which implementation is fastest, by device, op, dtype, epilogue and size.

``tpkernels bench --tune`` measures and writes it; choosing only ever looks it up, so that every
rank that holds the same table takes the same kernel. One JSON file a device: shipped in
``tables/`` beside this file, and the user's own in ``$TPKERNELS_CACHE/tables``, which wins row by
row. Sizes are buckets: the nearest power of two.

    {"format": 1, "device": "NVIDIA H200", "capability": [9, 0], "torch": "..", "triton": "..",
     "commit": "..", "date": "..", "rows": [
      {"op": "gemm_act", "dtype": "bfloat16", "epilogue": "gelu", "m": 2048, "n": 4096, "k": 2048,
       "implementation": "triton", "config": "128x256x64 g8 s3 w8 tma",
       "us": .., "reference_us": ..}]}

A row measured with another torch or Triton than its file's head names them itself.
"""

# m, n, k: buckets of the output's rows and columns and of the summed dimension (0 if none)

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tpkernels import envs
from tpkernels.errors import ConfigError, TPKernelsWarning

FORMAT = 1
SHIPPED = Path(__file__).parent / "tables"
EPILOGUES = ("none", "gelu", "gelu_tanh", "other")
TUNE = "tpkernels bench --tune"

Key = tuple[str, str, str, int, int, int]


@dataclass(frozen=True)
class DeviceDescription:
    """What a table is for: the device's name and its compute capability."""

    name: str
    capability: tuple[int, int]

    @property
    def slug(self) -> str:
        """The name as a file has it: ``NVIDIA_H200``."""
        return re.sub(r"[^A-Za-z0-9]+", "_", self.name).strip("_")


DeviceLike = torch.device | DeviceDescription


@dataclass(frozen=True)
class TableRow:
    """One measurement: the fastest implementation of an op in one bucket.

    Attributes:
        dtype: as :func:`dtype_key` names it. epilogue: as :func:`epilogue_class` does.
        config: the tile configuration of a Triton row, as text.
        us, reference_us: microseconds of ``implementation`` and of plain PyTorch, in one run.
        torch, triton: versions it was measured with; ``record`` fills in the present ones.
    """

    op: str
    dtype: str
    epilogue: str
    m: int
    n: int
    k: int
    implementation: str
    config: str | None
    us: float
    reference_us: float
    torch: str = ""
    triton: str = ""

    @property
    def key(self) -> Key:
        return self.op, self.dtype, self.epilogue, self.m, self.n, self.k

    @property
    def winner(self) -> str:
        """The implementation to use: plain PyTorch unless the other was not slower."""
        return self.implementation if self.us <= self.reference_us else "reference"


@dataclass(frozen=True)
class TableFile:
    """One file as it was read."""

    path: Path
    head: dict[str, Any]  # everything but the rows
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class Table:
    """What is known of one device: its files, the user's last, and the rows that count."""

    files: tuple[TableFile, ...]
    rows: dict[Key, TableRow]

    def digest(self) -> int:
        """63 bits of what the table would choose, to compare between ranks."""
        chosen = sorted((*row.key, row.winner, row.config or "") for row in self.rows.values())
        return int.from_bytes(hashlib.sha256(repr(chosen).encode()).digest()[:8], "big") >> 1


_LARGEST = 1 << 62  # a size
generation = 0  # counts changes; what was derived from an older table is stale
_tables: dict[str, Table] = {}
_lock = threading.RLock()


@lru_cache(maxsize=1 << 14)
def bucket(size: int) -> int:
    """The power of two nearest to ``size`` in log2: 3 -> 4, 11 -> 8, 12 -> 16; 0 -> 0."""
    if size < 1:
        return 0
    below = size.bit_length() - 1
    return 1 << (below + (size * size > 1 << (2 * below + 1)))


def epilogue_class(act: str) -> str:
    """Activations that cost the same share a row; gelu's two forms are dearer than the others."""
    return act if act in EPILOGUES else "other"


def dtype_key(dtype: torch.dtype) -> str:
    """``"bfloat16"`` and so on; float32 is ``"tf32"`` while PyTorch's setting allows that."""
    if dtype is torch.float32 and tf32_allowed():
        return "tf32"
    return str(dtype).removeprefix("torch.")


def tf32_allowed() -> bool:
    """Whether float32 GEMMs on CUDA may use TF32 now."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def describe(device: DeviceLike) -> DeviceDescription:
    """Name and capability of a CUDA device (initialises CUDA)."""
    if isinstance(device, DeviceDescription):
        return device
    name = torch.cuda.get_device_name(device)
    return DeviceDescription(name, torch.cuda.get_device_capability(device))


def table_of(device: DeviceLike) -> Table:
    """The table of ``device``, read at the first call; empty where there is none."""
    description = describe(device)
    with _lock:
        found = _tables.get(description.slug)
        if found is None:
            files = []
            for folder in (SHIPPED, user_folder()):
                file = read(folder / f"{description.slug}.json", description)
                files += [file] if file is not None else []
            rows = {row.key: row for file in files for row in file.rows}
            found = _tables[description.slug] = Table(tuple(files), rows)
    return found


def lookup(
    op: str, device: DeviceLike, dtype: torch.dtype, act: str, m: int, n: int, k: int
) -> TableRow | None:
    """The row of this size's bucket, exactly; None where it was not measured."""
    key = (op, dtype_key(dtype), epilogue_class(act), bucket(m), bucket(n), bucket(k))
    return table_of(device).rows.get(key)


def user_folder() -> Path:
    """Where the user's own tables are."""
    return envs.cache() / "tables"


def invalidate() -> None:
    """Forget what was read: after ``TPKERNELS_CACHE`` or a file has changed."""
    global generation
    with _lock:
        _tables.clear()
        generation += 1


def record(
    rows: Iterable[TableRow], device: DeviceLike, *, path: Path | None = None, commit: str = ""
) -> Path:
    """Merge ``rows`` into the user's table of ``device``, or into the file ``path``.

    Rows of the same bucket are replaced. The file is written whole or not at all.

    Raises:
        ConfigError: a row that is not one, or a folder that cannot be written.
    """
    description = describe(device)
    target = path if path is not None else user_folder() / f"{description.slug}.json"
    versions = {"torch": torch.__version__, "triton": triton_version()}
    new = [_row(asdict(row), versions, f"a row for {target}") for row in rows]
    with _lock:
        old = read(target, description)
        merged = {row.key: row for row in (*(old.rows if old else ()), *new)}
        head = {
            "format": FORMAT,
            "device": description.name,
            "capability": list(description.capability),
            **versions,
            "commit": commit or (old.head["commit"] if old else ""),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }
        _write(target, head, [merged[key] for key in sorted(merged)], old is not None)
        invalidate()
    return target


def triton_version() -> str:
    """The installed Triton's version, ``""`` where there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def _write(target: Path, head: dict[str, Any], rows: list[TableRow], understood: bool) -> None:
    versions = {name: head[name] for name in ("torch", "triton")}
    lines = [
        json.dumps({k: v for k, v in asdict(row).items() if versions.get(k, "") != v})
        for row in rows
    ]
    text = json.dumps(head)[:-1] + ', "rows": [\n ' + ",\n ".join(lines) + "\n]}\n"
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        if target.exists() and not understood:  # it was warned about: kept, out of the way
            os.replace(target, target.with_name(target.name + ".unread"))
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(
            f"the measured table cannot be written: {error}. Fix: export TPKERNELS_CACHE to a "
            "directory that can be written"
        ) from error


def read(path: Path, device: DeviceDescription) -> TableFile | None:
    """The file, or None: silently where there is none, with one warning where it is not right."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"{path} cannot be read ({error}) and is ignored. Fix: delete it, then {TUNE}")
        return None
    try:
        return _parsed(path, json.loads(text), device)
    except (ConfigError, ValueError) as error:  # JSON's error is a ValueError
        _warn(f"{path} is ignored: {error}. Fix: delete it, then {TUNE}")
        return None
    except RecursionError:
        _warn(f"{path} is ignored: it is nested too deep. Fix: delete it, then {TUNE}")
        return None


def _parsed(path: Path, found: Any, device: DeviceDescription) -> TableFile:
    if not isinstance(found, dict) or not _is(found.get("format"), FORMAT):
        given = found.get("format") if isinstance(found, dict) else None
        raise ConfigError(f"its format is {given!r} and this version reads {FORMAT}")
    if (found.get("device"), found.get("capability")) != (device.name, [*device.capability]):
        raise ConfigError(
            f"it is for {found.get('device')!r}, capability {found.get('capability')}, and this "
            f"is {device.name!r}, {[*device.capability]}"
        )
    head = {name: str(found.get(name, "")) for name in ("torch", "triton", "commit", "date")}
    for name, value in head.items():
        if not _is_text(value):
            raise ConfigError(f"its {name} is not right: {value!r}")
    rows = found.get("rows")
    if not isinstance(rows, list):
        raise ConfigError("its rows are not a list")
    parsed = tuple(_row(row, head, f"row {index}") for index, row in enumerate(rows))
    return TableFile(path, {"device": device.name, **head}, parsed)


def _row(given: Any, versions: dict[str, str], what: str) -> TableRow:
    """A checked row; raises :class:`ConfigError` naming the field that is wrong."""
    if not isinstance(given, dict):
        raise ConfigError(f"{what} is not an object")
    fields = {
        "config": None,
        **given,
        **{name: given.get(name) or versions[name] for name in ("torch", "triton")},
    }
    try:
        row = TableRow(**fields)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error
    sizes = (row.m, row.n, row.k)
    checks = {
        "op": isinstance(row.op, str),
        "dtype": isinstance(row.dtype, str),
        "epilogue": row.epilogue in EPILOGUES,
        "m, n, k": all(type(s) is int and 0 <= s <= _LARGEST and bucket(s) == s for s in sizes),
        "implementation": row.implementation in envs.IMPLEMENTATIONS,
        "config": row.config is None or isinstance(row.config, str),
        "us": _is_time(row.us),
        "reference_us": _is_time(row.reference_us),
        "torch, triton": _is_text(row.torch) and _is_text(row.triton),
    }
    for name, right in checks.items():
        if not right:
            raise ConfigError(f"{what}: {name} is not right in {given}")
    return row


def _is(value: Any, number: int) -> bool:
    """Whether JSON says that integer; ``true`` equals 1 and is none."""
    return type(value) is int and value == number


def _is_text(value: Any) -> bool:
    """What every terminal can show; JSON has text that none can."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


def _is_time(value: Any) -> bool:
    """Microseconds, up to years; integers that no float holds are none."""
    return type(value) in (int, float) and 0 < value < 1e15


@lru_cache
def _warn(message: str) -> None:
    # Explicit, so that it is one line, no source line after it; cached, so that it is said once.
    warnings.warn_explicit(message, TPKernelsWarning, "tpkernels", 0)
