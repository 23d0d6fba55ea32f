"""The implementations by name: which are here, which calls each can serve, and the fixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpkernels import native
from tpkernels.kernels import available
from tpkernels.kernels.config import DTYPES
from tpkernels.kernels.table import DeviceDescription
from tpkernels.ops import cublaslt, onednn

LOCAL_OPS = (  # ops of one rank, which an implementation can serve
    "gemm_act",
    "gemm_act_aux",
    "act_grad",
    "gemm_dact",
    "gemm_dact_dbias",
    "gemm_glu",
    "gemm_glu_aux",
    "glu_grad",
    "gemm_dglu",
)
CUDA_TORCH = "pip install a CUDA build of torch"


@dataclass(frozen=True)
class ImplementationStatus:
    """One implementation: whether it can serve here, why (not), and the fix if there is one."""

    name: str
    available: bool
    reason: str
    fix: str | None = None


@dataclass(frozen=True)
class Call:
    """What an implementation must know of a call to say whether it can serve it.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"`` ...
        device: the CUDA device, None for others (and where the call is of no device yet).
        aligned: whether its operands lie in memory as those that the measured table is for.
    """

    op: str
    device_type: str
    device: DeviceDescription | None
    dtype: torch.dtype
    act: str
    bias: bool
    aligned: bool = True


@dataclass(frozen=True)
class Refusal:
    """Why an implementation cannot serve a call, and what to do about it."""

    reason: str
    fix: str | None = None


def implementations() -> list[ImplementationStatus]:
    """Every implementation by name, with the reason for each that is off."""
    status, triton = native.status(), available.status()
    built = status.available
    return [
        ImplementationStatus("reference", True, "plain PyTorch, any device"),
        ImplementationStatus(
            "cpu",
            built,
            "compiled GEMMs for few rows, else epilogues on the library's GEMM"
            if built
            else status.reason,
            None if built else status.fix,
        ),
        _onednn_status(),
        ImplementationStatus("triton", triton.available, triton.reason, triton.fix),
        ImplementationStatus("cuda", False, "not part of this version"),
        _cublaslt_status(),
    ]


def _onednn_status() -> ImplementationStatus:
    if onednn.available():
        return ImplementationStatus("onednn", True, onednn.SERVES)
    reason = "torch was built without oneDNN, or torch.backends.mkldnn.enabled is False"
    return ImplementationStatus("onednn", False, reason)


def _cublaslt_status() -> ImplementationStatus:
    if torch.version.cuda is None:
        return ImplementationStatus("cublaslt", False, "needs a CUDA torch", CUDA_TORCH)
    if not torch.cuda.is_available():
        fix = "run on a machine with a CUDA device"
        return ImplementationStatus("cublaslt", False, "torch sees no GPU", fix)
    return ImplementationStatus("cublaslt", True, cublaslt.SERVES)


def refusal(name: str, call: Call) -> Refusal | None:
    """Why ``name`` cannot serve ``call``; None if it can."""
    status = {each.name: each for each in implementations()}[name]
    if not status.available:
        return Refusal(status.reason, status.fix)
    if name == "triton":
        return _triton_refusal(call)
    if name == "cublaslt":
        if call.device_type != "cuda":
            return Refusal(f"it does not serve device {call.device_type!r}, only CUDA")
        if not cublaslt.serves(call.op, call.dtype, call.act, call.bias):
            return Refusal(f"it serves {cublaslt.SERVES}; {_given(call)}")
    if name == "onednn":
        if call.device_type != "cpu":
            return Refusal(f"it does not serve device {call.device_type!r}, only CPU")
        if not onednn.serves(call.op, call.dtype, call.act):
            return Refusal(f"it serves {onednn.SERVES}; {_given(call)}")
    if name == "cpu" and call.device_type != "cpu":
        return Refusal(f"it does not serve device {call.device_type!r}")
    return None


def _given(call: Call) -> str:
    bias = "a bias" if call.bias else "no bias"
    return f"this is {call.op} with {bias} and act {call.act} in {_name(call.dtype)}"


def _triton_refusal(call: Call) -> Refusal | None:
    if call.op not in LOCAL_OPS:
        return Refusal(f"it has no {call.op}")
    if call.device_type == "cpu" and not available.interpreting():
        return Refusal(
            "CPU tensors need Triton's interpreter, which is for tests and debugging",
            "export TRITON_INTERPRET=1, or unset TPKERNELS_GEMM",
        )
    if call.device_type not in ("cpu", "cuda"):
        return Refusal(f"it does not serve device {call.device_type!r}")
    if call.dtype not in DTYPES:
        allowed = ", ".join(map(_name, DTYPES))
        return Refusal(f"its kernels have no {_name(call.dtype)}; allowed: {allowed}")
    if call.device is not None and call.device.capability < available.OLDEST_CAPABILITY:
        major, minor = call.device.capability
        return Refusal(f"needs sm_80 or newer, {call.device.name} is sm_{major}{minor}")
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
