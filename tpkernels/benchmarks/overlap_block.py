"""A pre-norm transformer block, forward and backward: `block`, and `block_sequence` on shards.

x + attention(norm(x)), then x + MLP(norm(x)): fused QKV, so that every variant has one collective
at the entry of each half; causal; d wide, 4 d in the MLP, one sequence of T tokens.

    dense   the block in plain PyTorch: what is right
    gemm    a block of a rank's heads and its part of the MLP, without communication
    dtensor parallelize_module, with PrepareModuleInput and SequenceParallel on shards
    ours    TPAttention and TPMLP
"""

# T tokens, d the model's width, H heads of D, R ranks

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tpkernels
from tpkernels.benchmarks.activation_memory import saved_bytes
from tpkernels.benchmarks.gate import Truth
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
from tpkernels.modules.attention import TPAttention
from tpkernels.modules.mlp import TPMLP
from tpkernels.modules.parameters import gather_gradient
from tpkernels.modules.shard_gradients import summed_over_shards

BLOCK, BLOCK_SEQUENCE = "block", "block_sequence"
BLOCKS = (BLOCK, BLOCK_SEQUENCE)
HEAD = 64  # D
_FORWARD_GATHERS, _BACKWARD_GATHERS, _SCATTERS = 2, 4, 4  # of the block on shards


class Attention(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * heads * HEAD)
        self.out = nn.Linear(heads * HEAD, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, HEAD).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, h)
        self.down = nn.Linear(h, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """That of one of `ranks`: its heads, and its part of the MLP."""

    def __init__(self, d: int, ranks: int = 1) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d)
        self.attention = Attention(d, d // HEAD // ranks)
        self.mlp_norm = nn.LayerNorm(d)
        self.mlp = MLP(d, 4 * d // ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _OursOnShards(Block):
    """Takes and gives a rank's rows, with TPAttention and TPMLP in between; collective."""

    def __init__(self, d: int, weights: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
        super().__init__(d)
        self.to(next(iter(weights.values())).dtype).load_state_dict(weights)
        self.group_name = mesh.get_group().group_name
        TPAttention.shard_(
            self.attention,
            mesh,
            num_heads=d // HEAD,
            head_dim=HEAD,
            qkv="qkv",
            out="out",
            causal=True,
            sequence_parallel=True,
        )
        TPMLP.shard_(
            self.mlp, mesh, up="up", down="down", activation="gelu_tanh", sequence_parallel=True
        )

    def forward(self, x: Tensor) -> Tensor:
        with summed_over_shards(self, self.group_name):
            return super().forward(x)


class _AloneOnShards(Block):
    """Its rows stand for those that would be gathered; it keeps its own of what would be summed."""

    def __init__(self, d: int, ranks: int) -> None:
        super().__init__(d, ranks)
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in ((self.attention_norm, self.attention), (self.mlp_norm, self.mlp)):
            x = x + part(torch.cat([norm(x)] * self.ranks, 1))[:, : x.shape[1]]
        return x


@dataclass(frozen=True)
class BlockProblem:
    """See Problem in overlap_variants.py; `dtype_name` as options.DTYPES has it."""

    op: str
    tokens: int
    width: int
    dtype_name: str
    group: dist.ProcessGroup

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def shape(self) -> dict[str, int]:
        return {"m": self.tokens, "d": self.width, "h": 4 * self.width}

    @property
    def _on_shards(self) -> bool:
        return self.op == BLOCK_SEQUENCE

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """x, dy and the weights of the dense block, the same on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            x, dy = (torch.randn(1, self.tokens, self.width).to(self.dtype) for _ in range(2))
            return x, dy, Block(self.width).to(self.dtype).state_dict()

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's rows, where they are sharded."""
        if not self._on_shards:
            return whole
        return whole.chunk(self.group.size(), 1)[self.group.rank()].contiguous()

    def _trained(self, module: nn.Module) -> Call:
        x, dy = (self._own(each).clone() for each in self._data[:2])
        return partial(_step, module, x.requires_grad_(), dy)

    # --- what is measured alone ---

    def gemm(self) -> Call:
        kind = _AloneOnShards if self._on_shards else Block
        return self._trained(kind(self.width, self.group.size()).to(self.dtype))

    def collectives(self) -> Collectives:
        ops = ["all_reduce"] * 4
        if self._on_shards:
            ops = ["all_gather"] * (_FORWARD_GATHERS + _BACKWARD_GATHERS)
            ops += ["reduce_scatter"] * _SCATTERS
        return Collectives(ops, self.tokens * self.width, self.dtype_name, self.group)

    def alone(self) -> None:
        return None

    # --- variants ---

    def refusal(self, name: str) -> str | None:
        return "its layers are as their plans say" if chunks_of(name) else None

    def build(self, name: str) -> Call:
        weights = self._data[2]
        mesh = mesh_of(self.group)
        block = Block(self.width).to(self.dtype)
        if name == DTENSOR:
            block.load_state_dict(self._reordered(weights))
            block.attention.heads //= self.group.size()
            return self._trained(parallelize_module(block, mesh, _plan(self._on_shards)))
        if self._on_shards:
            block = _OursOnShards(self.width, weights, mesh)
        else:
            block.load_state_dict(weights)
            tpkernels.parallelize(block, mesh)
        return under("off" if name == OFF else None, self._trained(block))

    def _reordered(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[Q | K | V] as one [q | k | v] a rank, which is what DTensor splits evenly."""
        ranks = self.group.size()
        return {
            name: value.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
            if ".qkv." in name
            else value
            for name, value in weights.items()
        }

    # --- what is right ---

    def outputs(self, name: str, result: Any) -> list[Tensor]:
        module, x, y = result
        found = [y.detach(), x.grad]
        for key, parameter in module.named_parameters():
            if name != DTENSOR:
                found.append(gather_gradient(parameter, None))
                continue
            whole = parameter.grad
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            if ".qkv." in key:
                whole = whole.unflatten(0, (self.group.size(), 3, -1)).transpose(0, 1).flatten(0, 2)
            found.append(whole)
        return found

    def right(self) -> tuple[list[Tensor], list[Truth]]:
        x, dy, weights = self._data

        def dense(dtype: torch.dtype) -> dict[str, Any]:
            block = Block(self.width).to(dtype)
            block.load_state_dict({name: value.to(dtype) for name, value in weights.items()})
            _, leaf, y = _step(block, x.to(dtype).clone().requires_grad_(), dy.to(dtype))
            assert leaf.grad is not None
            found: dict[str, Any] = {"y": self._own(y.detach()), "dx": self._own(leaf.grad)}
            found.update((f"gradient of {name}", p.grad) for name, p in block.named_parameters())
            return found

        eager = dense(self.dtype)
        exact = dense(torch.float64)
        return list(eager.values()), [Truth(name, _all, each) for name, each in exact.items()]

    def saved_bytes(self, name: str, call: Call) -> int | None:
        module, x, _ = call()
        return saved_bytes(partial(module, x), module.parameters())


def _step(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[nn.Module, Tensor, Tensor]:
    """Forward and backward; (module, x, y), with gradients."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(dy)
    return module, x, y


def _all(output: Tensor) -> Tensor:
    return output


def _plan(on_shards: bool) -> dict[str, Any]:
    """DTensor's, with one collective at the entry of each half."""
    if not on_shards:
        return {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
    return {
        "attention_norm": SequenceParallel(),
        "attention": _gather(),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": _gather(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _gather() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
