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
from tpkernels.kernels import available
from tpkernels.kernels.available import OLDEST_CAPABILITY
from tpkernels.kernels.config import GemmConfig, default_config, float32_is_tf32, unaligned_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TMA_CAPABILITY = (9, 0)
_TMA_ALIGNMENT = 16  # bytes, of the base and of every stride but the last (CUDA driver API)
_VECTOR = 16  # elements; Triton reads in vectors where 16 divides every stride
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
        config: tiles; None: :func:`default_config`.

    Attributes:
        a, b: what the kernel takes: TMA descriptors, or the tensors themselves.
        strides: (a_m, a_k, b_n, b_k) in elements.
        empty: whether the output has no element.
    """

    def __init__(
        self, op: str, a_MK: Tensor, b_NK: Tensor, config: GemmConfig | None, *more: Tensor
    ) -> None:
        check_dtype(op, a_MK.dtype)
        self.M, self.K = a_MK.shape
        self.N = b_NK.shape[0]
        self._like = a_MK
        self._capability = capability_of(a_MK.device)
        if config is None:
            config = self._default(op, self._capability)
        self.b_is_kn = b_NK.stride(1) != 1 and b_NK.stride(0) == 1
        loads = (a_MK, *map(self._stored, (b_NK, *more)))
        self.tma = config.tma and not self.empty and self.K > 0 and all(map(_tma_can_load, loads))
        if config.tma and not self.tma and self._capability >= TMA_CAPABILITY:
            config = self._default(op, OLDEST_CAPABILITY)  # one that is meant for pointers
        if not all(map(_in_vectors, loads)) or self.N % _VECTOR:
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

    def _stored(self, b_NK: Tensor) -> Tensor:
        """A matrix like B as it lies in memory."""
        return b_NK.t() if self.b_is_kn else b_NK

    def operand_b(self, b_NK: Tensor) -> Any:
        """What the kernel takes for a matrix like B, which must have B's order of strides."""
        if not self.tma:
            return b_NK
        block = (self.config.block_n, self.config.block_k)
        return TensorDescriptor.from_tensor(
            self._stored(b_NK), list(block[::-1] if self.b_is_kn else block)
        )

    def new_output(self) -> Tensor:
        """[M, N], contiguous, uninitialised."""
        return self._like.new_empty(self.M, self.N)

    def tma_output(self) -> bool:
        """Whether [M, N] matrices of ours can be moved by the copy engine."""
        return self.tma and self.N * self._like.element_size() % _TMA_ALIGNMENT == 0

    def tma_input(self, matrix: Tensor) -> bool:
        """Whether an [M, N] matrix of the caller's can be read by the copy engine."""
        return self.tma and _tma_can_load(matrix)

    def tile_of(self, tensor: Tensor, block: Sequence[int], tma: bool) -> Any:
        """What the kernel takes for an [M, N] matrix that it reads or writes in ``block`` s."""
        return TensorDescriptor.from_tensor(tensor, list(block)) if tma else tensor

    def programs(self, spare: int = 0) -> int:
        """Programs of the persistent grid, which leaves ``spare`` multiprocessors to others."""
        tiles = -(-self.M // self.config.block_m) * -(-self.N // self.config.block_n)
        multiprocessors = _multiprocessors(self._like.device) - spare
        return max(1, min(tiles, multiprocessors * self.config.blocks))

    def launch(
        self, kernel: Any, *args: Any, programs: int | None = None, **constants: Any
    ) -> None:
        """Launch ``kernel`` with what all GEMM kernels take, after its own ``args``."""
        config = self.config
        grid = self.programs() if programs is None else programs
        run(
            kernel,
            (grid,),
            *args,
            PROGRAMS=grid,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            B_IS_KN=self.b_is_kn,
            TMA=self.tma,
            PRECISION="tf32" if float32_is_tf32() else "ieee",
            PRECISE=self._like.dtype is torch.float32,
            WIDEN=available.interpreting(),
            num_warps=config.warps,
            num_stages=config.stages,
            **constants,
        )


def same_order(first_NK: Tensor, second_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Both matrices in one order of strides, as kernels with two of them need; copies if not."""
    if (first_NK.stride(1) == 1) == (second_NK.stride(1) == 1):
        return first_NK, second_NK
    return first_NK.contiguous(), second_NK.contiguous()


def _in_vectors(matrix: Tensor) -> bool:
    """Whether pointers into ``matrix`` can read several elements at once."""
    return matrix.stride(1) == 1 and matrix.stride(0) % _VECTOR == 0


def _tma_can_load(matrix: Tensor) -> bool:
    """Whether the copy engine can read ``matrix``: rows of 16-byte multiples, aligned, plain."""
    row = matrix.stride(0)
    return (
        matrix.stride(1) == 1
        and row >= matrix.shape[1]
        and row * matrix.element_size() % _TMA_ALIGNMENT == 0
        and matrix.data_ptr() % _TMA_ALIGNMENT == 0
    )
