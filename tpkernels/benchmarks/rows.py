"""One JSONL row a measurement: its fields, where it was made, how it is written and read back."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, get_args, get_type_hints

import torch

import tpkernels
from tpkernels.errors import ConfigError
from tpkernels.kernels import table

SCHEMA = "tpkernels-bench-1"


@dataclass(frozen=True)
class Row:
    """One implementation of one op at one shape.

    Attributes:
        op: `gemm_gelu`, `mlp_forward` or `mlp_forward_backward`.
        shape: {"m": tokens, "n": d_ff of the rank, "k": d_model}.
        model, tp: whose shard over how many ranks the shape is; `world`: ranks that took part.
        implementation: `eager`, `compile`, `cublaslt`, `ours` by automatic choice, or
            `ours:<name>` for an implementation of ours that was asked for.
        served_by: what `ours` chose.
        us, p20_us, p80_us: microseconds, median and percentiles; None where not measured.
        host_us: median of what the host needed to enqueue it (GPU only).
        limit_us: max of arithmetic and bytes at the measured ceilings `peak_tflops` and
            `bandwidth_gbs`; percent_of_limit: 100 limit_us / us.
        ratio_to_eager: eager's us / us: above 1 is faster than eager.
        fusion_bound: the most that ratio can be by fusing alone.
        relative_error: against float64. error: why there is no time, or None.
        cold: inputs rotate beyond the last-level cache.
    """

    op: str
    shape: dict[str, int]
    model: str
    tp: int
    world: int
    act: str
    dtype: str
    implementation: str
    served_by: str | None
    us: float | None
    p20_us: float | None
    p80_us: float | None
    host_us: float | None
    repetitions: int
    limit_us: float
    percent_of_limit: float | None
    ratio_to_eager: float | None
    fusion_bound: float | None
    relative_error: float | None
    error: str | None
    cold: bool
    device: str
    host_cpu: str
    threads: int
    peak_tflops: float
    bandwidth_gbs: float
    versions: dict[str, str]
    commit: str
    date: str
    schema: str = SCHEMA


@dataclass(frozen=True)
class Origin:
    """Where and with what rows are made; the same for all of one run."""

    device: str
    host_cpu: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str


def origin(device: torch.device, commit: str | None = None) -> Origin:
    """That of this process; `commit` where this is not a git checkout."""
    cuda = device.type == "cuda"
    versions = {
        "torch": torch.__version__,
        "triton": table.triton_version() or "none",
        "cuda": torch.version.cuda or "none",
        "tpkernels": tpkernels.__version__,
        "python": platform.python_version(),
    }
    return Origin(
        torch.cuda.get_device_name(device) if cuda else host_cpu(),
        host_cpu(),
        torch.get_num_threads(),
        versions,
        commit or git_commit(),
        datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def host_cpu() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit() -> str:
    """The checkout's commit, `+` after it where files have changed; `unknown` elsewhere."""
    root = Path(tpkernels.__file__).resolve().parents[1]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # Installed below somebody's repository, its commit would say nothing of ours.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return "unknown"
        commit, changes = (
            git("rev-parse", "--short=12", "HEAD"),
            git("status", "--porcelain", "-uno"),
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + "+" * bool(changes)


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """`--out`, open at its end, on a new line even where its last one was cut off.

    Raises:
        ConfigError: it cannot be opened, or not written to.
    """
    try:
        stream = path.open("a")
        if path.is_file() and not _ends_with_a_line(path):
            stream.write("\n")
    except OSError as error:
        raise unwritable("--out", path, error) from error
    try:
        yield stream
    finally:
        try:
            stream.close()
        except OSError as error:  # writes what is still in its buffer
            raise unwritable("--out", path, error) from error


def unwritable(option: str, path: Path | str, error: OSError) -> ConfigError:
    """For a file that cannot be opened, or not be written to its end."""
    return ConfigError(
        f"{option} {path}: it cannot be written: {error.strerror or error}. Fix: another {option}"
    )


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        length = file.seek(0, 2)
        file.seek(max(0, length - 1))
        return file.read() in (b"", b"\n")


def write(rows: Iterable[Row], stream: TextIO) -> None:
    """Append, one line a row, and flush: what is written survives an interrupt.

    Raises:
        ConfigError: it cannot be written, as on a full disk.
    """
    lines = [json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows]
    try:
        stream.writelines(lines)
        stream.flush()
    except OSError as error:
        raise unwritable("--out", getattr(stream, "name", "stream"), error) from error


def digits(value: float | None) -> float | None:
    """Five of them; None for what JSON has not, NaN and infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of all files, in order.

    A row that was cut off as its process was killed is left out, with a warning on stderr.

    Raises:
        ConfigError: naming file and line: not there, not JSON, not one of our rows, or no row.
    """
    rows = []
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Fix: {_MAKE}") from error
        lines, found = text.splitlines(), []
        for number, line in enumerate(lines, 1):
            where, last = f"{path}, line {number}", number == len(lines) and text[-1:] != "\n"
            if _is_cut_off(line, last):
                print(f"tpkernels bench: warning: {where} was cut off, left out", file=sys.stderr)
            elif line.strip():
                found.append(_parse(line, where))
        if not found:
            raise ConfigError(f"{path} has no rows. Fix: {_MAKE}")
        rows += found
    return rows


_MAKE = "write it with `tpkernels bench --out FILE`"


_START = json.dumps({fields(Row)[0].name: ""})[:-2]  # of every line that was written


def _is_cut_off(line: str, last: bool) -> bool:
    """Whether `line` is the beginning of a row; or anything but JSON, at a file's end."""
    if not line.strip() or not (last or line.startswith(_START) or _START.startswith(line)):
        return False
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        # At its end: in a string, or at most a literal before it. Else it is whole, and wrong.
        at_the_end = error.pos >= len(line) - len("false") and error.msg != "Extra data"
        return last or at_the_end or error.msg.startswith("Unterminated string")
    return False


def _parse(line: str, where: str) -> Row:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: not JSON ({error}). Fix: delete the line, or {_MAKE}"
        ) from error
    if not isinstance(given, dict) or given.get("schema") != SCHEMA:
        schema = given.get("schema") if isinstance(given, dict) else None
        raise ConfigError(
            f"{where}: not a benchmark's row: its schema is {schema!r}, allowed: {SCHEMA!r}. "
            f"Fix: {_MAKE}"
        )
    wrong = violations(given)
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}. Fix: delete the line, or {_MAKE}")
    return Row(**given)


def violations(given: dict[str, Any]) -> list[str]:
    """In what `given` is not a row; empty where it is one."""
    hints = get_type_hints(Row)
    names = {field.name for field in fields(Row)}
    wrong = [f"{name} is missing" for name in sorted(names - set(given))]
    wrong += [f"{name} is unknown" for name in sorted(set(given) - names)]
    for name in sorted(names & set(given)):
        if not _fits(given[name], hints[name]):
            wrong.append(f"{name} is {given[name]!r}")
    shape = given.get("shape")
    if isinstance(shape, dict) and set(shape) != {"m", "n", "k"}:
        wrong.append(f"shape is {shape!r}")
    return wrong


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_args(hint):  # dict[str, ...]
        inner = get_args(hint)[1]
        return isinstance(value, dict) and all(_fits(item, inner) for item in value.values())
    if isinstance(value, bool):
        return hint is bool
    if hint is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, hint)
