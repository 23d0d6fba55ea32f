"""Where the C++ sources are: beside the package in a checkout, inside it when installed."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = (
    *("csrc/common", "csrc/kernels", "csrc/runtime", "csrc/comm", "csrc/ops", "csrc/c10d"),
    "python",
)
_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def is_checkout() -> bool:
    """Whether the package is used from its repository."""
    return (PACKAGE.parent / "csrc").is_dir() and (PACKAGE.parent / "setup.py").is_file()


def source_root() -> Path:
    """The directory that holds ``csrc`` and ``python``."""
    return PACKAGE.parent if is_checkout() else PACKAGE / "_sources"


def source_files(root: Path) -> list[Path]:
    """Every file the extension is built from, in order of name."""
    return sorted(
        path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in _SUFFIXES
    )


def sources_hash(root: Path) -> str:
    """Changes when any of the sources does."""
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
