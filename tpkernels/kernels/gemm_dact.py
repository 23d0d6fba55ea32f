"""``gemm_dact`` in Triton: ``(dy @ weight) * act'(pre)``, and its column sums if asked."""

# M tokens, K out features of the second GEMM (summed here), N its in features

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.epilogue import act_slope
from tpkernels.kernels.launch import Gemm
from tpkernels.kernels.tile import halves, load_tile, multiply, store_tile, tile_at


@triton.jit
def _epilogue(
    acc, pre, pre_stride_m, pre_stride_n, dh, column_sums, m, n, tile_m, M, N,
    ACT: tl.constexpr, PRECISE: tl.constexpr, DBIAS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA_PRE: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        _epilogue(
            left, pre, pre_stride_m, pre_stride_n, dh, column_sums, m, n, tile_m, M, N,
            ACT, PRECISE, DBIAS, PARTS // 2, BLOCK_M, HALF, TMA_PRE, TMA_OUT,
        )  # fmt: skip
        _epilogue(
            right, pre, pre_stride_m, pre_stride_n, dh, column_sums, m, n + HALF, tile_m, M, N,
            ACT, PRECISE, DBIAS, PARTS // 2, BLOCK_M, HALF, TMA_PRE, TMA_OUT,
        )  # fmt: skip
    else:
        if ACT != "none":
            pre_MN = load_tile(
                pre, m, n, pre_stride_m, pre_stride_n, M, N, BLOCK_M, BLOCK_N, TMA_PRE
            )
            acc = acc * act_slope(pre_MN.to(tl.float32), ACT, PRECISE)
        store_tile(dh, m, n, acc, M, N, BLOCK_M, BLOCK_N, TMA_OUT)
        if DBIAS:
            rows, columns = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
            acc = tl.where((rows < M)[:, None], acc, 0.0)  # zero times an infinite weight is not
            at = tile_m.to(tl.int64) * N + columns
            tl.store(column_sums + at, tl.sum(acc, 0), mask=columns < N)


@triton.jit
def _gemm_dact(
    a, b, pre, dh, column_sums, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
    pre_stride_m, pre_stride_n,
    ACT: tl.constexpr, PRECISE: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EPILOGUE: tl.constexpr, B_IS_KN: tl.constexpr, TMA: tl.constexpr,
    TMA_PRE: tl.constexpr, TMA_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = multiply(
            a, b, m, n, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
            BLOCK_M, BLOCK_N, BLOCK_K, B_IS_KN, TMA, PRECISION, WIDEN,
        )  # fmt: skip
        _epilogue(
            acc, pre, pre_stride_m, pre_stride_n, dh, column_sums, m, n, tile_m, M, N,
            ACT, PRECISE, DBIAS, EPILOGUE, BLOCK_M, BLOCK_N, TMA_PRE, TMA_OUT,
        )  # fmt: skip


def gemm_dact(
    dy_MK: Tensor,
    weight_KN: Tensor,
    pre_MN: Tensor,
    act: str,
    *,
    dbias: bool = False,
    config: GemmConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``act_grad(dy @ weight, pre, act)``; with ``dbias`` also its sum over the rows, [N].

    Args:
        dy_MK: [M, K]; weight_KN: [K, N]; pre_MN: [M, N]. Any strides; float32, bfloat16 or
            float16, all the same; sums and the slope are in float32.
        act: an activation of ``tpkernels.reference``.
        config: tiles; None: the default rule for these sizes.

    Returns:
        [M, N] of dy's dtype, contiguous. The sum over rows is that of the float32 values, added
        tile by tile in a fixed order: the same bits every time.
    """
    op = "gemm_dact_dbias" if dbias else "gemm_dact"
    gemm = Gemm(op, dy_MK, weight_KN.t(), config, epilogue=(pre_MN,))
    dh = gemm.new_output()
    tiles_m = -(-gemm.M // gemm.config.block_m)
    sums = dh.new_empty(tiles_m, gemm.N, dtype=torch.float32) if dbias else None
    if not gemm.empty:
        block = (gemm.config.block_m, gemm.config.block_n // gemm.config.epilogue)
        tma_out, tma_pre = gemm.tma_output(), gemm.tma_input(pre_MN)
        gemm.launch(
            _gemm_dact,
            gemm.a,
            gemm.b,
            gemm.tile_of(pre_MN, block, tma_pre),
            gemm.tile_of(dh, block, tma_out),
            sums,
            gemm.M,
            gemm.N,
            gemm.K,
            *gemm.strides,
            *pre_MN.stride(),
            ACT=act,
            DBIAS=dbias,
            EPILOGUE=gemm.config.epilogue,
            TMA_PRE=tma_pre,
            TMA_OUT=tma_out,
        )
    return dh if sums is None else (dh, sums.sum(0).to(dh.dtype))
