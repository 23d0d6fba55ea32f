"""The ways to compute one layer or block between ranks, and what of it is measured alone.

gemm       the arithmetic alone, without any communication
comm       the collectives alone, by torch.distributed
comm ours  ours alone: the same op on a layer that is 0 wide, so that nothing is computed
off        ours with TPKERNELS_OVERLAP=off: arithmetic, then collective
dtensor    torch's parallelize_module
ours       ours with its automatic plan
chunks=C   ours with so many chunks
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels import instrument
from tpkernels.benchmarks.collectives_ops import Buffers, Exchange, c10d_call
from tpkernels.benchmarks.gate import Truth

GEMM, COMM, COMM_OURS = "gemm", "comm", "comm ours"
OFF, DTENSOR, OURS = "off", "dtensor", "ours"
PARTS = (GEMM, COMM, COMM_OURS)  # always measured: the others are judged by them
NAMES = (OFF, DTENSOR, OURS)
_CHUNKS = "chunks="

Call = Callable[[], Any]


def chunked(count: int) -> str:
    """The name of ours with `count` chunks."""
    return f"{_CHUNKS}{count}"


def chunks_of(name: str) -> int | None:
    """Those that a variant is told to make."""
    return int(name.removeprefix(_CHUNKS)) if name.startswith(_CHUNKS) else None


class Problem(Protocol):
    """One op at one shape on one group: what can be timed, and what is right.

    Attributes:
        tokens, width: rows and columns of what is communicated.
    """

    @property
    def op(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def shape(self) -> dict[str, int]:
        """For the rows of the results."""

    def gemm(self) -> Call:
        """A rank's arithmetic; its results are in buffers made before, or thrown away."""

    def collectives(self) -> Collectives:
        """What a rank sends and receives, by torch.distributed, one after the other."""

    def alone(self) -> Call | None:
        """`comm ours`; None where it cannot be had apart."""

    def refusal(self, name: str) -> str | None:
        """Why it has not this variant, or None."""

    def build(self, name: str) -> Call:
        """A variant; collective, and so are its calls."""

    def outputs(self, name: str, result: Any) -> list[Tensor]:
        """What is checked of a call's result; collective."""

    def right(self) -> tuple[list[Tensor], list[Truth]]:
        """Eager PyTorch's outputs, and float64 of a part of them: see gate.py."""

    def saved_bytes(self, name: str, call: Call) -> int | None:
        """What a call keeps for its backward pass, where it has one; collective."""


class Collectives:
    """Calls of torch.distributed on buffers of their own.

    Args:
        ops: see collectives_ops.py; each of `elements`, those of the whole, on `group`.
    """

    def __init__(
        self, ops: Sequence[str], elements: int, dtype: str, group: dist.ProcessGroup
    ) -> None:
        device = torch.device("cpu")
        exchanges = [
            Exchange(op, elements, dtype, "sum", group.rank(), group.size(), device) for op in ops
        ]
        self._buffers = [Buffers(exchange, 0) for exchange in exchanges]
        self._calls = [
            c10d_call(exchange, buffers.inputs[0], buffers.outputs[0], group)
            for exchange, buffers in zip(exchanges, self._buffers, strict=True)
        ]
        self.lasting = min(exchange.lasting for exchange in exchanges)

    def __call__(self) -> None:
        for call in self._calls:
            call()

    def refresh(self) -> None:
        """Put the inputs back: sums of sums grow."""
        for buffers in self._buffers:
            buffers.refresh()


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    """The group as a mesh of its own name.

    DTensor caches by mesh, and meshes of the same ranks and names are equal to it: under one name
    it would send what is asked of the second group through the first.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"tp_{group.group_name}",))


def under(strategy: str | None, call: Call) -> Call:
    """`call` with TPKERNELS_OVERLAP set to `strategy`; None: unset."""

    def run() -> Any:
        with overlap(strategy):
            return call()

    return run


@contextmanager
def overlap(strategy: str | None) -> Iterator[None]:
    """TPKERNELS_OVERLAP set to `strategy` meanwhile; None: unset."""
    before = os.environ.pop("TPKERNELS_OVERLAP", None)
    if strategy is not None:
        os.environ["TPKERNELS_OVERLAP"] = strategy
    try:
        yield
    finally:
        os.environ.pop("TPKERNELS_OVERLAP", None)
        if before is not None:
            os.environ["TPKERNELS_OVERLAP"] = before


class _Plans:
    """A recorder of plans alone, each once."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}

    def begin(self, kind: str, name: str, tensor: Tensor, details: dict[str, Any]) -> str:
        return name if kind == "operation" else ""

    def end(self, token: str, details: dict[str, Any]) -> None:
        if token and details.get("plan"):
            self.found[f"{token}: {details['plan']}"] = None


def plans_of(call: Call) -> str | None:
    """The plans that ops of ours print while `call` runs once; None without any. Collective."""
    plans = _Plans()
    instrument.record_to(plans)
    try:
        call()
    finally:
        instrument.record_to(None)
    return "; ".join(plans.found) or None
