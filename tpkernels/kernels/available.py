"""Whether the Triton kernels can run here, without importing Triton or touching a device."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)  # Ampere: cp.async and bf16 tensor cores


@dataclass(frozen=True)
class Availability:
    """Whether something can serve, why (not), and the fix if there is one."""

    available: bool
    reason: str
    fix: str | None = None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter: on CPU tensors, for tests, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def status() -> Availability:
    """Whether Triton kernels can run in this process, on its CUDA devices or interpreted."""
    installed = triton_status()
    if not installed.available:
        return installed
    if interpreting():
        reason = f"{installed.reason}, interpreted on CPU (TRITON_INTERPRET is set): for tests"
        return Availability(True, reason)
    import torch

    if torch.version.cuda is None:
        return Availability(False, "needs a CUDA torch", "pip install a CUDA build of torch")
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no GPU", "run on a machine with a CUDA device")
    old = [
        torch.cuda.get_device_name(index)
        for index in range(torch.cuda.device_count())
        if torch.cuda.get_device_capability(index) < OLDEST_CAPABILITY
    ]
    if len(old) == torch.cuda.device_count():
        return Availability(False, f"needs compute capability 8.0 or newer, {old[0]} is older")
    return Availability(True, installed.reason)


@lru_cache(maxsize=1)
def triton_status() -> Availability:
    """Whether a Triton that is new enough is installed."""
    oldest = ".".join(map(str, OLDEST_TRITON))
    fix = f"pip install 'triton>={oldest}'"
    if importlib.util.find_spec("triton") is None:
        return Availability(False, "Triton is not installed", fix)
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # a source tree, or a distribution of another name
        return Availability(True, "Triton of unknown version")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TRITON:
        return Availability(False, f"needs Triton {oldest} or newer, {version} is installed", fix)
    return Availability(True, f"Triton {version}")
