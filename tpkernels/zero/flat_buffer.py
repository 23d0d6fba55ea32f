"""``FlatBuffer``: parameters gathered and freed together, whole as views of one flat tensor.

A rank keeps its shard in the master dtype for good; the whole exists while the unit needs it.
The whole parameters are leaves of autograd that live as long as the model: gathering gives their
memory back to the one storage that they, and every view autograd saved of them, share.

    master shard [S]   --cast, in place-->   own slot of whole [R * S]   --all-gather-->   whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels.chunked_tensor import ChunkedTensor, local_values
from tpkernels.comm.group import Group
from tpkernels.shard_spec import ShardSpec, attach_spec, copied_spec, spec_from_dtensor, spec_of
from tpkernels.zero.buffer_pool import BufferPool
from tpkernels.zero.layout import FlatLayout, flat_layout

Owner = tuple[nn.Module, str]  # a module and the name of its parameter


@dataclass
class Slot:
    """One parameter of a flat buffer.

    Attributes:
        name: its qualified name in the model (the first one, if it is tied).
        owners: every (module, attribute) that holds it.
        whole: the leaf that computes; its memory is there only while the unit is gathered.
        shard: what the optimizer and ``state_dict`` see, a 1-D view of the master shard.
    """

    name: str
    owners: list[Owner]
    whole: nn.Parameter
    shard: nn.Parameter
    hidden: list[Tensor]  # tensors whose version says whether the memory is there
    versions: list[int]
    place: Tensor  # where the whole is gathered, whatever a user made of `whole`


class FlatBuffer:
    """Parameters of one compute dtype that are all trained or all frozen.

    Args:
        parameters: (name, parameter, owners) of each; moved into this buffer.
        group: the ranks it is sharded over.
        compute_dtype: of the whole.
        master_dtype: of the shard that the optimizer steps.
        device: where the whole is; ``master_device`` where the shard is (CPU when offloaded).
        copies: the tensor-parallel ranks, which hold whole what they did not split, or None.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor, list[Owner]]],
        group: Group,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
        master_device: torch.device,
        pin_memory: bool = False,
        copies: Group | None = None,
    ) -> None:
        self.group, self._copies = group, copies
        self.trains = parameters[0][1].requires_grad
        shapes = [local_values(parameter).shape for _, parameter, _ in parameters]
        self.layout: FlatLayout = flat_layout(shapes, compute_dtype.itemsize, group.size)
        size = self.layout.shard_numel
        self.master = torch.zeros(
            size, dtype=master_dtype, device=master_device, pin_memory=pin_memory
        )
        self.gradient: Tensor | None = None  # of the shard; allocated with the first one
        # The storage is made full-sized by `allocate`; views may lie over it before that.
        self.whole = torch.empty(0, dtype=compute_dtype, device=device)
        self._storage = self.whole.untyped_storage()
        self._storage.resize_(self.nbytes)
        self.whole = self.whole.set_(self._storage, 0, (self.layout.numel,))  # type: ignore[call-overload]
        self.slots = [self._slot(index, *each) for index, each in enumerate(parameters)]
        self.is_allocated = True
        self.free()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.layout.numel * self.whole.element_size()

    @property
    def own(self) -> Tensor:
        """This rank's slot of the whole, [S]."""
        size = self.layout.shard_numel
        return self.whole.data[self.group.rank * size : (self.group.rank + 1) * size]

    def allocate(self, pool: BufferPool, owner: Any = None) -> None:
        """Give the whole memory of ``pool`` that ``owner`` may use (contents undefined)."""
        if not self.is_allocated:
            pool.fill(self.whole, self.nbytes, owner)
            self._set_versions(0)
            self.is_allocated = True

    def free(self, pool: BufferPool | None = None, owner: Any = None, lost: bool = False) -> None:
        """Take the memory of the whole; backward through it is an error from here on.

        ``lost``: it is never used again (:meth:`BufferPool.lose`).
        """
        if self.is_allocated:
            # Autograd compares versions before it hands out a saved tensor: a use of memory that
            # is not there raises instead of crashing.
            for slot in self.slots:
                slot.versions = [tensor._version for tensor in slot.hidden]
            self._set_versions(1)
            if pool is None:
                self._storage.resize_(0)
            elif lost:
                pool.lose(self.whole)
            else:
                pool.empty(self.whole, owner)
            self.is_allocated = False

    def outdate(self) -> None:
        """The weights changed: backward through what was computed before is an error."""
        for slot in self.slots:
            now = [t._version for t in slot.hidden] if self.is_allocated else slot.versions
            slot.versions = [version + 1 for version in now]
        self._set_versions(0 if self.is_allocated else 1)

    def _set_versions(self, ahead: int) -> None:
        tensors = tuple(tensor for slot in self.slots for tensor in slot.hidden)
        versions = tuple(version + ahead for slot in self.slots for version in slot.versions)
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Each parameter's part of ``flat`` [P], in its shape."""
        for shape, offset in zip(self.layout.shapes, self.layout.offsets, strict=True):
            numel = torch.Size(shape).numel()
            yield flat[offset : offset + numel].view(shape)

    def shard_range(self, index: int) -> slice:
        """Where parameter ``index`` lies in this rank's shard."""
        rank = self.group.rank
        start = self.layout.shard_start(index, rank)
        return slice(start, start + self.layout.chunk(index, rank).size)

    def _slot(self, index: int, name: str, dense: Tensor, owners: list[Owner]) -> Slot:
        local = local_values(dense).detach()
        chunk = self.layout.chunk(index, self.group.rank)
        part = self.master[self.shard_range(index)]
        if not local.is_meta:
            part.copy_(local.reshape(-1)[chunk.offset : chunk.offset + chunk.size])
        offset = self.layout.offsets[index]
        # .data: each with a version counter of its own
        view = self.whole.data[offset : offset + local.numel()].view(local.shape)
        whole = _like(dense, view)
        shard = nn.Parameter(
            ChunkedTensor.wrap(part, self._spec(index, dense)), requires_grad=dense.requires_grad
        )
        attach_spec(shard, self._spec(index, dense))
        for key, value in dense.__dict__.items():  # what users hang on their parameters
            if key not in shard.__dict__ and not key.startswith("_tpkernels"):
                setattr(shard, key, value)
                setattr(whole, key, value)
        inner = whole._local_tensor if isinstance(whole, DTensor) else whole
        return Slot(name, owners, whole, shard, [inner], [inner._version], view.data)

    def _spec(self, index: int, dense: Tensor) -> ShardSpec:
        world = self.group.size
        return ShardSpec(
            self.layout.shapes[index],
            None,
            tuple((self.layout.chunk(index, rank),) for rank in range(world)),
            self.group.rank,
            self.group.mesh_dim,
            group_name=self.group.name,
            within=self._within(dense),
        )

    def _within(self, dense: Tensor) -> ShardSpec | None:
        """What the parameter is to tensor parallelism: a part, or one of several copies."""
        if isinstance(dense, DTensor):
            return spec_from_dtensor(dense)
        if (spec := spec_of(dense)) is not None or self._copies is None:
            return spec
        tp = self._copies
        return copied_spec(dense.shape, tp.size, tp.rank, tp.mesh_dim, tp.name)


class _Whole(nn.Parameter):
    """A whole parameter that somebody may still hold, and print, when its memory is gone."""

    def __repr__(self) -> str:  # type: ignore[override]
        if self.numel() and not self.untyped_storage().nbytes():
            return f"Parameter(whole {tuple(self.shape)}, {self.dtype}, which is not gathered now)"
        return f"Parameter containing:\n{self.detach()!r}"


def _like(dense: Tensor, view: Tensor) -> nn.Parameter:
    """A leaf over ``view`` that is to tensor parallelism what ``dense`` was."""
    data = view
    if isinstance(dense, DTensor):
        data = DTensor.from_local(
            view,
            dense.device_mesh,
            dense.placements,
            run_check=False,
            shape=dense.shape,
            stride=dense.stride(),
        )
    elif isinstance(dense, ChunkedTensor):
        data = ChunkedTensor.wrap(view, dense.spec)
    whole = _Whole(data, requires_grad=dense.requires_grad)
    if (spec := spec_of(dense)) is not None:
        attach_spec(whole, spec)
    return whole
