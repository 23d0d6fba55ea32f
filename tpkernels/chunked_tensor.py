"""``ChunkedTensor``: a rank's part of a tensor whose split DTensor's placements cannot express.

A fused QKV weight split by heads, key-value heads held by several ranks, 3 heads as (2, 1): the
local tensor is a stack of chunks of the global one (see :mod:`tpkernels.shard_spec`). The class
keeps the spec through ``detach``, ``to``, ``clone`` and ``zeros_like``, so that ``state_dict`` and
optimizer states carry it; it saves and reshards through ``torch.distributed.checkpoint``'s chunk
protocol; and it refuses what would silently treat one rank's part as the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.shard_spec import Chunk, ShardSpec, attach_spec, spec_of

_PLAIN = torch._C.DisableTorchFunctionSubclass
_KEEPS_SPEC = {  # same shape, same meaning: the result is the same part of another global tensor
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.pin_memory,
    torch.Tensor.requires_grad_,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.clone,
    torch.detach,
}
_SPLITS = {torch.chunk, torch.Tensor.chunk}  # how fully_shard starts to shard a parameter


class ChunkedTensor(Tensor):
    """This rank's chunks, stacked; ``.shape`` is local, ``spec_of(t).global_shape`` the whole."""

    @staticmethod
    def wrap(local: Tensor, spec: ShardSpec) -> ChunkedTensor:
        """``local`` (not copied) as the part that ``spec`` says this rank holds."""
        if tuple(local.shape) != spec.local_shape:
            raise ConfigError(
                f"rank {spec.rank} holds {spec.local_shape} of {spec.global_shape}, "
                f"got a tensor of {tuple(local.shape)}"
            )
        tensor = Tensor._make_subclass(ChunkedTensor, local.detach(), local.requires_grad)
        attach_spec(tensor, spec)
        return tensor

    @property
    def spec(self) -> ShardSpec:
        """Which part of which global tensor this is."""
        spec = spec_of(self)
        assert spec is not None
        return spec

    def plain(self) -> Tensor:
        """The local tensor as an ordinary one, sharing storage; differentiable."""
        with _PLAIN():
            return self.view_as(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SPLITS and isinstance(args[0], cls):
            raise UnsupportedModuleError(
                f"a parameter of global shape {args[0].spec.global_shape} is split by heads or in "
                "several chunks over 'tp', which fully_shard cannot express: it would save and "
                "load one tp rank's weights for all. Fix: leave this module out of fully_shard "
                "(its ignored_params), or make the split even (separate q/k/v projections and "
                "heads divisible by the tp size)"
            )
        with _PLAIN():
            result = func(*args, **(kwargs or {}))
        if func in _KEEPS_SPEC and isinstance(result, Tensor) and not isinstance(result, cls):
            source = next((a for a in args if isinstance(a, cls)), None)
            if source is not None and result.shape == source.shape:
                wrapped = cls.wrap(result, source.spec)
                return wrapped
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> ChunkedTensor:
        if id(self) in memo:
            return memo[id(self)]
        with _PLAIN():
            copied = ChunkedTensor.wrap(self.detach().clone(), self.spec)
            copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedSaveError(
            f"this tensor is rank {self.spec.rank}'s part {tuple(self.shape)} of a parameter of "
            f"shape {self.spec.global_shape}; saving it would lose the other ranks' parts. Fix: "
            "torch.save(tpkernels.full_state_dict(model), path), or save every rank's part with "
            "torch.distributed.checkpoint.save(model.state_dict(), ...)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.spec
        return (
            f"ChunkedTensor(rank {spec.rank} holds {tuple(self.shape)} of {spec.global_shape}, "
            f"dim {spec.dim})"
        )

    # --- torch.distributed.checkpoint's protocol (_Checkpointable) ---

    def _place(self, chunk: Chunk) -> tuple[torch.Size, torch.Size]:
        offsets, sizes = [0] * self.dim(), list(self.spec.global_shape)
        offsets[self.spec.dim], sizes[self.spec.dim] = chunk.offset, chunk.size
        return torch.Size(offsets), torch.Size(sizes)

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk in self.spec.chunks:
            offsets, sizes = self._place(chunk)
            if chunk.size == 0:
                continue
            items.append(
                WriteItem(
                    index=MetadataIndex(fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                        properties=TensorProperties.create_from_tensor(self.plain()),
                        size=torch.Size(self.spec.global_shape),
                    ),
                )
            )
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        places = [self._place(chunk) for chunk in self.spec.chunks if chunk.size]
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets, sizes in places]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for chunk in self.spec.chunks:
            if index.offset is None or index.offset[self.spec.dim] == chunk.offset:
                return self.plain().detach().narrow(self.spec.dim, chunk.local_offset, chunk.size)
        raise ConfigError(f"rank {self.spec.rank} holds no chunk at offset {index.offset}")
