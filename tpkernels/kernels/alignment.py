"""How the kernels can read a matrix: by the copy engine, in vectors, or element by element."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

VECTOR = 16  # elements: Triton takes a stride for vectors where 16 divides it
_BYTES = (
    16  # of the base, and of rows for the copy engine (CUDA driver API, cuTensorMapEncodeTiled)
)


def stored(b_NK: Tensor) -> Tensor:
    """A weight as it lies in memory: itself, or its transpose if that has the rows."""
    return b_NK.t() if b_NK.stride(1) != 1 and b_NK.stride(0) == 1 else b_NK


def for_copy_engine(matrix: Tensor) -> bool:
    """Whether the copy engine can read ``matrix``: rows of 16-byte multiples, aligned, plain."""
    row = matrix.stride(0)
    return (
        matrix.numel() > 0
        and matrix.stride(1) == 1
        and row >= matrix.shape[1]
        and row * matrix.element_size() % _BYTES == 0
        and matrix.data_ptr() % _BYTES == 0
    )


def in_vectors(matrix: Tensor) -> bool:
    """Whether pointers into ``matrix`` read 16 bytes at a time."""
    return (
        matrix.stride(1) == 1 and matrix.stride(0) % VECTOR == 0 and matrix.data_ptr() % _BYTES == 0
    )


def as_measured(x_MK: Tensor, *weights: Tensor, others: Sequence[Tensor] = ()) -> bool:
    """Whether a GEMM's operands are such as the measured table is for.

    Args:
        x_MK: 2-D. weights: 2-D, [N, K] or [K, N], of any order of strides.
        others: [M, N], what the epilogue reads.

    Other operands take other tiles, or other instructions, than those that were measured.
    """
    weights = tuple(map(stored, weights))
    return all(
        for_copy_engine(each) and in_vectors(each) and each.shape[1] % VECTOR == 0
        for each in (x_MK, *weights, *others)
    ) and all(weight.shape[0] % VECTOR == 0 for weight in weights)
