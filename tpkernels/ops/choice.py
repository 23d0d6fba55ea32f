"""Which implementation serves an op, and why: one small table, the same on every rank.

Automatic choice: on CPU the compiled kernels where they are built, else plain PyTorch; on other
devices plain PyTorch. ``TPKERNELS_GEMM`` overrides; asking for what cannot serve raises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpkernels import envs, native
from tpkernels.errors import ConfigError
from tpkernels.library import OP_NAMES

LOCAL_OPS = (  # those that a compiled kernel can serve
    "gemm_act",
    "gemm_act_aux",
    "act_grad",
    "gemm_dact",
    "gemm_glu",
    "gemm_glu_aux",
    "glu_grad",
    "gemm_dglu",
)


@dataclass(frozen=True)
class ImplementationStatus:
    """One implementation: whether it can serve here, why (not), and the fix if there is one."""

    name: str
    available: bool
    reason: str
    fix: str | None = None


_registered = False  # the extension's CPU kernels are in the dispatcher


def apply() -> None:
    """(De)register the compiled CPU kernels as ``TPKERNELS_GEMM`` and the build say.

    Runs at import; call it again after changing ``TPKERNELS_GEMM`` in a running process.
    """
    global _registered
    wanted = envs.gemm() in ("auto", "cpu") and native.load() is not None
    if wanted == _registered:
        return
    extension = native.load()
    assert extension is not None
    (extension.register_cpu_kernels if wanted else extension.deregister_cpu_kernels)()
    _registered = wanted


def implementations() -> list[ImplementationStatus]:
    """Every implementation by name, with the reason for each that is off."""
    status = native.status()
    built = status.available
    cuda = torch.version.cuda is not None
    return [
        ImplementationStatus("reference", True, "plain PyTorch, any device"),
        ImplementationStatus(
            "cpu",
            built,
            "compiled epilogues on the library's GEMM" if built else status.reason,
            None if built else status.fix,
        ),
        ImplementationStatus(
            "onednn",
            False,
            "no kernels of its own in this version: torch's linear, under reference and cpu, "
            "calls oneDNN where it pays",
        ),
        ImplementationStatus(
            "triton", False, "not part of this version" if cuda else "needs a CUDA torch"
        ),
        ImplementationStatus(
            "cuda", False, "not part of this version" if cuda else "needs a CUDA torch"
        ),
        ImplementationStatus(
            "cublaslt", False, "not part of this version" if cuda else "needs a CUDA torch"
        ),
    ]


def resolve(device_type: str) -> tuple[str, str]:
    """(implementation, reason) that serves the local ops on ``device_type`` now."""
    asked = envs.gemm()
    if asked == "reference":
        return "reference", "TPKERNELS_GEMM=reference"
    if device_type == "cpu" and _registered and asked in ("auto", "cpu"):
        return "cpu", "compiled kernels" if asked == "auto" else "TPKERNELS_GEMM=cpu"
    if asked == "auto":
        if device_type == "cpu":
            return "reference", native.status().reason
        return "reference", f"no kernels for {device_type} in this version"
    known = {status.name: status for status in implementations()}[asked]
    fix = known.fix or "unset TPKERNELS_GEMM"
    why = known.reason if not known.available else f"it does not serve device {device_type!r}"
    raise ConfigError(f"TPKERNELS_GEMM={asked} was asked for and cannot serve: {why}. Fix: {fix}")


def resolve_all() -> list[tuple[str, str, str]]:
    """(op, implementation, reason) for every op on this machine's CPU."""
    implementation, reason = resolve("cpu")
    composed = "made of the local ops and torch.distributed"
    return [
        (name, implementation, reason) if name in LOCAL_OPS else (name, "reference", composed)
        for name in OP_NAMES
    ]


def require_servable(device_type: str) -> None:
    """Raise :class:`ConfigError` if an implementation was asked for that cannot serve here.

    Plain PyTorch calls this before it serves, so that it never stands in silently.
    """
    implementation, reason = resolve(device_type)
    if implementation != "reference":
        raise ConfigError(f"{reason}, but no {implementation} kernel took the call")
