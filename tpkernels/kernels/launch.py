"""From tensors to a kernel launch: operands, tile configuration, grid, and what Triton needs."""

# M rows of the output, N its columns, K the summed dimension

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.errors import ConfigError
from tpkernels.kernels import alignment, available
from tpkernels.kernels.available import OLDEST_CAPABILITY
from tpkernels.kernels.config import (
    DTYPES,
    GemmConfig,
    default_config,
    float32_is_tf32,
    unaligned_config,
)

TMA_CAPABILITY = (9, 0)
_TMA_ROW = 16  # bytes that rows are multiples of (CUDA driver API, cuTensorMapEncodeTiled)
_INTERPRETED = (9, 0)  # what the interpreter stands for
_INTERPRETED_PROGRAMS = 3  # fewer than tiles, so that the persistent loop runs more than once


class StandIn(Protocol):
    """Takes the launches in the place of a device that is not there (``ahead_of_time``)."""

    capability: tuple[int, int]
    multiprocessors: int

    def launch(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Instead of ``kernel[grid](*args, **options)``."""


STAND_IN: ContextVar[StandIn | None] = ContextVar("tpkernels_stand_in", default=None)


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel on the current stream of the current device."""
    stand_in = STAND_IN.get()
    if stand_in is None:
        kernel[grid](*args, **options)
    else:
        stand_in.launch(kernel, args, options)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability that kernels on ``device`` are configured for."""
    stand_in = STAND_IN.get()
    if stand_in is not None:
        return stand_in.capability
    return _INTERPRETED if device.type == "cpu" else _properties(device)[0]


@lru_cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    found = torch.cuda.get_device_properties(device)
    return (found.major, found.minor), found.multi_processor_count


def _multiprocessors(device: torch.device) -> int:
    stand_in = STAND_IN.get()
    if stand_in is not None:
        return stand_in.multiprocessors
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return _properties(device)[1]


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise :class:`ConfigError` for a dtype that the Triton kernels do not have."""
    if dtype not in DTYPES:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise ConfigError(
            f"{op}: the Triton kernels have no {str(dtype).removeprefix('torch.')}; allowed: "
            f"{allowed}. Fix: unset TPKERNELS_GEMM, or cast"
        )


class Gemm:
    """One GEMM ``A @ B.T`` about to be launched: its operands, sizes and tiles.

    Args:
        op: name of the op, for the default configuration and errors.
        a_MK: [M, K]; b_NK: [N, K], further matrices like it through :meth:`operand_b`.
        config: tiles; None: :func:`default_config`. Operands that cannot be read in vectors take
            smaller ones.
        more_b: further matrices like B. epilogue: [M, N] matrices that the epilogue reads.

    Attributes:
        a, b: what the kernel takes: TMA descriptors, or the tensors themselves.
        strides: (a_m, a_k, b_n, b_k) in elements.
        empty: whether the output has no element.

    Raises:
        ConfigError: a dtype that the kernels lack, or tensors that do not fit each other.
    """

    def __init__(
        self,
        op: str,
        a_MK: Tensor,
        b_NK: Tensor,
        config: GemmConfig | None,
        *,
        more_b: Sequence[Tensor] = (),
        epilogue: Sequence[Tensor] = (),
    ) -> None:
        check_dtype(op, a_MK.dtype)
        _check_fit(op, a_MK, (b_NK, *more_b), epilogue)
        self.M, self.K = a_MK.shape
        self.N = b_NK.shape[0]
        self._like = a_MK
        self._capability = capability_of(a_MK.device)
        if config is None:
            config = self._default(op, self._capability)
        stored = [alignment.stored(each) for each in (b_NK, *more_b)]
        self.b_is_kn = stored[0] is not b_NK
        reads = (a_MK, *stored, *epilogue)
        self.tma = config.tma and all(map(alignment.for_copy_engine, (a_MK, *stored)))
        if self.tma:
            aligned = self.tma_output() and all(map(self.tma_input, epilogue))
        else:
            aligned = all(map(alignment.in_vectors, reads)) and self.N % alignment.VECTOR == 0
            if config.tma and self._capability >= TMA_CAPABILITY:
                config = self._default(op, OLDEST_CAPABILITY)  # one that is meant for pointers
        if not aligned:
            config = unaligned_config(config, self.M)
        self.config = config
        a_block = (config.block_m, config.block_k)
        self.a = TensorDescriptor.from_tensor(a_MK, list(a_block)) if self.tma else a_MK
        self.b = self.operand_b(b_NK)
        self.strides = (*a_MK.stride(), *b_NK.stride())

    def _default(self, op: str, capability: tuple[int, int]) -> GemmConfig:
        return default_config(op, self._like.dtype, capability, self.M, self.N, self.K)

    @property
    def empty(self) -> bool:
        return self.M == 0 or self.N == 0

    def operand_b(self, b_NK: Tensor) -> Any:
        """What the kernel takes for a matrix like B, which must have B's order of strides."""
        if not self.tma:
            return b_NK
        block = (self.config.block_n, self.config.block_k)
        return TensorDescriptor.from_tensor(
            alignment.stored(b_NK), list(block[::-1] if self.b_is_kn else block)
        )

    def row(self, bias_N: Tensor | None) -> Tensor | None:
        """What the kernel takes for a bias.

        Raises:
            ConfigError: it is not [N], or of another dtype than x.
        """
        if bias_N is None:
            return None
        if bias_N.shape != (self.N,) or bias_N.dtype is not self._like.dtype:
            raise ConfigError(
                f"bias must be ({self.N},) {self._like.dtype}, got {tuple(bias_N.shape)} "
                f"{bias_N.dtype}"
            )
        return bias_N.contiguous()

    def new_output(self) -> Tensor:
        """[M, N], contiguous, uninitialised."""
        return self._like.new_empty(self.M, self.N)

    def tma_output(self) -> bool:
        """Whether [M, N] matrices of ours can be moved by the copy engine."""
        return self.tma and self.N * self._like.element_size() % _TMA_ROW == 0

    def tma_input(self, matrix: Tensor) -> bool:
        """Whether an [M, N] matrix of the caller's can be read by the copy engine."""
        return self.tma and alignment.for_copy_engine(matrix)

    def tile_of(self, tensor: Tensor, block: Sequence[int], tma: bool) -> Any:
        """What the kernel takes for an [M, N] matrix that it reads or writes in ``block`` s."""
        return TensorDescriptor.from_tensor(tensor, list(block)) if tma else tensor

    def programs(self, spare: int = 0) -> int:
        """Programs of the persistent grid, which leaves ``spare`` multiprocessors to others."""
        tiles = -(-self.M // self.config.block_m) * -(-self.N // self.config.block_n)
        multiprocessors = _multiprocessors(self._like.device) - spare
        return max(1, min(tiles, multiprocessors * self.config.blocks))

    def launch(self, kernel: Any, *args: Any, spare: int = 0, **constants: Any) -> None:
        """Launch ``kernel`` with what all GEMM kernels take, after its own ``args``."""
        config = self.config
        precise = self._like.dtype is torch.float32
        run(
            kernel,
            (self.programs(spare),),
            *args,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            B_IS_KN=self.b_is_kn,
            TMA=self.tma,
            PRECISION="tf32" if precise and float32_is_tf32() else "ieee",
            PRECISE=precise,
            WIDEN=available.interpreting(),
            num_warps=config.warps,
            num_stages=config.stages,
            **constants,
        )


def _check_fit(
    op: str, a_MK: Tensor, weights: Sequence[Tensor], epilogue: Sequence[Tensor]
) -> None:
    """A kernel reads what it is told to: shapes that do not fit are read out of bounds."""
    rows, columns = a_MK.shape[0], weights[0].shape[0]
    wanted = [(a_MK.shape[0], a_MK.shape[1]), *[(columns, a_MK.shape[-1])] * len(weights)]
    wanted += [(rows, columns)] * len(epilogue)
    for matrix, shape in zip((a_MK, *weights, *epilogue), wanted, strict=True):
        if tuple(matrix.shape) != shape:
            raise ConfigError(
                f"{op}: a matrix of {tuple(matrix.shape)} was given where {shape} fits "
                f"{tuple(a_MK.shape)} times {tuple(weights[0].shape)} transposed"
            )
        if matrix.dtype is not a_MK.dtype or matrix.device != a_MK.device:
            raise ConfigError(
                f"{op}: a matrix is {matrix.dtype} on {matrix.device} and another {a_MK.dtype} on "
                f"{a_MK.device}; all need one dtype and device"
            )


def same_order(first_NK: Tensor, second_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices in one order of strides, as kernels with two of them need; copies if not."""
    if (first_NK.stride(1) == 1) == (second_NK.stride(1) == 1):
        return first_NK, second_NK
    return first_NK.contiguous(), second_NK.contiguous()
