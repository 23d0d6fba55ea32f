"""``ShardSpec``: how a parameter says which part of which global tensor it holds.

The one truth for checkpoints, ``full_state_dict``, gradient clipping and reports. It hangs on
every parameter that tpkernels sharded, and on replicated ones whose split would be ambiguous.

A rank's local tensor is a stack, along ``dim``, of one or more *chunks* of the global tensor:

    global (fused QKV, dim 0)    [ q0 q1 | k0 k1 | v0 v1 ]
    rank 0 of 2, local           [ q0 | k0 | v0 ]        3 chunks
    rank 1 of 2, local           [ q1 | k1 | v1 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels.errors import ConfigError

SPEC_ATTRIBUTE = "_tpkernels_shard_spec"


@dataclass(frozen=True)
class Chunk:
    """``size`` rows of the global tensor along the split dimension.

    They start at ``offset`` in the global tensor and at ``local_offset`` in this rank's tensor.
    """

    offset: int
    size: int
    local_offset: int


@dataclass(frozen=True)
class ShardSpec:
    """What one rank holds of a global tensor, and what its peers hold.

    Attributes:
        global_shape: shape of the whole tensor.
        dim: the dimension that is split.
        layout: for every rank of the group, the chunks it holds; equal on all ranks.
        rank: this rank's number within the group.
        mesh_dim: name of the mesh dimension it is split over (``"tp"``), for reports.
    """

    global_shape: tuple[int, ...]
    dim: int
    layout: tuple[tuple[Chunk, ...], ...]
    rank: int
    mesh_dim: str = "tp"

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks this rank holds."""
        return self.layout[self.rank]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return self.local_shape_of(self.rank)

    def local_shape_of(self, rank: int) -> tuple[int, ...]:
        """Shape of the tensor that ``rank`` holds."""
        shape = list(self.global_shape)
        shape[self.dim] = sum(chunk.size for chunk in self.layout[rank])
        return tuple(shape)

    def owners(self, offset: int) -> list[int]:
        """Ranks that hold the global row ``offset``, in rank order."""
        return [
            rank
            for rank, chunks in enumerate(self.layout)
            if any(c.offset <= offset < c.offset + c.size for c in chunks)
        ]

    @property
    def is_replicated(self) -> bool:
        """Whether any row is held by more than one rank (its gradient is then a sum)."""
        held = sum(chunk.size for chunks in self.layout for chunk in chunks)
        return held > self.global_shape[self.dim]

    def replicas(self, chunk: Chunk) -> int:
        """How many ranks of the group hold this chunk."""
        return len(self.owners(chunk.offset)) if chunk.size else 1

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's tensor, a contiguous copy, from the global one."""
        if tuple(full.shape) != self.global_shape:
            raise ConfigError(
                f"expected a full tensor of shape {self.global_shape}, got {tuple(full.shape)}"
            )
        pieces = [full.narrow(self.dim, c.offset, c.size) for c in self.chunks]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, dim=self.dim)

    def put(self, local: torch.Tensor, full: torch.Tensor, rank: int | None = None) -> None:
        """Write the tensor of ``rank`` (default: this one) to its places in ``full``."""
        for c in self.layout[self.rank if rank is None else rank]:
            full.narrow(self.dim, c.offset, c.size).copy_(
                local.narrow(self.dim, c.local_offset, c.size)
            )


def layout_from_sizes(sizes: Sequence[int]) -> tuple[tuple[Chunk, ...], ...]:
    """One contiguous chunk per rank: rank r holds ``sizes[r]`` rows after those of rank r-1."""
    layout, offset = [], 0
    for size in sizes:
        layout.append((Chunk(offset, size, 0),))
        offset += size
    return tuple(layout)


def layout_from_blocks(
    blocks: Sequence[tuple[Sequence[tuple[int, int]], int]],
) -> tuple[tuple[Chunk, ...], ...]:
    """Several blocks stacked in one tensor (fused QKV, fused gate and up).

    ``blocks``: for each block, (the (start, size) of each rank within the block, total rows).
    Equivalent to splitting every block by itself and concatenating per rank.
    """
    world = len(blocks[0][0])
    layout: list[tuple[Chunk, ...]] = []
    for rank in range(world):
        chunks, base, local = [], 0, 0
        for parts, total in blocks:
            start, size = parts[rank]
            chunks.append(Chunk(base + start, size, local))
            base, local = base + total, local + size
        layout.append(tuple(chunks))
    return tuple(layout)


def chunk_sizes(total: int, world: int) -> list[int]:
    """Rows per rank as ``torch.chunk`` and DTensor split: ceil-sized, the last ones shorter.

    5 over 2 gives [3, 2]; 5 over 4 gives [2, 2, 1, 0].
    """
    step = -(-total // world) if total else 0
    return [max(0, min(step, total - rank * step)) for rank in range(world)]


def balanced_sizes(total: int, world: int) -> list[int]:
    """Rows per rank that differ by at most one: 5 over 4 gives [2, 1, 1, 1]."""
    return [total // world + (rank < total % world) for rank in range(world)]


def attach_spec(tensor: torch.Tensor, spec: ShardSpec) -> None:
    """Hang ``spec`` on a parameter."""
    setattr(tensor, SPEC_ATTRIBUTE, spec)


def spec_of(tensor: torch.Tensor) -> ShardSpec | None:
    """The spec that hangs on ``tensor``, or None for one that tpkernels did not shard."""
    return getattr(tensor, SPEC_ATTRIBUTE, None)
