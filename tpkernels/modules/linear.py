"""``ColumnParallelLinear`` and ``RowParallelLinear``: a linear layer split over ranks.

    Y = X A^T + b      column: A's rows (out features) are split, every rank has all of X
                       row:    A's columns (in features) are split, X arrives split

The names and the roles are Megatron's (arXiv:1909.08053).
"""

# K in features, N out features, R ranks

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.comm.regions import gather_from_tensor_model_parallel_region as gather_from_region
from tpkernels.comm.regions import scatter_to_tensor_model_parallel_region as scatter_to_region
from tpkernels.comm.rng import rejoin_shared_stream
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.library import DTYPES
from tpkernels.modules.class_swap import is_swapped, swap_class
from tpkernels.modules.joint_projection import JointProjection
from tpkernels.modules.parameters import (
    layout_spec,
    local_part,
    local_tensor,
    shard_parameter_,
    split_spec,
)
from tpkernels.modules.sequence import SEQUENCE, SequenceShards, active, shards_of
from tpkernels.modules.style import SwapStyle
from tpkernels.overlap import (
    all_gather_gemm,
    column_gemm_act,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from tpkernels.overlap.replicated import sum_replicated_gradient
from tpkernels.reference.activation import check_activation
from tpkernels.shard_spec import Chunk, chunk_sizes, spec_of


class _ParallelLinear(nn.Module):
    """What both splits share. ``transposed``: the weight is stored [K, N] (GPT-2's Conv1D)."""

    group: Group
    layer: str = ""
    """Its path in the model, for errors and traces."""
    sequence: SequenceShards | None = None
    """How the sequence is sharded outside the tensor-parallel region; None: it is not."""
    in_features: int
    out_features: int
    transposed: bool = False
    check: InputCheck
    _split: str

    def _init_parallel(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: GroupLike,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number, at least 0")
        dense = nn.Linear(in_features, out_features, bias, device, dtype)
        self.group = resolve_group(group)
        self.in_features, self.out_features = in_features, out_features
        self.weight, self.bias = dense.weight, dense.bias
        self.check = InputCheck()

    @property
    def _out_dim(self) -> int:
        return 1 if self.transposed else 0

    def local_weight(self) -> Tensor:
        """This rank's weight as [N_r, K] (column) or [N, K_r] (row); a view, differentiable."""
        weight = self._local("weight", self.weight)
        return weight.t() if self.transposed else weight

    def local_bias(self) -> Tensor | None:
        """This rank's bias, or None."""
        bias = self.bias
        if bias is None:
            return None
        if self._split == "row":
            return local_tensor(bias)  # replicated
        return self._local("bias", bias)

    def _local(self, name: str, parameter: Tensor) -> Tensor:
        part = local_part(parameter, self.group, name, self)
        if not torch.is_grad_enabled():
            return part
        return sum_replicated_gradient(part, spec_of(parameter), self.group.name)

    def _check_input(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ConfigError(f"{type(self).__name__}: input must be a Tensor, got {type(x)}")
        what = f"{type(self).__name__} {self.extra_repr()}"
        shards = active(self.sequence)
        if shards is None or self._split == "row":
            self.check({"input": x}, self.group, what)
        else:
            shards.check(x, self.check, self.group, what)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"{self._split} split, rank {self.group.rank} of {self.group.size}"
        )


def _check_reduce_dtype(reduce_dtype: torch.dtype | None) -> None:
    if reduce_dtype is not None and reduce_dtype not in DTYPES:
        raise ConfigError(
            f"reduce_dtype={reduce_dtype!r} cannot hold the sums; "
            f"allowed: None, {', '.join(map(str, DTYPES))}"
        )


def linear_sizes(owner: nn.Module, path: str, name: str) -> tuple[int, int]:
    """(in, out) features of the dense linear layer at ``path`` of ``owner``; ``name`` is owner's.

    Raises:
        UnsupportedModuleError: there is none; so that an owner checks all before it changes any.
    """
    try:
        leaf = owner.get_submodule(path)
    except AttributeError:
        children = ", ".join(child for child, _ in owner.named_children())
        raise UnsupportedModuleError(
            f"{name}: there is no module {path!r}. Fix: name one of its own: {children or 'none'}"
        ) from None
    if is_swapped(leaf):
        raise UnsupportedModuleError(f"{name}.{path} is already tensor-parallel")
    in_features, out_features, _ = _leaf_features(leaf, f"{name}.{path}")
    return in_features, out_features


def _leaf_features(module: nn.Module, name: str) -> tuple[int, int, bool]:
    """(in, out, transposed) of an ``nn.Linear`` or a Conv1D-like layer."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedModuleError(
            f"{name}: {type(module).__name__} has no floating-point 2-D weight to split. "
            "Fix: leave it out of the plan"
        )
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, False
    if hasattr(module, "nf"):  # transformers' Conv1D stores [K, N]
        return weight.shape[0], weight.shape[1], True
    raise UnsupportedModuleError(
        f"{name}: {type(module).__name__} is neither nn.Linear nor Conv1D. Fix: leave it out"
    )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose out features are split: rank r computes its part of Y.

    Equivalent to ``act(F.linear(x, weight, bias))`` of the whole layer, of which this rank
    returns [..., N_r] (or all, with ``gather_output``).

    Args:
        in_features, out_features: K and N of the whole layer; N need not divide by the ranks
            (5 over 2 gives 3 and 2).
        bias: whether there is one; it is split like the weight.
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.
        gather_output: return the whole [..., N] on every rank (one all-gather).
        activation: fused into the GEMM's epilogue (none, gelu, gelu_tanh, silu, relu, relu2).
        sequence_parallel: the input is this rank's shard [..., s_r, K] of the sequence and is
            gathered for the GEMM; a :class:`SequenceShards` says how many tokens each rank holds
            (True: all as many).
        device, dtype: as for ``nn.Linear``.

    Initialised as ``nn.Linear`` would be with the same seed, on every rank alike. Input [..., K]
    must be the same on all ranks; backward all-reduces its gradient once.
    """

    _split = "column"
    joint: JointProjection | None = None
    activation: str = "none"
    gather_output: bool = False
    activation_follows: bool = False
    """A :class:`FusedActivation` comes next and applies what this layer leaves out."""
    keeps_part: bool = False
    """The gathered output carries this rank's part, for a loss that is computed on parts."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        gather_output: bool = False,
        activation: str = "none",
        sequence_parallel: bool | SequenceShards = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        check_activation(activation)
        self.sequence = shards_of(sequence_parallel)
        self._init_parallel(in_features, out_features, bias, group, device, dtype)
        self.activation, self.gather_output = activation, gather_output
        self._split_parameters(None)

    @classmethod
    def shard_(
        cls,
        module: nn.Module,
        group: GroupLike,
        *,
        name: str = "module",
        layout: tuple[tuple[Chunk, ...], ...] | None = None,
        gather_output: bool = False,
        activation: str = "none",
        sequence_parallel: bool | SequenceShards = False,
    ) -> None:
        """Turn a dense linear layer into its column-parallel form, in place.

        ``layout``: which out features each rank holds (default: as ``torch.chunk`` splits).
        """
        sequence = shards_of(sequence_parallel)
        in_features, out_features, transposed = _leaf_features(module, name)
        swap_class(
            module,
            cls,
            group=resolve_group(group),
            transposed=transposed,
            in_features=in_features,
            out_features=out_features,
            gather_output=gather_output,
            activation=activation,
            sequence=sequence,
            joint=None,
            check=InputCheck(),
        )
        module._split_parameters(layout)  # type: ignore[operator]

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle`` for ``parallelize_module`` or a plan; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    def _split_parameters(self, layout: tuple[tuple[Chunk, ...], ...] | None) -> None:
        for name in ("weight", "bias"):
            parameter = self._parameters.get(name)
            if parameter is None or spec_of(parameter) is not None:
                continue
            dim = self._out_dim if name == "weight" else 0
            if layout is None:
                sizes = chunk_sizes(self.out_features, self.group.size)
                spec = split_spec(parameter.shape, dim, self.group, sizes)
            else:
                spec = layout_spec(parameter.shape, dim, self.group, layout)
            shard_parameter_(self, name, spec, self.group)

    @property
    def is_hooked(self) -> bool:
        """Whether hooks see or change this layer's output."""
        return bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks)

    def output_sizes(self) -> list[int]:
        """Out features of every rank."""
        spec = spec_of(self.weight)
        if spec is None:
            return chunk_sizes(self.out_features, self.group.size)
        return [spec.rows_of(rank) for rank in range(self.group.size)]

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        if self.joint is not None and (y := self.joint.take(self, x)) is not None:
            return y
        weight, bias = self.local_weight(), self.local_bias()
        activation = "none" if self.activation_follows and self.is_hooked else self.activation
        name, shards = self.group.name, active(self.sequence)
        if shards is None:
            (y,) = column_gemm_act(x, [weight], [bias], activation, name, layer=self.layer)
        else:
            sizes = shards.of_part(x, self.group.rank)
            where: dict[str, Any] = {"dim": SEQUENCE, "sizes": sizes, "layer": self.layer}
            _, (y,) = all_gather_gemm(x, [weight], [bias], activation, name, **where)
        return self._whole(y) if self.gather_output else y

    def _whole(self, y: Tensor) -> Tensor:
        """All out features of every rank's y, for logits also with what this rank brought."""
        whole = gather_from_region(y, self.group.name, -1, self.output_sizes())
        if self.keeps_part and whole.requires_grad and not torch.compiler.is_compiling():
            whole.tpkernels_part = y, whole._version  # type: ignore[attr-defined]
        return whole


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose in features are split: partial sums are all-reduced, bias added once.

    Equivalent to ``all_reduce(F.linear(x_r, weight_r)) + bias``, which is the whole layer.

    Args:
        in_features, out_features: K and N of the whole layer; K need not divide by the ranks.
        bias: replicated, added once, after the reduction.
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.
        input_is_parallel: x is this rank's [..., K_r]; False: x is whole and is cut here.
        reduce_dtype: dtype of the partial sums on the wire (None: x's); ``torch.float32`` makes
            a bf16 layer round once.
        sequence_parallel: the output is this rank's shard [..., s_r, N] of the sequence; a
            :class:`SequenceShards` says how many tokens each rank gets (True: as even as can be).
        device, dtype: as for ``nn.Linear``.
    """

    _split = "row"
    whole_gradients = ("bias",)  # on every rank, also where the sequence is sharded
    input_is_parallel: bool = True
    reduce_dtype: torch.dtype | None = None
    ends_rank_stream: bool = False
    """It is called inside an attention that draws dropout from this rank's own stream."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: GroupLike = None,
        input_is_parallel: bool = True,
        reduce_dtype: torch.dtype | None = None,
        sequence_parallel: bool | SequenceShards = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        _check_reduce_dtype(reduce_dtype)
        self.sequence = shards_of(sequence_parallel)
        self._init_parallel(in_features, out_features, bias, group, device, dtype)
        self.input_is_parallel, self.reduce_dtype = input_is_parallel, reduce_dtype
        self._split_parameters(None)

    @classmethod
    def shard_(
        cls,
        module: nn.Module,
        group: GroupLike,
        *,
        name: str = "module",
        layout: tuple[tuple[Chunk, ...], ...] | None = None,
        input_is_parallel: bool = True,
        reduce_dtype: torch.dtype | None = None,
        sequence_parallel: bool | SequenceShards = False,
    ) -> None:
        """Turn a dense linear layer into its row-parallel form, in place.

        ``layout``: which in features each rank holds (default: as ``torch.chunk`` splits).
        """
        sequence = shards_of(sequence_parallel)
        in_features, out_features, transposed = _leaf_features(module, name)
        swap_class(
            module,
            cls,
            group=resolve_group(group),
            transposed=transposed,
            in_features=in_features,
            out_features=out_features,
            input_is_parallel=input_is_parallel,
            reduce_dtype=reduce_dtype,
            sequence=sequence,
            check=InputCheck(),
        )
        module._split_parameters(layout)  # type: ignore[operator]

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle`` for ``parallelize_module`` or a plan; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    def _split_parameters(self, layout: tuple[tuple[Chunk, ...], ...] | None) -> None:
        dim = 1 - self._out_dim
        if layout is None:
            sizes = chunk_sizes(self.in_features, self.group.size)
            spec = split_spec(self.weight.shape, dim, self.group, sizes)
        else:
            spec = layout_spec(self.weight.shape, dim, self.group, layout)
        shard_parameter_(self, "weight", spec, self.group)

    def input_sizes(self) -> list[int]:
        """In features of every rank."""
        spec = spec_of(self.weight)
        if spec is None:
            return chunk_sizes(self.in_features, self.group.size)
        return [spec.rows_of(rank) for rank in range(self.group.size)]

    def forward(self, x: Tensor) -> Tensor:
        shards = active(self.sequence)
        if self.ends_rank_stream and self.training and shards is None:
            rejoin_shared_stream()  # what follows is replicated: dropout must agree again
        if not self.input_is_parallel:
            self._check_input(x)
            x = scatter_to_region(x, self.group.name, -1, self.input_sizes())
        weight, bias = self.local_weight(), self.local_bias()
        options: dict[str, Any] = {"reduce_dtype": self.reduce_dtype, "layer": self.layer}
        if shards is None:
            return gemm_all_reduce(x, weight, bias, self.group.name, **options)
        options |= {"dim": SEQUENCE, "sizes": shards.of_whole(x)}
        return gemm_reduce_scatter(x, weight, bias, self.group.name, **options)
