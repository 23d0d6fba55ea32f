"""What every GEMM kernel is made of: tiles of 2-D operands, their order, and the loop over K.

An operand is a TMA descriptor (``TMA``) or a pointer with two strides in elements; both give zeros
outside the matrix, and writes there are dropped. Offsets are 64-bit: matrices may be larger than
2^31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def tile_at(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of the ``index``-th tile: GROUP_M rows of tiles together, column by column.

        GROUP_M = 2:   0 2 4 6
                       1 3 5 7
                       8 ...

    The rows of a group are finished before the next group begins.
    """
    in_group = GROUP_M * tiles_n
    first_m = (index // in_group) * GROUP_M
    height = min(tiles_m - first_m, GROUP_M)
    return first_m + (index % in_group) % height, (index % in_group) // height


@triton.jit
def _offsets(row, col, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    return r.to(tl.int64)[:, None] * stride_row + c.to(tl.int64)[None, :] * stride_col


@triton.jit
def _inside(row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    return (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def load_tile(
    source,
    row,
    col,
    stride_row,
    stride_col,
    rows,
    cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The [ROWS, COLS] tile at (row, col) of a [rows, cols] matrix, zero outside of it."""
    if TMA:
        tile = source.load([row, col])
    else:
        at = _offsets(row, col, stride_row, stride_col, ROWS, COLS)
        tile = tl.load(source + at, mask=_inside(row, col, rows, cols, ROWS, COLS), other=0.0)
    return tile


@triton.jit
def load_row(row, col, cols, COLS: tl.constexpr):
    """fp32 [1, COLS] at ``col`` of a contiguous [cols] vector, zero outside of it."""
    at = col + tl.arange(0, COLS)
    return tl.load(row + at, mask=at < cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_tile(
    target,
    row,
    col,
    value,
    rows,
    cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write [ROWS, COLS] fp32 values at (row, col) of a contiguous [rows, cols] matrix."""
    if TMA:
        target.store([row, col], value.to(target.dtype))
    else:
        at = _offsets(row, col, cols, 1, ROWS, COLS)
        inside = _inside(row, col, rows, cols, ROWS, COLS)
        tl.store(target + at, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _b_tile(
    b,
    n,
    k,
    stride_n,
    stride_k,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_IS_KN: tl.constexpr,
    TMA: tl.constexpr,
):
    if B_IS_KN:
        tile = load_tile(b, k, n, stride_k, stride_n, K, N, BLOCK_K, BLOCK_N, TMA)
    else:
        tile = load_tile(b, n, k, stride_n, stride_k, N, K, BLOCK_N, BLOCK_K, TMA).T
    return tile


@triton.jit
def _rounded_to_tf32(x):
    """fp32 rounded to tf32's 10 bits, halves away from zero, as cvt.rna.tf32 does.

    The tensor core would cut the other 13 bits off, which doubles the error and biases it.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # a NaN's bits may overflow into the sign


@triton.jit
def multiply(
    a,
    b,
    m,
    n,
    M,
    N,
    K,
    a_stride_m,
    a_stride_k,
    b_stride_n,
    b_stride_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_IS_KN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N] of ``A @ B.T`` at (m, n): A is [M, K], B [N, K] of any strides."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_MK = load_tile(a, m, k, a_stride_m, a_stride_k, M, K, BLOCK_M, BLOCK_K, TMA)
        b_KN = _b_tile(b, n, k, b_stride_n, b_stride_k, N, K, BLOCK_N, BLOCK_K, B_IS_KN, TMA)
        if PRECISION == "tf32":
            a_MK, b_KN = _rounded_to_tf32(a_MK), _rounded_to_tf32(b_KN)
        if WIDEN:  # Triton's interpreter multiplies bf16 as if it were integers
            a_MK, b_KN = a_MK.to(tl.float32), b_KN.to(tl.float32)
        acc = tl.dot(a_MK, b_KN, acc, input_precision=PRECISION)
    return acc


@triton.jit
def multiply_twice(
    a,
    b0,
    b1,
    m,
    n,
    M,
    N,
    K,
    a_stride_m,
    a_stride_k,
    b0_stride_n,
    b0_stride_k,
    b1_stride_n,
    b1_stride_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_IS_KN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """(``A @ B0.T``, ``A @ B1.T``) at (m, n), as :func:`multiply`, each tile of A loaded once."""
    acc0 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a_MK = load_tile(a, m, k, a_stride_m, a_stride_k, M, K, BLOCK_M, BLOCK_K, TMA)
        b0_KN = _b_tile(b0, n, k, b0_stride_n, b0_stride_k, N, K, BLOCK_N, BLOCK_K, B_IS_KN, TMA)
        b1_KN = _b_tile(b1, n, k, b1_stride_n, b1_stride_k, N, K, BLOCK_N, BLOCK_K, B_IS_KN, TMA)
        if PRECISION == "tf32":
            a_MK = _rounded_to_tf32(a_MK)
            b0_KN, b1_KN = _rounded_to_tf32(b0_KN), _rounded_to_tf32(b1_KN)
        if WIDEN:
            a_MK = a_MK.to(tl.float32)
            b0_KN, b1_KN = b0_KN.to(tl.float32), b1_KN.to(tl.float32)
        acc0 = tl.dot(a_MK, b0_KN, acc0, input_precision=PRECISION)
        acc1 = tl.dot(a_MK, b1_KN, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of a [ROWS, COLS] tile."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))
