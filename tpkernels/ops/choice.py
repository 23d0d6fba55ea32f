"""Which implementation serves a local op, and why: decided by tables, the same on every rank.

Automatic choice: on CPU the compiled kernels where they are built, else plain PyTorch; on CUDA
what the device's measured table (``tpkernels.kernels.table``) says is fastest, and plain PyTorch
for whatever was not measured; elsewhere plain PyTorch. Nothing is ever measured here.
``TPKERNELS_GEMM`` overrides; asking for what cannot serve raises.
"""

# m, n, k: rows and columns of the output and the summed dimension (0 where nothing is summed)

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tpkernels import envs, native
from tpkernels.errors import ConfigError
from tpkernels.kernels import available, table
from tpkernels.kernels.alignment import VECTOR
from tpkernels.kernels.table import TUNE, DeviceDescription, TableRow, bucket
from tpkernels.library import OP_NAMES
from tpkernels.ops import onednn
from tpkernels.ops.implementations import (
    LOCAL_OPS,
    Call,
    Refusal,
    implementations,
    refusal,
)

if TYPE_CHECKING:
    from tpkernels.kernels.config import GemmConfig


@dataclass(frozen=True)
class Choice:
    """What serves a call, why, and a Triton GEMM's tiles (None: its default rule)."""

    implementation: str
    reason: str
    config: GemmConfig | None = None


UNALIGNED = (
    f"operands that were not measured: not contiguous rows of a multiple of {VECTOR} elements on "
    "16-byte boundaries"
)
_DTYPES = {  # `table.dtype_key` back
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,
}
_TABLED = ("gemm_act", "gemm_act_aux", "gemm_glu", "gemm_glu_aux")  # by csrc/ops/cpu_table.cpp
_FUSED_WITH_REDUCTION = dict.fromkeys(
    ("gemm_all_reduce", "mlp"),
    "few rows, between ranks that share memory (tpshm): one native call (fused); else made of the "
    "local ops and torch.distributed",
)
_SHOWN = 60  # characters of a text that is not right
_registered = False  # the extension's CPU kernels are in the dispatcher
_asked_for: Any = None  # the library of what serves CPU tensors only when asked: triton, onednn
_forced: list[str] = []  # names given to `using`, innermost last
_memo: dict[tuple[Any, ...], Choice] = {}
_memo_generation = -1


# --- what was asked for ---------------------------------------------------------------------


def asked() -> str:
    """The implementation asked for, by :func:`using` or ``TPKERNELS_GEMM``, or ``"auto"``."""
    return _forced[-1] if _forced else envs.gemm()


@contextmanager
def using(name: str) -> Iterator[None]:
    """Ask for implementation ``name`` (or ``"auto"``) inside, over ``TPKERNELS_GEMM``.

    For the whole process, since autograd runs backward on threads of its own. Nests. Not for use
    while other threads call the ops.

    Raises:
        ConfigError: an unknown name. One that cannot serve raises when an op is called.
    """
    if name not in ("auto", *envs.IMPLEMENTATIONS):
        allowed = ", ".join(("auto", *envs.IMPLEMENTATIONS))
        raise ConfigError(f"using({name!r}): not an implementation; allowed: {allowed}")
    _forced.append(name)
    try:
        apply()
        yield
    finally:
        _forced.pop()
        apply()


def apply() -> None:
    """(De)register kernels for CPU tensors as :func:`asked` and the build say.

    Runs at import; call it again after changing ``TPKERNELS_GEMM`` in a running process. On CUDA
    every call asks :func:`choose` instead.
    """
    global _registered, _asked_for
    _memo.clear()
    name = asked()
    compiled = name in ("auto", "cpu") and native.load() is not None
    if _asked_for is not None:
        _asked_for._destroy()
        _asked_for = None
    if compiled != _registered:
        extension = native.load()
        assert extension is not None
        (extension.register_cpu_kernels if compiled else extension.deregister_cpu_kernels)()
        _registered = compiled
    if name == "triton" and available.interpreting() and available.status().available:
        from tpkernels.ops import serve

        _asked_for = serve.register("CPU")
    elif name == "onednn" and onednn.available():
        _asked_for = onednn.register(LOCAL_OPS, choose)


def _cannot(name: str, refused: Refusal) -> ConfigError:
    by = f"choice.using({name!r})" if _forced else f"TPKERNELS_GEMM={name}"
    fix = refused.fix or ("choice.using('auto')" if _forced else "unset TPKERNELS_GEMM")
    return ConfigError(f"{by} was asked for and cannot serve: {refused.reason}. Fix: {fix}")


# --- one call -------------------------------------------------------------------------------


def choose(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    *,
    act: str,
    bias: bool = False,
    aligned: bool = True,
) -> Choice:
    """What serves local op ``op`` for a call of these sizes on ``device``.

    Args:
        aligned: whether the operands are as measured (``tpkernels.kernels.alignment``), besides
            n and k, which are looked at here. Automatic choice takes plain PyTorch for others.

    Remembered by size bucket, until :func:`apply` or a change of the table.

    Raises:
        ConfigError: an implementation was asked for that cannot serve this call.
    """
    global _memo_generation
    name = asked()
    if _memo_generation != table.generation:
        _memo.clear()
        _memo_generation = table.generation
    tf32 = dtype is torch.float32 and table.tf32_allowed()
    aligned = aligned and (n | k) % VECTOR == 0
    key = (op, device, dtype, act, bias, bucket(m), bucket(n), bucket(k), aligned, name, tf32)
    found = _memo.get(key)
    if found is None:
        on_cuda = device.type == "cuda"
        described = table.describe(device) if on_cuda else None
        call = Call(op, device.type, described, dtype, act, bias, aligned)
        tabled = on_cuda and name == "auto" and aligned
        row = table.lookup(op, device, dtype, act, m, n, k) if tabled else None
        found = _memo[key] = decide(call, name, row)
    return found


def decide(call: Call, name: str, row: TableRow | None) -> Choice:
    """What serves ``call`` where ``name`` was asked for and the table says ``row``.

    Raises:
        ConfigError: ``name`` cannot serve the call.
    """
    if name == "reference":
        return Choice("reference", "asked for")
    if name != "auto":
        refused = refusal(name, call)
        if refused is not None:
            raise _cannot(name, refused)
        return Choice(name, "asked for")
    if call.device is None:
        return _automatic(call)
    if call.dtype is torch.float64:
        return Choice("reference", "no kernels for float64")
    if not call.aligned:
        return Choice("reference", UNALIGNED)
    if row is None:
        return Choice("reference", f"not tuned on {call.device.name} for this size: {TUNE}")
    if row.winner == "reference":
        return Choice("reference", "measured to be the fastest")
    refused = refusal(row.winner, call)
    if refused is None and row.winner == "triton" and available.interpreting():
        refused = Refusal("TRITON_INTERPRET is set")
    if refused is not None:
        return Choice("reference", f"{row.winner} was the fastest, but {refused.reason}")
    times = f"measured {row.us:.1f} us, plain PyTorch {row.reference_us:.1f} us"
    if row.winner != "triton" or row.config is None:
        return Choice(row.winner, times)
    tiles = _tiles(row, call.device.capability)
    if tiles is None:  # another version's, or edited: its time says nothing of other tiles
        shown = row.config if len(row.config) <= _SHOWN else f"{row.config[:_SHOWN]}..."
        reason = f"the table's row cannot be used: {shown!r} is no tile configuration of {row.op}"
        return Choice("reference", f"{reason} in this version: {TUNE}")
    return Choice("triton", times, tiles)


def _tiles(row: TableRow, capability: tuple[int, int]) -> GemmConfig | None:
    """The tile configuration of a Triton row, if it is one of those that are tuned."""
    from tpkernels.kernels import config

    dtype = _DTYPES.get(row.dtype)
    if dtype is None or row.op not in config.OPS:
        return None
    return {str(each): each for each in config.configs(row.op, dtype, capability)}.get(
        row.config or ""
    )


def _winner(row: TableRow, capability: tuple[int, int]) -> str:
    """The implementation that a row is taken for, as far as the device says."""
    usable = row.winner != "triton" or row.config is None or _tiles(row, capability)
    return row.winner if usable else "reference"


def _automatic(call: Call) -> Choice:
    """Off CUDA: what :func:`apply` has registered."""
    if call.device_type == "cpu":
        refused = refusal("cpu", call)
        if refused is None:
            return Choice("cpu", "compiled kernels")
        return Choice("reference", refused.reason)
    return Choice("reference", f"no kernels for {call.device_type} in this version")


def candidates(
    op: str,
    device: torch.device | DeviceDescription,
    dtype: torch.dtype,
    act: str,
    bias: bool = False,
) -> list[str]:
    """Implementations that could serve such a call here, plain PyTorch first.

    For benches and tuning: each can be forced by :func:`using`. A :class:`DeviceDescription`
    stands for a CUDA device.
    """
    if isinstance(device, DeviceDescription):
        call = Call(op, "cuda", device, dtype, act, bias)
    else:
        on_cuda = device.type == "cuda"
        call = Call(op, device.type, table.describe(device) if on_cuda else None, dtype, act, bias)
    others = [name for name in envs.IMPLEMENTATIONS if name != "reference"]
    return ["reference", *(name for name in others if refusal(name, call) is None)]


# --- in general, for the report and doctor --------------------------------------------------


def resolve(device_type: str, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """(implementation, reason) that serves the local ops on ``device_type`` in ``dtype`` now.

    On CUDA that is decided call by call, and this is what serves what was not measured.

    Raises:
        ConfigError: an implementation was asked for that cannot serve there at all.
    """
    name = asked()
    if name == "reference":
        return "reference", "TPKERNELS_GEMM=reference"
    if name == "auto":
        if device_type == "cuda":
            return "reference", f"where the device's measured table has no faster row ({TUNE})"
        found = _automatic(Call("gemm_act", device_type, None, torch.float32, "gelu", True))
        return found.implementation, found.reason
    # A call that every implementation can serve if it can serve one.
    call = Call("gemm_act", device_type, None, dtype, "relu", True)
    refused = refusal(name, call)
    if refused is not None:
        raise _cannot(name, refused)
    return name, f"TPKERNELS_GEMM={name}"


def resolve_all() -> list[tuple[str, str, str]]:
    """(op, implementation, reason) for every op on this machine's CPU."""
    implementation, reason = resolve("cpu")
    found = []
    for op in OP_NAMES:
        if op in _FUSED_WITH_REDUCTION and implementation == "cpu":
            found.append((op, "cpu, reference", _FUSED_WITH_REDUCTION[op]))
        elif op not in LOCAL_OPS:
            found.append((op, "reference", "made of the local ops and torch.distributed"))
        elif op == "gemm_dact_dbias" and implementation == "cpu":
            found.append((op, implementation, f"{reason}: gemm_dact's, then a sum"))
        elif op in _TABLED and implementation == "cpu":
            extension = native.load()
            assert extension is not None
            table_says = extension.cpu_table_summary(plain=op == "gemm_act")
            found.append((op, implementation, f"{reason}: {table_says}"))
        elif implementation == "onednn" and op != "gemm_act":
            found.append((op, "none", f"{reason} serves only {onednn.SERVES}"))
        else:
            found.append((op, implementation, reason))
    return found


def resolve_on(device: torch.device | DeviceDescription) -> list[tuple[str, str, str]]:
    """(op, implementation, reason) for every local op on a CUDA device, shapes varying.

    The implementation is what serves measured shapes, as ``"triton 8, reference 4"``.
    """
    name = asked()
    if name != "auto":
        return [(op, *resolve("cuda")) for op in LOCAL_OPS]
    rows = table.table_of(device).rows.values()
    capability = table.describe(device).capability
    found = []
    for op in LOCAL_OPS:
        winners = [_winner(row, capability) for row in rows if row.op == op]
        counts = {each: winners.count(each) for each in sorted(set(winners))}
        shown = ", ".join(f"{each} {count}" for each, count in counts.items())
        reason = "by measured shape; else reference" if winners else f"not tuned: {TUNE}"
        found.append((op, shown or "reference", reason))
    return found


def summary(device: torch.device | DeviceDescription, dtype: torch.dtype = torch.float32) -> str:
    """What serves the local ops on ``device`` in a few words, for the report.

    Raises:
        ConfigError: an implementation was asked for that cannot serve ``dtype`` there.
    """
    if isinstance(device, torch.device) and device.type != "cuda":
        return resolve(device.type, dtype)[0]
    if asked() != "auto":
        return resolve("cuda", dtype)[0]
    description = table.describe(device)
    capability = description.capability
    winners = [_winner(row, capability) for row in table.table_of(device).rows.values()]
    if not winners:
        return f"reference (not tuned: {TUNE})"
    off = {each.name: each.reason for each in implementations() if not each.available}
    if off.keys() >= set(winners):
        return f"reference ({off[winners[0]]})"
    count = len(winners)
    return f"auto: table {description.slug} ({count} row{'s' * (count != 1)})"


def require_servable(device_type: str) -> None:
    """Raise :class:`ConfigError` if an implementation was asked for that cannot serve here.

    Plain PyTorch calls this before it serves where nothing else is registered, so that it never
    stands in silently.
    """
    implementation, reason = resolve(device_type)
    if implementation != "reference":
        raise ConfigError(f"{reason}, but no {implementation} kernel took the call")
