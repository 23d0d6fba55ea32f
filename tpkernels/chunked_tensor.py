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
from tpkernels.shard_spec import ShardSpec, attach_spec, spec_of

_PLAIN = torch._C.DisableTorchFunctionSubclass


def _found(owners: tuple[tuple[str, Any], ...], *names: str) -> dict[Any, str]:
    """The functions of those names, and how to call them by name in a message."""
    return {
        getattr(owner, name): f"{path}.{name}"
        for path, owner in owners
        for name in names
        if hasattr(owner, name)
    }


_ANYWHERE = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.Tensor", torch.Tensor),
    ("torch", torch),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
)
_KEEPS_SPEC = {  # same shape, same meaning: the result is the same part of another global tensor
    *_found(  # an update, a decayed or averaged gradient
        _ANYWHERE[2:], "add", "sub", "mul", "div", "neg", "lerp", "addcmul", "addcdiv"
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
_ELEMENT_WISE = set(  # of a range of a flattened tensor: the result is the same range, likewise
    _found(
        _ANYWHERE,
        *("pow", "__pow__", "__rpow__", "__rsub__", "__rdiv__", "__rtruediv__", "square", "sqrt"),
        *("rsqrt", "reciprocal", "abs", "absolute", "sign", "exp", "expm1", "log", "log1p", "log2"),
        *("log10", "relu", "sigmoid", "tanh", "clamp", "clamp_min", "clamp_max", "clip"),
        *("maximum", "minimum", "nan_to_num", "true_divide", "fmax", "fmin", "fmod", "remainder"),
        *("isfinite", "isnan", "isinf", "isposinf", "isneginf", "isclose", "signbit", "sgn"),
        *("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater"),
        *("greater_equal", "logical_and", "logical_or", "logical_xor", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
        *("round", "floor", "ceil", "trunc", "frac", "floor_divide", "negative", "positive"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh"),
        *("atanh", "erf", "erfc", "erfinv", "exp2", "logit", "xlogy", "hypot", "copysign"),
        *("float_power", "logaddexp", "where", "masked_fill", "subtract", "multiply", "divide"),
        *("gelu", "silu", "elu", "softplus", "softsign", "logsigmoid", "leaky_relu", "hardtanh"),
        *("threshold", "dropout", "bernoulli"),
    )
    | _found(
        _ANYWHERE[2:3],
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__"),
        *("__xor__", "__invert__", "__abs__", "__pos__", "__mod__", "__floordiv__"),
        *("bool", "int", "long", "short", "char", "byte"),
    )
)
_FLATTENS = set(_found(_ANYWHERE[2:], "view", "reshape", "flatten", "ravel"))  # what is flat
_GRAD = torch.Tensor.grad  # the descriptor
_TRANSPOSES = {  # of two dimensions: the result is the same part of the transposed whole
    **_found(_ANYWHERE[2:], "t"),
    torch.Tensor.T.__get__: "torch.Tensor.T",  # type: ignore[union-attr,attr-defined]
    torch.Tensor.mT.__get__: "torch.Tensor.mT",  # type: ignore[union-attr,attr-defined]
}
_WANTS_ALL = _found(  # reductions and matrix products: a part's result is not the whole's
    _ANYWHERE,
    *("norm", "vector_norm", "matrix_norm", "normalize", "renorm", "_foreach_norm"),
    *("sum", "nansum", "mean", "nanmean", "prod", "std", "var", "std_mean", "var_mean"),
    *("median", "nanmedian", "quantile", "logsumexp", "_foreach_max"),
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"),
    *("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"),
    *("addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot", "linear", "bilinear"),
    *("chain_matmul", "multi_dot", "svd", "svdvals", "qr"),
)
_USES_A_WEIGHT = _found(  # what a module does with its weight, which a range of it cannot serve
    _ANYWHERE,
    *("embedding", "embedding_bag", "layer_norm", "rms_norm", "group_norm", "batch_norm"),
    *("instance_norm", "prelu", "scaled_dot_product_attention", "multi_head_attention_forward"),
    *("conv1d", "conv2d", "conv3d", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("transpose", "permute", "movedim", "adjoint", "outer"),
)
_SEES_A_PART = _found(  # of a range of a flattened tensor: it depends on the other elements too
    _ANYWHERE,
    *(name for name in dir(torch.nn.functional) if name.endswith("_loss")),
    *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    *("cosine_similarity", "pairwise_distance", "dist", "cdist", "pdist", "cov", "corrcoef"),
    *("softmax", "log_softmax", "softmin", "gumbel_softmax", "glu", "multinomial"),
    *("cumsum", "cumprod", "cumsum_", "cumprod_", "cummax", "cummin", "logcumsumexp"),
    *("trapz", "trapezoid", "cumulative_trapezoid", "diff", "gradient", "flip", "roll"),
    *("sort", "argsort", "msort", "topk", "kthvalue", "mode", "unique", "unique_consecutive"),
    *("histc", "histogram", "bincount", "searchsorted", "isin", "count_nonzero", "nonzero"),
    *("argwhere", "nonzero_static", "any", "all", "equal", "allclose", "diag", "diagflat"),
    *("kron", "cross", "vander", "combinations", "cartesian_prod", "block_diag"),
    *("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"),
)
_JOINS = _found(  # parts of several wholes, one after another: no part of anything
    _ANYWHERE[2:],
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
    "row_stack",
)
_FLAT_REFUSES = {**_USES_A_WEIGHT, **_SEES_A_PART, **_JOINS, **_TRANSPOSES}
_PICKS = set(  # one of the elements, or a tensor that has nothing to do with them
    _found(
        _ANYWHERE[2:],
        *("__getitem__", "select", "select_copy", "unbind", "unbind_copy", "squeeze", "squeeze_"),
        *("squeeze_copy", "index_select", "take", "gather", "narrow", "as_strided", "view_as"),
        *("reshape_as", "expand", "expand_as", "new", "new_tensor", "new_empty", "new_zeros"),
        *("new_empty_strided", "new_ones", "new_full"),
    )
)
_ZEROES = set(_found(_ANYWHERE[2:], "zero_", "_foreach_zero_"))
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward}
_SPLITS = {torch.chunk, torch.Tensor.chunk}  # how fully_shard starts to shard a parameter
_HANDLED = {  # all others, such as optimizers' in-place updates, run on the part as they are
    *_KEEPS_SPEC,
    *_KEEP_SPECS,
    *_ELEMENT_WISE,
    *_FLATTENS,
    *_WANTS_ALL,
    *_FLAT_REFUSES,
    *_ZEROES,
    *_SPLITS,
    *_GRADIENTS,
}


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
        if func not in _HANDLED:
            with _PLAIN():
                result = func(*args, **(kwargs or {}))
                if type(result) is cls:  # in place
                    return result
                first = result[0] if isinstance(result, tuple) and result else result
                if type(first) is not Tensor or first.dim() or func in _PICKS:
                    return result
                name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
                cls._refuse(name, (*args, *(kwargs or {}).values()), only_flat=True)
                return result
        if func in _SPLITS and isinstance(args[0], cls):
            raise UnsupportedModuleError(_cannot_shard_again(args[0].spec))
        if func in _GRADIENTS:
            return cls._gradients(func, *args, **(kwargs or {}))
        if func in _WANTS_ALL:
            cls._refuse(_WANTS_ALL[func], (*args, *(kwargs or {}).values()))
        elif func in _FLAT_REFUSES:
            cls._refuse(_FLAT_REFUSES[func], (*args, *(kwargs or {}).values()), only_flat=True)
        with _PLAIN():  # below, too: even .shape is slow without
            result = func(*args, **(kwargs or {}))
            if func in _ZEROES:
                zeroed = args[0] if args else next(iter((kwargs or {}).values()))
                for each in zeroed if isinstance(zeroed, (list, tuple)) else (zeroed,):
                    if isinstance(each, cls):
                        each.zeroed_version = each._version
                return result
            if func in _KEEP_SPECS:
                pairs = zip(result, args[0], strict=True)
                return [cls._like(*pair, func.__name__) for pair in pairs]
            if func in _TRANSPOSES and result.dim() == 2:
                return cls.wrap(result, args[0].spec.transposed())
            if func not in _KEEPS_SPEC and func not in _ELEMENT_WISE and func not in _FLATTENS:
                return result
            source = next((a for a in args if isinstance(a, cls)), None)
            if func not in _KEEPS_SPEC:
                if source is None or source.spec.dim is not None:
                    return result
                if func in _FLATTENS and result.shape != source.shape:
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
        if "norm" in name and name not in _USES_A_WEIGHT.values():
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
