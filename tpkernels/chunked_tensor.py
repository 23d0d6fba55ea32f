"""``ChunkedTensor``: a rank's part of a tensor whose split DTensor's placements cannot express.

A fused QKV weight split by heads, key-value heads held by several ranks, 3 heads as (2, 1): the
local tensor is a stack of chunks of the global one (see :mod:`tpkernels.shard_spec`). The class
keeps the spec through ``detach``, ``to``, ``clone`` and ``zeros_like``, so that ``state_dict`` and
optimizer states carry it; it saves and reshards through ``torch.distributed.checkpoint``'s chunk
protocol; and it refuses what would silently treat one rank's part as the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.shard_spec import Chunk, ShardSpec, attach_spec, spec_of

_PLAIN = torch._C.DisableTorchFunctionSubclass
_KEEPS_SPEC = {  # same shape, same meaning: the result is the same part of another global tensor
    *(  # an update, a decayed or averaged gradient
        getattr(owner, name)
        for owner in (torch.Tensor, torch)
        for name in ("add", "sub", "mul", "div", "neg", "lerp", "addcmul", "addcdiv")
    ),
    torch.Tensor.detach,
    torch.Tensor.clone,
    torch.Tensor.contiguous,
    torch.Tensor.to,
    torch.Tensor.type,
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
    torch.Tensor.data.__get__,  # type: ignore[union-attr,attr-defined]
}
_KEEP_SPECS = {  # the same, of lists
    torch._foreach_add,
    torch._foreach_sub,
    torch._foreach_mul,
    torch._foreach_neg,
}
_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr,attr-defined]
_TRANSPOSES = {  # of two dimensions: the result is the same part of the transposed whole
    torch.t,
    torch.Tensor.t,
    torch.Tensor.T.__get__,  # type: ignore[union-attr,attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[union-attr,attr-defined]
}
_WANTS_ALL = {  # reductions and matrix products: a part's result is not the whole's; their names
    getattr(owner, name): f"{path}.{name}"
    for path, owner in (
        ("torch.nn.functional", torch.nn.functional),
        ("torch.linalg", torch.linalg),
        ("torch.Tensor", torch.Tensor),
        ("torch", torch),
    )
    for name in (
        *("norm", "vector_norm", "matrix_norm", "normalize", "renorm", "_foreach_norm"),
        *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "std_mean", "var_mean"),
        *("median", "nanmedian", "quantile", "logsumexp", "_foreach_max"),
        *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"),
        *("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"),
        *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "linear", "bilinear"),
        *("chain_matmul", "multi_dot", "svd", "svdvals", "qr"),
    )
    if hasattr(owner, name)
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
        if local.grad_fn is not None:
            tensor = local.as_subclass(ChunkedTensor)
        else:
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
        if func in _WANTS_ALL:
            cls._refuse(_WANTS_ALL[func], (*args, *(kwargs or {}).values()))
        with _PLAIN():
            result = func(*args, **(kwargs or {}))
            if func == _GRAD and type(result) is Tensor and result.grad_fn is None:
                # what optimizers derive from a gradient (momentum) is a part of a whole too
                result = args[0].grad = cls.wrap(result, args[0].spec)
        if func in _KEEPS_SPEC:
            return cls._like(result, next((a for a in args if isinstance(a, cls)), None))
        if func in _KEEP_SPECS:
            return [cls._like(*pair) for pair in zip(result, args[0], strict=True)]
        if func in _TRANSPOSES and result.dim() == 2:
            spec = args[0].spec
            return cls.wrap(
                result, ShardSpec(spec.global_shape[::-1], 1 - spec.dim, spec.layout, spec.rank)
            )
        return result

    @classmethod
    def _refuse(cls, name: str, values: Any) -> None:
        """Raise for the first of ``values``, or of lists among them, that is one of ours."""
        for value in values:
            if isinstance(value, (list, tuple)):
                cls._refuse(name, value)
            elif isinstance(value, cls):
                fix = (
                    "tpkernels.clip_grad_norm_(model, max_norm), which adds up the parts"
                    if "norm" in name
                    else "take the whole from tpkernels.full_state_dict(model); as an optimizer, "
                    "use an element-wise one such as torch.optim.AdamW"
                )
                raise UnsupportedModuleError(
                    f"this tensor is rank {value.spec.rank}'s part {tuple(value.shape)} of a "
                    f"parameter of global shape {value.spec.global_shape}, and {name} would see "
                    f"the part only. Fix: {fix} (or call .plain() where the part is what you mean)"
                )

    @classmethod
    def _like(cls, result: Any, source: Any) -> Any:
        """``result`` as the same part of another whole, if it is one."""
        if not isinstance(source, cls) or not isinstance(result, Tensor) or isinstance(result, cls):
            return result
        return cls.wrap(result, source.spec) if result.shape == source.shape else result

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

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The local size, as ``shape``; to the checkpoint's load planner, what was saved: all."""
        if dim is not None:
            return super().size(dim)
        if _called_from("torch.distributed.checkpoint.default_planner"):
            return torch.Size(self.spec.global_shape)
        return super().size()

    def data_ptr(self) -> int:
        """The address of the part; to those who would write it as the whole, none.

        The checkpoint's blocking stager then calls ``zeros_like``, which keeps the spec.
        """
        if _called_from("torch.distributed._state_dict_utils"):
            return 0
        if _called_from("safetensors.torch"):
            raise ShardedSaveError(
                f"safetensors would write rank {self.spec.rank}'s part {tuple(self.shape)} of a "
                f"parameter of shape {self.spec.global_shape} as the whole. Fix: save "
                "tpkernels.full_state_dict(model), or call model.save_pretrained"
            )
        return super().data_ptr()

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor; to the checkpoint's stager, which fills it and its spec, one of ours."""
        result = super().new_empty(*args, **kwargs)
        if _called_from("torch.distributed.checkpoint._state_dict_stager"):
            return Tensor._make_subclass(ChunkedTensor, result)
        return result

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


def _called_from(module: str) -> bool:
    """Whether the caller's caller is code of ``module``."""
    return sys._getframe(2).f_globals.get("__name__") == module
