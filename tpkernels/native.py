"""Loads the compiled extension ``tpkernels._C``, or says why not and what to do about it.

The record beside the extension is read first: what was built for another torch, CUDA or Python is
not loaded. Importing this module imports neither torch nor the extension.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

from tpkernels import envs
from tpkernels.build import record
from tpkernels.build.sources import PACKAGE, is_checkout, source_root, sources_hash
from tpkernels.build.torch_install import find_torch
from tpkernels.errors import ConfigError, TPKernelsWarning


@dataclass(frozen=True)
class NativeStatus:
    """Whether the extension is loaded, why (not), the fix, and what is recorded of its build."""

    available: bool
    reason: str
    fix: str | None = None
    build_info: dict[str, Any] = field(default_factory=dict)


def load() -> ModuleType | None:
    """The extension, loaded at the first call; None where it cannot be.

    Without it, but with a torch that it could serve, warns once with the command that builds it;
    silent where ``TPKERNELS_NATIVE=0`` asks for that.
    """
    return _load()[0] if envs.native() else None


def status() -> NativeStatus:
    """What :func:`load` comes to, in words."""
    if not envs.native():
        fix = "unset TPKERNELS_NATIVE"
        return NativeStatus(False, "TPKERNELS_NATIVE=0", fix, record.read(PACKAGE))
    return _load()[1]


def warn_if_missing() -> None:
    """Warn as :func:`load` would, without importing torch or the extension.

    A wrong ``TPKERNELS_NATIVE`` is warned about here and raises in :func:`load`.
    """
    try:
        wanted = envs.native()
    except ConfigError as error:
        _warn(str(error))
        return
    if wanted:
        _warn_about(_refusal())


@lru_cache(maxsize=1)
def _load() -> tuple[ModuleType | None, NativeStatus]:
    refused = _refusal()
    if refused is not None:
        _warn_about(refused)
        return None, refused
    build_info = record.read(PACKAGE)
    importlib.import_module("torch")  # the extension is linked against its libraries
    try:
        module = importlib.import_module("tpkernels._C")
    except ImportError as error:
        reason = f"rebuild it: it does not load: {error}"
        refused = NativeStatus(False, reason, record.BUILD_COMMAND, build_info)
        _warn_about(refused)
        return None, refused
    if is_checkout() and build_info.get("sources") != sources_hash(source_root()):
        _warn(f"csrc has changed since the extension was built. Fix: {record.BUILD_COMMAND}")
    build_info = {**build_info, **module.build_info()}
    cuda_skipped = build_info["cuda_skipped"]
    reason = f"built for torch {build_info['torch']}, runs {build_info['cpu_isa']}; " + (
        f"no CUDA kernels: {cuda_skipped}" if cuda_skipped else f"CUDA {build_info['cuda']}"
    )
    return module, NativeStatus(True, reason, None, build_info)


def _refusal() -> NativeStatus | None:
    """Why the extension is not to be loaded, from files alone; None if it may be."""
    build_info = record.read(PACKAGE)

    def off(reason: str, fix: str = record.BUILD_COMMAND) -> NativeStatus:
        return NativeStatus(False, reason, fix, build_info)

    torch = find_torch()
    extension = record.extension_path(PACKAGE)
    if torch is None:
        return off("torch is not installed", "pip install 'torch>=2.11'")
    if build_info.get("native") is False:
        return off(f"it was not built: {build_info['reason']}", _fix_of(build_info))
    if not build_info:
        return off("it was not built")
    different = record.mismatch(build_info, torch)
    if different is not None:
        return off(f"rebuild it: {different}")
    if not extension.is_file():
        return off(f"rebuild it: {extension.name} is missing")
    return None


def _warn_about(refused: NativeStatus | None) -> None:
    if refused is not None and find_torch() is not None and not _building():
        _warn(f"no native kernels, plain PyTorch serves: {refused.reason}. Fix: {refused.fix}")


def _fix_of(build_info: dict[str, Any]) -> str:
    """The recorded fix, unless it was to have a torch: one is here now."""
    fix = str(build_info.get("fix"))
    return (
        record.BUILD_COMMAND
        if record.BUILD_COMMAND in fix
        else f"{fix}, then: {record.BUILD_COMMAND}"
    )


def _building() -> bool:
    """Whether this process is the very command that the warning would name."""
    words = [word.rsplit("/", 1)[-1] for word in sys.orig_argv]
    return "tpkernels.build" in words or ("tpkernels", "build") in pairwise(words)


@lru_cache
def _warn(message: str) -> None:
    # Explicit, so that it is one line, no source line after it; cached, so that it is said once.
    warnings.warn_explicit(message, TPKernelsWarning, "tpkernels", 0)
