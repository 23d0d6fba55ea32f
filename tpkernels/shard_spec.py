"""``ShardSpec``: how a parameter says which part of which global tensor it holds.

The one truth for checkpoints, ``full_state_dict``, gradient clipping and reports. It hangs on
every parameter that tpkernels sharded, and on replicated ones whose split would be ambiguous.

A rank's local tensor is a stack, along ``dim``, of one or more *chunks* of the global tensor:

    global (fused QKV, dim 0)    [ q0 q1 | k0 k1 | v0 v1 ]
    rank 0 of 2, local           [ q0 | k0 | v0 ]        3 chunks
    rank 1 of 2, local           [ q1 | k1 | v1 ]

With ``dim=None`` the chunks are ranges of the flattened tensor, and the local tensor is 1-D: so
ZeRO cuts a flat buffer that holds many parameters without regard to where their rows end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tpkernels.boxes import Box, boxes_of
from tpkernels.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SPEC_ATTRIBUTE = "_tpkernels_shard_spec"


@dataclass(frozen=True)
class Chunk:
    """``size`` rows of the global tensor along the split dimension, or elements of it flattened.

    They start at ``offset`` in the global tensor and at ``local_offset`` in this rank's tensor.
    """

    offset: int
    size: int
    local_offset: int


@dataclass(frozen=True)
class ShardSpec:
    """What one rank holds of a global tensor, and what its peers hold.

    Attributes:
        global_shape: shape of the tensor that is split.
        dim: the dimension that is split; None: chunks are ranges of the flattened (row-major)
            tensor, and the local tensor is 1-D.
        layout: for every rank of the group, the chunks it holds; equal on all ranks.
        rank: this rank's number within the group.
        mesh_dim: name of the mesh dimension it is split over (``"tp"``), for reports.
        within: the tensor split here is itself this rank's part of a larger one (its
            ``local_shape`` is our ``global_shape``): split over tp, then over dp_shard.
        group_name: the process group whose ranks hold the parts; ``""``: unknown, or a group of
            one. Its names are those of a run, so it is neither compared nor pickled.
    """

    global_shape: tuple[int, ...]
    dim: int | None
    layout: tuple[tuple[Chunk, ...], ...]
    rank: int
    mesh_dim: str = "tp"
    within: ShardSpec | None = None
    group_name: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.within is not None and self.within.local_shape != self.global_shape:
            raise ConfigError(
                f"global_shape={self.global_shape} must be within.local_shape="
                f"{self.within.local_shape}, the part that is split again"
            )

    @property
    def levels(self) -> Iterator[ShardSpec]:
        """This split, the one it is within, and so on outwards."""
        spec: ShardSpec | None = self
        while spec is not None:
            yield spec
            spec = spec.within

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the outermost tensor, of which ``global_shape`` is a part."""
        return self.global_shape if self.within is None else self.within.whole_shape

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
        held = self.rows_of(rank)
        if self.dim is None:
            return (held,)
        return (*self.global_shape[: self.dim], held, *self.global_shape[self.dim + 1 :])

    @property
    def rows(self) -> int:
        """How many rows are split: the size along ``dim``, or all elements."""
        return math.prod(self.global_shape) if self.dim is None else self.global_shape[self.dim]

    def rows_of(self, rank: int) -> int:
        """How many of them ``rank`` holds."""
        return sum(chunk.size for chunk in self.layout[rank])

    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the whole tensor that this rank holds, through all levels."""
        return boxes_of(self)

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
        return sum(self.rows_of(rank) for rank in range(len(self.layout))) > self.rows

    @property
    def is_copied(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(self.rows_of(rank) == self.rows for rank in range(len(self.layout)))

    def replicas(self, chunk: Chunk) -> int:
        """How many ranks of the group hold this chunk."""
        return len(self.owners(chunk.offset)) if chunk.size else 1

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's tensor, a contiguous copy, from the one of ``global_shape``."""
        if tuple(full.shape) != self.global_shape:
            raise ConfigError(
                f"expected a full tensor of shape {self.global_shape}, got {tuple(full.shape)}"
            )
        rows = full.reshape(-1) if self.dim is None else full
        pieces = [rows.narrow(self.dim or 0, c.offset, c.size) for c in self.chunks]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, self.dim or 0) if pieces else full.new_empty(self.local_shape)

    def put(self, local: torch.Tensor, full: torch.Tensor, rank: int | None = None) -> None:
        """Write the tensor of ``rank`` (default: this one) to its places in ``full``.

        ``full`` must be contiguous where ``dim`` is None.
        """
        rows, dim = (full.view(-1), 0) if self.dim is None else (full, self.dim)
        for c in self.layout[self.rank if rank is None else rank]:
            rows.narrow(dim, c.offset, c.size).copy_(local.narrow(dim, c.local_offset, c.size))

    def transposed(self) -> ShardSpec:
        """The same split of the transposed tensor, of two dimensions and split along one."""
        assert self.dim is not None
        return replace(
            self,
            global_shape=self.global_shape[::-1],
            dim=1 - self.dim,
            within=None if self.within is None else self.within.transposed(),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self  # immutable, and it keeps its group's name

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group_name": ""}  # another run's group may have that name


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


def layout_from_flat_buffer(
    start: int, numel: int, shard: int, world: int
) -> tuple[tuple[Chunk, ...], ...]:
    """The ranges of a parameter in a flat buffer of which rank r holds [r * shard, (r+1) * shard).

    Its ``numel`` elements begin at element ``start`` of the buffer. A rank that holds none of them
    has no chunk; a local tensor begins at the first element that the rank holds.
    """
    layout: list[tuple[Chunk, ...]] = []
    for rank in range(world):
        low = max(start, rank * shard) - start
        high = min(start + numel, (rank + 1) * shard) - start
        layout.append((Chunk(low, high - low, 0),) if high > low else ())
    return tuple(layout)


def copied_spec(
    shape: Sequence[int],
    world: int,
    rank: int,
    mesh_dim: str = "tp",
    group_name: str = "",
    within: ShardSpec | None = None,
) -> ShardSpec | None:
    """The spec of a tensor that each of ``world`` ranks holds whole; None for one of 0 dimensions.

    Give it as ``within`` to what is split further: its ranks need not cut it alike (a flat buffer
    that holds uneven parts too is cut elsewhere on each), and yet it is saved and counted once.
    """
    if not shape:
        return None
    layout = ((Chunk(0, shape[0], 0),),) * world
    return ShardSpec(tuple(shape), 0, layout, rank, mesh_dim, within, group_name)


def spec_from_dtensor(tensor: DTensor) -> ShardSpec | None:
    """The spec that says what a DTensor's placements say, split over one mesh dimension.

    Dimensions of one rank, and ``Replicate`` beside a ``Shard``, are left out; replicated over
    all, it is a :func:`copied_spec` for each of them.

    Raises:
        ConfigError: ``Shard`` on several mesh dimensions, or a placement that is neither.
    """
    from torch.distributed.tensor import Shard

    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    split = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if mesh.size(dim) > 1 and not placement.is_replicate()
    ]
    if len(split) > 1 or any(type(tensor.placements[dim]) is not Shard for dim in split):
        raise ConfigError(
            f"a DTensor of shape {tuple(tensor.shape)} has placements {tensor.placements} over "
            f"mesh dimensions {names}; allowed: Shard on one of them, Replicate on the others. "
            "Fix: shard it over one mesh dimension, for example by tpkernels.parallelize alone"
        )
    if not split:
        copied: ShardSpec | None = None
        for dim in range(mesh.ndim):
            copied = copied_spec(
                tensor.shape,
                mesh.size(dim),
                mesh.get_local_rank(dim),
                names[dim] if names else "tp",
                str(mesh.get_group(dim).group_name),
                copied,
            )
        return copied
    (mesh_dim_number,) = split
    dim = tensor.placements[mesh_dim_number].dim % tensor.dim()  # type: ignore[attr-defined]
    return ShardSpec(
        tuple(tensor.shape),
        dim,
        layout_from_sizes(chunk_sizes(tensor.shape[dim], mesh.size(mesh_dim_number))),
        mesh.get_local_rank(mesh_dim_number),
        names[mesh_dim_number] if names else "tp",
        group_name=str(mesh.get_group(mesh_dim_number).group_name),
    )


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
