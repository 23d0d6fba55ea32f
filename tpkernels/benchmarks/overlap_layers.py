"""One tensor-parallel layer at a time: the six passes that communicate, and what is right.

row_forward       y  = all_reduce(x W^T)                         x [M, K], W [N, K]
column_backward   dx = all_reduce(dy W), dW = dy^T x             dy [M, K], W [K, N], x [M, N]
gather_forward    y  = all_gather(x) W^T                         x [M/R, N], W [K, N]
gather_backward   dx = reduce_scatter(dy W), dW = dy^T all_gather(x)
scatter_forward   y  = reduce_scatter(x W^T)                     x [M, K], W [N, K]
scatter_backward  dx = all_gather(dy) W, dW = all_gather(dy)^T x

The first two are tensor parallel, the others sequence parallel. Each rank's inputs are cut from
those of one dense layer, whose results are right.
"""

# M tokens, K this rank's part of the wide dimension (R K in all), N the model's width, R ranks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpkernels.benchmarks.gate import Truth, sample
from tpkernels.benchmarks.options import DTYPES
from tpkernels.benchmarks.overlap_variants import (
    DTENSOR,
    OFF,
    Call,
    Collectives,
    chunks_of,
    mesh_of,
    under,
)
from tpkernels.overlap import all_gather_gemm, column_gemm_act, gemm_all_reduce, gemm_reduce_scatter

ROW, COLUMN = "row_forward", "column_backward"
GATHER, GATHER_BACKWARD = "gather_forward", "gather_backward"
SCATTER, SCATTER_BACKWARD = "scatter_forward", "scatter_backward"
_COLLECTIVES = {  # each of an [M, N]
    ROW: ["all_reduce"],
    COLUMN: ["all_reduce"],
    GATHER: ["all_gather"],
    GATHER_BACKWARD: ["all_gather", "reduce_scatter"],
    SCATTER: ["reduce_scatter"],
    SCATTER_BACKWARD: ["all_gather"],
}
LAYERS = tuple(_COLLECTIVES)
_ROW_WISE, _BACKWARD = (ROW, SCATTER, SCATTER_BACKWARD), (COLUMN, GATHER_BACKWARD, SCATTER_BACKWARD)
_TRUTH_ROWS = 64  # of each output, in float64: the rest is compared with eager's


@dataclass(frozen=True)
class LayerProblem:
    """See Problem in overlap_variants.py; `dtype_name` as options.DTYPES has it."""

    op: str
    m: int
    k: int
    n: int
    dtype_name: str
    group: dist.ProcessGroup

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def tokens(self) -> int:
        return self.m

    @property
    def width(self) -> int:
        return self.n

    @property
    def shape(self) -> dict[str, int]:
        return {"m": self.m, "k": self.k, "n": self.n}

    @property
    def _row_wise(self) -> bool:
        return self.op in _ROW_WISE

    @cached_property
    def _dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, W and dy of the dense layer, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        wide = self.k * self.group.size()
        taken, given = (wide, self.n) if self._row_wise else (self.n, wide)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(self.dtype)

        weight = normal(given, taken, scale=max(1, taken) ** -0.5)
        return normal(self.m, taken), weight, normal(self.m, given)

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.group.size(), dim)[self.group.rank()].contiguous()

    @cached_property
    def _local(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's x, W and dy, as the layer is given them."""
        x, weight, dy = self._dense
        if self._row_wise:
            dy = dy if self.op == ROW else self._own(dy, 0)
            return self._own(x, 1), self._own(weight, 1), dy
        x = x if self.op == COLUMN else self._own(x, 0)
        return x, self._own(weight, 0), self._own(dy, 1)

    # --- what is measured alone ---

    def _products(self) -> list[tuple[Tensor, Tensor]]:
        """The matrices that a rank multiplies, whatever it gathers being there."""
        x, weight, dy = self._local
        if self._row_wise:
            dy = self._dense[2]
        else:
            x = self._dense[0]
        if self.op in _BACKWARD:
            return [(dy, weight), (dy.t(), x)]
        return [(x, weight.t())]

    def gemm(self) -> Call:
        products = [(a, b, a.new_empty(a.shape[0], b.shape[1])) for a, b in self._products()]

        def run() -> None:
            for a, b, out in products:
                torch.mm(a, b, out=out)

        return run

    def collectives(self) -> Collectives:
        return Collectives(_COLLECTIVES[self.op], self.m * self.n, self.dtype_name, self.group)

    def alone(self) -> Call:
        empty = LayerProblem(self.op, self.m, 0, self.n, self.dtype_name, self.group)
        return empty._ours("")

    # --- variants ---

    def refusal(self, name: str) -> str | None:
        if chunks_of(name) and self.op == COLUMN:
            return "its all-reduce is whole"
        return None

    def build(self, name: str) -> Call:
        if name == DTENSOR:
            return self._dtensor()
        return self._ours(name)

    def _ours(self, name: str) -> Call:
        """A variant of ours, whose name is the layer's; of a backward pass, that alone."""
        x, weight, dy = self._local
        group, strategy = self.group.group_name, "off" if name == OFF else None
        options: dict[str, Any] = {"chunks": chunks_of(name), "layer": name}

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            if self.op == ROW:
                return gemm_all_reduce(x, weight, None, group, **options)
            if self.op == COLUMN:
                return column_gemm_act(x, [weight], [None], "none", group, layer=name)[0]
            if self._row_wise:
                return gemm_reduce_scatter(x, weight, None, group, **options)
            return all_gather_gemm(x, [weight], None, "none", group, **options)[1][0]

        if self.op not in _BACKWARD:
            return under(strategy, partial(_forward, layer, x, weight))
        inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = under(strategy, partial(layer, *inputs))()
        return under(strategy, partial(_backward, y, inputs, dy))

    def _dtensor(self) -> Call:
        (x, _, dy), weight = self._local, self._dense[1]
        dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=self.dtype)
        with torch.no_grad():
            dense.weight.copy_(weight)
        sequence = Shard(0) if self.op not in (ROW, COLUMN) else None
        style = (
            RowwiseParallel(output_layouts=sequence)
            if self._row_wise
            else ColwiseParallel(input_layouts=sequence)
        )
        mesh = mesh_of(self.group)
        layer = parallelize_module(dense, mesh, style)
        if self.op not in _BACKWARD:
            return partial(_completed, partial(_forward, layer, x))
        leaf = x.detach().requires_grad_()
        call = partial(_backward, layer(leaf), [leaf, *layer.parameters()], dy)
        return partial(_completed, call)

    # --- what is right ---

    def outputs(self, name: str, result: Any) -> list[Tensor]:
        found = list(result) if self.op in _BACKWARD else [result]
        return [each.to_local() if isinstance(each, DTensor) else each for each in found]

    def right(self) -> tuple[list[Tensor], list[Truth]]:
        x, weight, dy = self._dense
        own_x, own_weight, own_dy = self._local
        if self.op == GATHER:
            products = {"y": (x, own_weight.t())}
        elif self.op in (ROW, SCATTER):
            products = {"y": (x if self.op == ROW else self._own(x, 0), weight.t())}
        elif self.op == SCATTER_BACKWARD:
            products = {"dx": (dy, own_weight), "dW": (dy.t(), own_x)}
        else:
            rows = dy if self.op == COLUMN else self._own(dy, 0)
            products = {"dx": (rows, weight), "dW": (own_dy.t(), x)}
        eager, truths = [], []
        with torch.no_grad():
            for name, (a, b) in products.items():
                rows = sample(a.shape[0], _TRUTH_ROWS, a.device)
                eager.append(a @ b)
                truths.append(Truth(name, _Rows(rows), a[rows].double() @ b.double()))
        return eager, truths

    def saved_bytes(self, name: str, call: Call) -> int | None:
        return None


@dataclass(frozen=True)
class _Rows:
    """Picks these rows of an output."""

    index: Tensor

    def __call__(self, output: Tensor) -> Tensor:
        return output[self.index]


def _completed(call: Call) -> Any:
    """What ``call`` gives, when it is there: DTensor waits for its last collective at first use."""
    result = call()
    for each in result if isinstance(result, (tuple, list)) else [result]:
        local = each._local_tensor if isinstance(each, DTensor) else each
        if isinstance(local, AsyncCollectiveTensor):
            local.trigger_wait()
    return result


def _forward(layer: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(*inputs)


def _backward(y: Tensor, inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, dy, retain_graph=True)
