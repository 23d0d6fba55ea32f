"""What was built, for what, and what was left out and why: a JSON file beside the extension.

It is read before the extension is loaded: a library built for another torch, CUDA or Python may
crash the process, so it is not loaded.
"""

from __future__ import annotations

import json
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from tpkernels.build.toolchain import Unavailable
from tpkernels.build.torch_install import TorchInstall

RECORD_NAME = "_build_info.json"
BUILD_COMMAND = "python -m tpkernels build"
_SOABI = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag


def extension_path(package: Path) -> Path:
    """Where the extension of this interpreter lies."""
    return package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def target(torch: TorchInstall) -> dict[str, Any]:
    """What an extension must have been built for to be loaded here."""
    return {
        "torch": torch.version,
        "torch_cuda": torch.cuda,
        "python": _SOABI,
        "machine": platform.machine(),
    }


def mismatch(record: dict[str, Any], torch: TorchInstall) -> str | None:
    """How what was built differs from what is here, or None."""
    names = {"torch": "torch", "torch_cuda": "CUDA", "python": "Python", "machine": "machine"}
    different = [
        f"{names[key]} {record.get(key)} (here: {value})"
        for key, value in target(torch).items()
        if record.get(key) != value
    ]
    return f"it was built for {', '.join(different)}" if different else None


def without_native(missing: Unavailable) -> dict[str, Any]:
    """The record of a build without native code."""
    return {"native": False, "reason": missing.reason, "fix": missing.fix}


def read(package: Path) -> dict[str, Any]:
    """The record; empty if there is none or it cannot be read."""
    try:
        return json.loads((package / RECORD_NAME).read_text())
    except (OSError, ValueError):
        return {}


def write(package: Path, record: dict[str, Any]) -> None:
    """Write the record."""
    (package / RECORD_NAME).write_text(json.dumps(record, indent=2, default=str) + "\n")
