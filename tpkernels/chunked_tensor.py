"""``ChunkedTensor``: a rank's part of a tensor whose split DTensor's placements cannot express.

A fused QKV weight split by heads, key-value heads held by several ranks, 3 heads as (2, 1): the
local tensor is a stack of chunks of the global one (see :mod:`tpkernels.shard_spec`). Or, under
ZeRO, a range of the flattened tensor: the local tensor is then 1-D, and possibly empty. The class
keeps the spec through ``detach``, ``to``, ``clone`` and ``zeros_like``, so that ``state_dict`` and
optimizer states carry it, and that of a range through any element-wise operation; it saves and
reshards through ``torch.distributed.checkpoint``'s chunk protocol; and it refuses what would
silently treat one rank's part as the whole.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.boxes import Box
from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.part_functions import (
    ELEMENT_WISE,
    FLAT_REFUSES,
    FLATTENS,
    GRADIENTS,
    HANDLED,
    KEEP_SPECS,
    KEEPS_SPEC,
    PICKS,
    SPLITS,
    TRANSPOSES,
    USES_A_WEIGHT,
    WANTS_ALL,
    ZEROES,
)
from tpkernels.shard_spec import ShardSpec, attach_spec, spec_of

_PLAIN = torch._C.DisableTorchFunctionSubclass
_GRAD = torch.Tensor.grad  # the descriptor


class ChunkedTensor(Tensor):
    """This rank's chunks, stacked; ``.shape`` is local, ``spec_of(t).whole_shape`` the whole."""

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
            tensor = Tensor._make_subclass(ChunkedTensor, local, local.requires_grad)
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

    zeroed_version = -1  # of it, right after the last zero_()

    # Optimizers read these of every parameter, several times a step: without __torch_function__.

    is_sparse = False

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, a part of a whole too, and so is what optimizers derive from it."""
        with _PLAIN():
            grad = _GRAD.__get__(self)  # type: ignore[union-attr,attr-defined]
            if type(grad) is Tensor and grad.grad_fn is None:
                grad = Tensor._make_subclass(ChunkedTensor, grad)
                attach_spec(grad, self.spec)  # its shape is this one's
                _GRAD.__set__(self, grad)  # type: ignore[union-attr,attr-defined]
            return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        with _PLAIN():
            _GRAD.__set__(self, grad)  # type: ignore[union-attr,attr-defined]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in HANDLED:
            with _PLAIN():
                result = func(*args, **(kwargs or {}))
                if type(result) is cls:  # in place
                    return result
                first = result[0] if isinstance(result, tuple) and result else result
                if type(first) is not Tensor or first.dim() or func in PICKS:
                    return result
                name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
                cls._refuse(name, (*args, *(kwargs or {}).values()), only_flat=True)
                return result
        if func in SPLITS and isinstance(args[0], cls):
            raise UnsupportedModuleError(_cannot_shard_again(args[0].spec))
        if func in GRADIENTS:
            return cls._gradients(func, *args, **(kwargs or {}))
        if func in WANTS_ALL:
            cls._refuse(WANTS_ALL[func], (*args, *(kwargs or {}).values()))
        elif func in FLAT_REFUSES:
            cls._refuse(FLAT_REFUSES[func], (*args, *(kwargs or {}).values()), only_flat=True)
        with _PLAIN():  # below, too: even .shape is slow without
            result = func(*args, **(kwargs or {}))
            if func in ZEROES:
                zeroed = args[0] if args else next(iter((kwargs or {}).values()))
                for each in zeroed if isinstance(zeroed, (list, tuple)) else (zeroed,):
                    if isinstance(each, cls):
                        each.zeroed_version = each._version
                return result
            if func in KEEP_SPECS:
                pairs = zip(result, args[0], strict=True)
                return [cls._like(*pair, func.__name__) for pair in pairs]
            if func in TRANSPOSES and result.dim() == 2:
                return cls.wrap(result, args[0].spec.transposed())
            if func not in KEEPS_SPEC and func not in ELEMENT_WISE and func not in FLATTENS:
                return result
            source = next((a for a in args if isinstance(a, cls)), None)
            if func not in KEEPS_SPEC:
                if source is None or source.spec.dim is not None:
                    return result
                if func in FLATTENS and result.shape != source.shape:
                    return result
            return cls._like(result, source, func.__name__)

    @classmethod
    def _gradients(cls, func: Any, outputs: Any, inputs: Any = None, **settings: Any) -> Any:
        """``torch.autograd.grad`` or ``backward``: of what was computed with the parts."""
        with _PLAIN():
            of = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else (*inputs,)
            parts = [each for each in of if isinstance(each, cls) and each.spec.dim is None]
            nodes = _nodes_behind(outputs) if parts else set()
            leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
            for part in parts:
                if id(part) not in leaves and part.grad_fn not in nodes:
                    raise UnsupportedModuleError(
                        f"torch.autograd.{func.__name__} with respect to "
                        f"{part._described('global shape')}: the graph holds the gathered "
                        "parameters, not the parts, and the gradients of whole parameters are "
                        "reduced into p.grad by loss.backward(). Fix: loss.backward(), then "
                        "p.grad; for a gradient with respect to inputs, pass the inputs"
                    )
            results = func(outputs, inputs=inputs, **settings)
            if results is None:
                return None
            return tuple(
                cls.wrap(result, given.spec)
                if isinstance(given, cls) and result is not None and result.shape == given.shape
                else result
                for result, given in zip(results, of, strict=True)
            )

    @classmethod
    def _refuse(cls, name: str, values: Any, only_flat: bool = False) -> None:
        """Raise for the first of ``values``, or of lists among them, that is one of ours."""
        for value in values:
            if isinstance(value, (list, tuple)):
                cls._refuse(name, value, only_flat)
            elif isinstance(value, cls) and (value.spec.dim is None or not only_flat):
                value.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Raise because ``name`` would take this part for the whole, with the fix."""
        if "norm" in name and name not in USES_A_WEIGHT.values():
            fix = "tpkernels.clip_grad_norm_(model, max_norm), which adds up the parts"
        elif self.spec.dim is None:
            fix = (
                "this weight is gathered only while its unit runs: wrap the code in `with "
                "manager.gathered(module):`, call model(x) and not model.forward(x), or make the "
                "module that uses it the unit; as an optimizer, use an element-wise one such as "
                "torch.optim.AdamW; for the norm of all gradients, tpkernels.clip_grad_norm_"
            )
        else:
            fix = (
                "take the whole from tpkernels.full_state_dict(model); as an optimizer, use an "
                "element-wise one such as torch.optim.AdamW"
            )
        raise UnsupportedModuleError(
            f"this tensor is {self._described('global shape')}, and {name} would see the part "
            f"only. Fix: {fix} (or call .plain() where the part is what you mean)"
        )

    def _described(self, shape: str) -> str:
        spec = self.spec
        over = f", sharded over {spec.mesh_dim!r}" if spec.dim is None else ""
        return (
            f"rank {spec.rank}'s part {spec.local_shape} of a parameter of {shape} "
            f"{spec.whole_shape}{over}"
        )

    @classmethod
    def _like(cls, result: Any, source: Any, name: str) -> Any:
        """``result`` as the same part of another whole, if it is one."""
        if not isinstance(source, cls) or not isinstance(result, Tensor) or isinstance(result, cls):
            return result
        if result.shape == source.shape:
            return cls.wrap(result, source.spec)
        if source.spec.dim is None:  # broadcast with activations: a weight outside its forward
            source.refuse(f"torch.{name}")
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
            f"this tensor is {self._described('shape')}; saving it would lose the other ranks' "
            "parts. Fix: torch.save(tpkernels.full_state_dict(model), path), of an optimizer "
            "tpkernels.full_optimizer_state_dict(model, optimizer), or save every rank's part with "
            "torch.distributed.checkpoint.save(model.state_dict(), ...)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.spec
        how = "flattened" if spec.dim is None else f"dim {spec.dim}"
        return (
            f"ChunkedTensor(rank {spec.rank} holds {tuple(self.shape)} of {spec.whole_shape}, "
            f"{how})"
        )

    # --- torch.distributed.checkpoint's protocol (_Checkpointable) ---

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The local size, as ``shape``; to the checkpoint's load planner, what was saved: all."""
        if dim is not None:
            return super().size(dim)
        if _called_from("torch.distributed.checkpoint.default_planner"):
            return torch.Size(self.spec.whole_shape)
        return super().size()

    def data_ptr(self) -> int:
        """The address of the part; to those who would write it as the whole, none.

        The checkpoint's blocking stager then calls ``zeros_like``, which keeps the spec.
        """
        if _called_from("torch.distributed._state_dict_utils"):
            return 0
        if _called_from("safetensors.torch"):
            raise ShardedSaveError(
                f"safetensors would write {self._described('shape')} as the whole. Fix: save "
                "tpkernels.full_state_dict(model), or call model.save_pretrained"
            )
        return super().data_ptr()

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor; to the checkpoint's stager, which fills it and its spec, one of ours."""
        result = super().new_empty(*args, **kwargs)
        if _called_from("torch.distributed.checkpoint._state_dict_stager"):
            return Tensor._make_subclass(ChunkedTensor, result)
        return result

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        whole = torch.Size(self.spec.whole_shape)
        places = [_place(box) for box in self.spec.boxes() if not box.written_elsewhere]
        if whole.numel() == 0:  # no rank holds any of it, and yet its key must be found again
            places = [_place(Box((0,) * len(whole), tuple(whole), 0, None, ()))]
        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, place.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=place, properties=properties, size=whole),
            )
            for place in places
        ]

    def __create_chunk_list__(self) -> list[Any]:
        return [_place(box) for box in self.spec.boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        local = self.plain().detach()
        for box in self.spec.boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                return box.view(local)
        if 0 in self.spec.whole_shape:
            return local.new_empty(self.spec.whole_shape)
        raise ConfigError(f"rank {self.spec.rank} holds no chunk at offset {index.offset}")


def _place(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _nodes_behind(outputs: Any) -> set[Any]:
    """Every node of the graph that ``outputs`` were computed by."""
    nodes: set[Any] = set()
    ends = (outputs,) if isinstance(outputs, Tensor) else outputs
    waiting = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in ends]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [behind for behind, _ in node.next_functions]
    return nodes


def _cannot_shard_again(spec: ShardSpec) -> str:
    if spec.dim is None:
        return (
            f"a parameter of global shape {spec.whole_shape} is already sharded over "
            f"{spec.mesh_dim!r}, and fully_shard would shard the shards. Fix: use one of "
            "tpkernels.zero and fully_shard for a module"
        )
    return (
        f"a parameter of global shape {spec.whole_shape} is split by heads or in several chunks "
        "over 'tp', which fully_shard cannot express: it would save and load one tp rank's "
        "weights for all. Fix: leave this module out of fully_shard (its ignored_params), or make "
        "the split even (separate q/k/v projections and heads divisible by the tp size)"
    )


def local_values(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be split, as an ordinary one; not differentiable.

    The same memory: of a DTensor its local tensor, of a :class:`ChunkedTensor` its part.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.plain() if isinstance(tensor, ChunkedTensor) else tensor


def _called_from(module: str) -> bool:
    """Whether the caller's caller is code of ``module``."""
    return sys._getframe(2).f_globals.get("__name__") == module
