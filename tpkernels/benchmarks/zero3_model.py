"""The models that the ZeRO-3 benchmark trains: pre-norm transformer blocks, and their batches."""

# B sequences of T tokens, D d_model; a block has 12 D^2 + 13 D parameters

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEAD = 64  # width of an attention head


@dataclass(frozen=True)
class ModelShape:
    """`blocks` blocks of width `d_model`, and what one rank computes: `sequences` x `length`."""

    name: str
    blocks: int
    d_model: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def __str__(self) -> str:
        return f"{self.blocks} blocks of d={self.d_model}, {self.tokens} tokens a rank"


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("6x512", 6, 512, 4, 256),
        ModelShape("12x768", 12, 768, 2, 256),
        ModelShape("tiny", 4, 64, 2, 32),
    )
}
FULL, QUICK = ("6x512", "12x768"), ("tiny",)


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + MLP(norm(x)), 4 D wide with GELU."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.heads = max(1, d_model // _HEAD)
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Unit(nn.Sequential):
    """Blocks that are gathered and freed together."""


class Transformer(nn.Module):
    """Blocks in units of `blocks_per_unit`, a last norm, and the mean squared error.

    The order of its parameters, and their values after `torch.manual_seed`, do not depend on
    `blocks_per_unit`.
    """

    def __init__(self, shape: ModelShape, blocks_per_unit: int = 1) -> None:
        super().__init__()
        blocks = [Block(shape.d_model) for _ in range(shape.blocks)]
        starts = range(0, shape.blocks, blocks_per_unit)
        self.units = nn.ModuleList(Unit(*blocks[i : i + blocks_per_unit]) for i in starts)
        self.norm = nn.LayerNorm(shape.d_model)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss, fp32 scalar; `x` and `target` [B, T, D]."""
        for unit in self.units:
            x = unit(x)
        return F.mse_loss(self.norm(x), target)


def make_model(shape: ModelShape, blocks_per_unit: int = 1) -> Transformer:
    """The same weights at every call, on every rank."""
    torch.manual_seed(0)
    return Transformer(shape, blocks_per_unit)


def make_batch(shape: ModelShape, rank: int) -> tuple[Tensor, Tensor]:
    """(x, target) of a rank, normal, another one for each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    size = (shape.sequences, shape.length, shape.d_model)
    x, target = (torch.randn(size, generator=generator) for _ in range(2))
    return x, target


@dataclass(frozen=True)
class Sizes:
    """Bytes: of every parameter, in order; of each unit; of what is in none."""

    parameters: tuple[int, ...]
    units: tuple[int, ...]
    root: int


def sizes(shape: ModelShape, blocks_per_unit: int = 1) -> Sizes:
    """Those of `make_model`, which is not made for it."""
    with torch.device("meta"):
        model = Transformer(shape, blocks_per_unit)
    parameters = tuple(_nbytes(parameter) for parameter in model.parameters())
    units = tuple(sum(map(_nbytes, unit.parameters())) for unit in model.units)
    return Sizes(parameters, units, sum(parameters) - sum(units))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
