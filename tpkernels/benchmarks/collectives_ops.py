"""The collectives that are measured: buffers, exact results, and calls of torch.distributed.

Inputs are small whole numbers, which every dtype here represents, and so are the results: the
comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.errors import ConfigError

ALL_REDUCE, BARRIER = "all_reduce", "barrier"
REDUCING = (ALL_REDUCE, "reduce_scatter")
SPLITTING = ("all_gather", "reduce_scatter", "all_to_all")  # a rank's part is 1/n of the whole
OPS = (ALL_REDUCE, "all_gather", "reduce_scatter", "all_to_all", "broadcast", BARRIER)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
REDOPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# From torch 2.13 on; it warns of the former names, which takes time in every call.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_LARGEST_INPUT = 3
_ALIGNED = 64  # bytes of a cache line: no two buffers share one
_REFRESHED = 1 << 30  # calls after which nothing has grown


@dataclass(frozen=True)
class Exchange:
    """One collective of one size.

    Attributes:
        elements: of the whole: of the output of all_gather, of the input of the others.
    """

    op: str
    elements: int
    dtype: str
    redop: str
    rank: int
    world: int
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes, as nccl-tests counts them: of the whole, not of a rank's part."""
        return self.elements * DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Elements, as nccl-tests counts them: of a rank's part where the whole is split."""
        return self.elements // self.world if self.op in SPLITTING else self.elements

    @property
    def in_place(self) -> bool:
        """Where torch.distributed has only that form."""
        return self.op in (ALL_REDUCE, "broadcast")

    @property
    def lasting(self) -> int:
        """Calls in place after which the values, W times as large each time, are put back.

        ASSUMPTION: speed does not depend on values, but sums that have become infinite are a
        special case that nobody needs. 2^15 is the last power of two in fp16, 2^127 in the others.
        """
        if self.op != ALL_REDUCE or self.redop != "sum":
            return _REFRESHED
        largest = 14 if self.dtype == "fp16" else 120
        return max(3, largest // (self.world * _LARGEST_INPUT).bit_length())

    def input_of(self, rank: int) -> Tensor:
        """What `rank` gives, as int64; every rank can compute it."""
        generator = torch.Generator().manual_seed(1 + rank)
        elements = self.count if self.op == "all_gather" else self.elements
        values = torch.randint(1, _LARGEST_INPUT + 1, (elements,), generator=generator)
        # so that a mean is a whole number
        return values * self.world if self.redop == "avg" and self.op in REDUCING else values

    def expected(self) -> Tensor:
        """What this rank must have afterwards, in its dtype.

        Raises:
            ConfigError: it is not representable.
        """
        if self.op == "broadcast":
            values = self.input_of(0)
        else:
            inputs = [self.input_of(rank) for rank in range(self.world)]
            if self.op == "all_gather":
                values = torch.cat(inputs)
            elif self.op == "all_to_all":
                values = torch.cat([each.chunk(self.world)[self.rank] for each in inputs])
            else:
                values = _reduced(torch.stack(inputs), self.redop)
                if self.op == "reduce_scatter":
                    values = values.chunk(self.world)[self.rank]
        found = values.to(DTYPES[self.dtype])
        if not torch.equal(found.long(), values):
            raise ConfigError(
                f"--dtype {self.dtype}: it cannot represent the {self.redop} over {self.world} "
                "ranks exactly. Fix: a wider dtype, or fewer ranks"
            )
        return found.to(self.device)


def _reduced(inputs: Tensor, redop: str) -> Tensor:
    if redop in ("sum", "avg"):
        total = inputs.sum(0)
        return total // len(inputs) if redop == "avg" else total
    return inputs.amax(0) if redop == "max" else inputs.amin(0)


class Buffers:
    """Inputs and outputs of an exchange, so many that all together exceed `rotate_bytes`."""

    def __init__(self, exchange: Exchange, rotate_bytes: int) -> None:
        dtype, device = DTYPES[exchange.dtype], exchange.device
        self._given = exchange.input_of(exchange.rank).to(dtype).to(device)
        given, taken = len(self._given), exchange.elements
        if exchange.op == "reduce_scatter":
            taken = exchange.count
        used = given * dtype.itemsize + (0 if exchange.in_place else taken * dtype.itemsize)
        copies = 1 + -(-rotate_bytes // used) if rotate_bytes and used else 1
        self._inputs = _rows(copies, given, dtype, device)
        self.inputs = list(self._inputs)
        self.outputs = (
            self.inputs
            if exchange.in_place
            else list(_rows(copies, taken, dtype, device).fill_(_LARGEST_INPUT))
        )
        self.refresh()

    def refresh(self) -> None:
        """All inputs as they were before any call."""
        self._inputs.copy_(self._given)


def _rows(copies: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[copies, elements], each row aligned to a cache line."""
    unit = _ALIGNED // dtype.itemsize
    width = -(-elements // unit) * unit
    flat = torch.empty(copies * width + unit, dtype=dtype, device=device)
    start = -flat.data_ptr() % _ALIGNED // dtype.itemsize
    return flat[start : start + copies * width].view(copies, width)[:, :elements]


def c10d_call(exchange: Exchange, given: Tensor, taken: Tensor, group: Any) -> Callable[[], object]:
    """The exchange through torch.distributed, on one pair of buffers."""
    op, reduction = exchange.op, REDOPS[exchange.redop]
    if op == ALL_REDUCE:
        return partial(dist.all_reduce, given, reduction, group)
    if op == "all_gather":
        return partial(_all_gather, taken, given, group)
    if op == "reduce_scatter":
        return partial(_reduce_scatter, taken, given, reduction, group)
    if op == "all_to_all":
        return partial(dist.all_to_all_single, taken, given, group=group)
    if op == "broadcast":
        return partial(dist.broadcast, given, 0, group)
    return partial(dist.barrier, group)


def wrong_elements(exchange: Exchange, call: Callable[[], object], buffers: Buffers) -> int:
    """How many elements of this rank's result are not what they must be, after one `call` of the
    first buffers; collective."""
    if exchange.op == BARRIER:
        call()
        return 0
    buffers.refresh()
    if not exchange.in_place:
        buffers.outputs[0].zero_()
    call()
    return int((buffers.outputs[0] != exchange.expected()).sum())
