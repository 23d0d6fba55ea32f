"""The ways to compute one MLP between CPU ranks, all with the same weights.

dense          the whole MLP in plain PyTorch on one thread of rank 0; the other ranks sleep
dtensor gloo   parallelize_module with ColwiseParallel and RowwiseParallel, on a Gloo group
dtensor tpshm  the same on a tpshm group
ours gloo      TPMLP on a Gloo group
ours           TPMLP on a tpshm group
"""

# M tokens, d d_model, h d_ff

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpkernels
from tpkernels.benchmarks.collectives_backends import shared_memory_group
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.errors import ConfigError
from tpkernels.modules.mlp import TPMLP
from tpkernels.overlap import fused

DENSE, DTENSOR, DTENSOR_TPSHM = "dense", "dtensor gloo", "dtensor tpshm"
OURS_GLOO, OURS = "ours gloo", "ours"
NAMES = (DENSE, DTENSOR, DTENSOR_TPSHM, OURS_GLOO, OURS)
ON_TPSHM = (DTENSOR_TPSHM, OURS)


@dataclass(frozen=True)
class Shape:
    m: int
    d: int
    h: int

    def __str__(self) -> str:
        return f"M={self.m} d={self.d} h={self.h}"

    @property
    def weights(self) -> int:
        """Elements of both weights."""
        return 2 * self.d * self.h

    @property
    def flops(self) -> int:
        return 2 * self.m * self.weights


class Dense(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, d: int, h: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = nn.Linear(d, h, dtype=dtype)
        self.down_proj = nn.Linear(h, d, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


def connect(names: Sequence[str], asked: bool, ranks: Ranks) -> dict[str, Any]:
    """The process group of each variant that can run, by name; collective.

    Raises:
        ConfigError: `asked` for one that needs shared memory, and there is none.
    """
    gloo: Any = dist.new_group(backend="gloo")
    shared, error = None, None
    if any(name in ON_TPSHM for name in names):
        try:
            shared = shared_memory_group()
        except Exception as failed:
            error = str(failed)
        error = ranks.first_error(error)
    if error is not None:
        if asked:
            raise ConfigError(f"--variants: {error}. Fix: leave out those on tpshm")
        ranks.note(f"left out {', '.join(n for n in names if n in ON_TPSHM)}: {error}")
        names = [name for name in names if name not in ON_TPSHM]
    return {name: shared if name in ON_TPSHM else gloo for name in names}


def state(shape: Shape, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Weights and biases in plain layout, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        return (torch.randn(*size, generator=generator) * fan_in**-0.5).to(dtype)

    return {
        "up_proj.weight": normal(shape.h, shape.d, fan_in=shape.d),
        "up_proj.bias": normal(shape.h),
        "down_proj.weight": normal(shape.d, shape.h, fan_in=shape.h),
        "down_proj.bias": normal(shape.d),
    }


def build(
    name: str, shape: Shape, weights: Mapping[str, Tensor], dtype: torch.dtype, group: Any
) -> nn.Module:
    """One variant's module, in evaluation mode; collective."""
    if name in (OURS, OURS_GLOO):
        ours = TPMLP(shape.d, shape.h, activation="gelu", group=group, dtype=dtype).eval()
        tpkernels.load_full_state_dict(ours, dict(weights))
        return ours
    dense = Dense(shape.d, shape.h, dtype).eval()
    dense.load_state_dict(weights)
    if name == DENSE:
        return dense
    # DTensor caches what it does by mesh, and takes meshes of equal ranks and names for one: with
    # one name, the second group's layer would send over the first group.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"tp_{group.group_name}",))
    plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    return parallelize_module(dense, mesh, plan)


def truth(shape: Shape, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The result in float64."""
    wide = Dense(shape.d, shape.h, torch.float64)
    wide.load_state_dict({name: value.double() for name, value in weights.items()})
    return wide(x.double())


def served_by(name: str, module: nn.Module, x: Tensor) -> str | None:
    """What ours chose, in words."""
    if not isinstance(module, TPMLP):
        return None
    up, down = module.up_proj.local_weight(), module.down_proj.local_weight()
    one_call = fused.chosen(x, (up, None, down), module.group.name)
    return "fused: one native call" if one_call else "gemm_act, GEMM, all-reduce"
