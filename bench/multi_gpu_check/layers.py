"""The layers that are compared, and the ways to compute each.

all_reduce      [M, K/R] -> [M, N]          row-parallel
reduce_scatter  [M, K/R] -> [M/R, N]        row-parallel onto shards of the sequence
all_gather      [M/R, N] -> [M, K/R]        column-parallel from shards of the sequence
"""

# M rows, N = d_model, K = d_ff, R ranks

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tpkernels.comm.group import resolve_group
from tpkernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter

CASES = ("all_reduce", "reduce_scatter", "all_gather")
STRATEGIES = ("off", "chunked", "signaled")
# torch 2.13 renamed both and warns on the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_FUSED = {"reduce_scatter": "fused_matmul_reduce_scatter", "all_gather": "fused_all_gather_matmul"}


@dataclass(frozen=True)
class Case:
    """One layer: ``m`` rows in all, ``ff`` and ``d`` the widths before they are split."""

    op: str
    model: str
    m: int
    ff: int
    d: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op} {self.model} M={self.m} K={self.ff} N={self.d}"


@dataclass
class Variant:
    """One way; ``part``: the GEMM or the collective alone; ``note``: what is to be known of it."""

    call: Callable[[], Tensor]
    ours: bool = False
    part: bool = False
    note: str = ""
    strategy: str = field(default="off")

    def run(self) -> Tensor:
        """Its result; no gradient."""
        os.environ["TPKERNELS_OVERLAP"] = self.strategy
        with torch.no_grad():
            result = self.call()
        # DTensor's result may be under way still, and would be waited for by its first reader.
        return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result


def variants_of(case: Case, device: torch.device) -> dict[str, Variant]:
    """By name; ``plain`` is the truth, ``gemm`` and ``collective`` give the limit."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator(device).manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(case.dtype)

    each = case.ff // world
    if case.op == "all_gather":
        x, weight = draw(case.m // world, case.d), draw(each, case.d)
    else:
        x, weight = draw(case.m, each), draw(case.d, each)
    found = _plain(case.op, x, weight, world)
    found["dtensor"] = Variant(_dtensor(case, x, weight, device))
    if case.op in _FUSED and device.type == "cuda":
        found["async TP"] = _async_tp(case.op, x, weight)
    for strategy in STRATEGIES:
        found[f"ours, {strategy}"] = _ours(case.op, x, weight, strategy)
    return found


def _plain(op: str, x: Tensor, weight: Tensor, world: int) -> dict[str, Variant]:
    """The GEMM and the collective one after another; and each alone."""

    def gather(source: Tensor) -> Tensor:
        whole = source.new_empty(world * source.shape[0], *source.shape[1:])
        _all_gather(whole, source)
        return whole

    def scatter(y: Tensor) -> Tensor:
        kept = y.new_empty(y.shape[0] // world, *y.shape[1:])
        _reduce_scatter(kept, y)
        return kept

    def reduce(y: Tensor) -> Tensor:
        dist.all_reduce(y)
        return y

    if op == "all_gather":
        whole = gather(x)
        return {
            "gemm": Variant(lambda: F.linear(whole, weight), part=True),
            "collective": Variant(lambda: gather(x), part=True),
            "plain": Variant(lambda: F.linear(gather(x), weight)),
        }
    send = reduce if op == "all_reduce" else scatter
    y = torch.zeros(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
    y.normal_(std=1e-3)  # summed in place in every turn: it stays finite through dozens of them
    return {
        "gemm": Variant(lambda: F.linear(x, weight), part=True),
        "collective": Variant(lambda: send(y), part=True),
        "plain": Variant(lambda: send(F.linear(x, weight))),
    }


def _dtensor(case: Case, x: Tensor, weight: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """PyTorch's tensor parallelism, eager."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    column = case.op == "all_gather"
    shape = (case.d, case.ff) if column else (case.ff, case.d)
    layer = nn.Linear(*shape, bias=False, device=device, dtype=case.dtype)
    if column:
        style: Any = ColwiseParallel(input_layouts=Shard(0))
    else:
        layout = Replicate() if case.op == "all_reduce" else Shard(0)
        style = RowwiseParallel(output_layouts=layout)
    parallelize_module(layer, mesh, style)
    with torch.no_grad():
        layer.weight.to_local().copy_(weight)  # type: ignore[operator]
    return lambda: layer(x)


def _async_tp(op: str, x: Tensor, weight: Tensor) -> Variant:
    """``torch.compile`` with ``_micro_pipeline_tp``; ``note`` says whether it did fuse."""
    from torch._inductor.utils import run_and_get_code
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = dist.group.WORLD
    assert group is not None
    enable_symm_mem_for_group(group.group_name)

    def gather(x: Tensor, weight: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, 0, group) @ weight.t()

    def scatter(x: Tensor, weight: Tensor) -> Tensor:
        return functional.reduce_scatter_tensor(x @ weight.t(), "sum", 0, group)

    # An options dict would not reach it: it is read as Inductor's graph passes run.
    torch._inductor.config._micro_pipeline_tp = True
    compiled = torch.compile(gather if op == "all_gather" else scatter, fullgraph=True)
    variant = Variant(lambda: compiled(x, weight), note="not compiled yet")

    def first() -> Tensor:
        result, codes = run_and_get_code(compiled, x, weight)
        fused = any(_FUSED[op] in code for code in codes)
        variant.note = "fused" if fused else "PyTorch did not fuse it: a plain compiled graph"
        variant.call = lambda: compiled(x, weight)
        return result

    variant.call = first
    return variant


def _ours(op: str, x: Tensor, weight: Tensor, strategy: str) -> Variant:
    name = resolve_group(None).name
    calls: dict[str, Callable[[], Tensor]] = {
        "all_reduce": lambda: gemm_all_reduce(x, weight, None, name),
        "reduce_scatter": lambda: gemm_reduce_scatter(x, weight, None, name, dim=0),
        "all_gather": lambda: all_gather_gemm(x, [weight], [None], "none", name, dim=0)[1][0],
    }
    return Variant(calls[op], ours=True, strategy=strategy)
