"""``gemm_act`` in Triton: ``act(x @ weight.T + bias)``, bias and activation in the epilogue."""

# M tokens, K in features, N out features

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.errors import ConfigError
from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.epilogue import act_value
from tpkernels.kernels.launch import Gemm
from tpkernels.kernels.row_chunks import RowChunks
from tpkernels.kernels.tile import halves, load_row, multiply, store_tile, tile_at
from tpkernels.kernels.tile_counters import TileCounters, count_tile


@triton.jit
def _epilogue(
    acc, bias, y, pre, m, n, M, N,
    ACT: tl.constexpr, PRECISE: tl.constexpr, AUX: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        _epilogue(
            left, bias, y, pre, m, n, M, N, ACT, PRECISE, AUX, PARTS // 2,
            BLOCK_M, HALF, TMA_OUT,
        )  # fmt: skip
        _epilogue(
            right, bias, y, pre, m, n + HALF, M, N, ACT, PRECISE, AUX, PARTS // 2,
            BLOCK_M, HALF, TMA_OUT,
        )  # fmt: skip
    else:
        if bias is not None:
            acc += load_row(bias, n, N, BLOCK_N)
        if AUX:
            store_tile(pre, m, n, acc, M, N, BLOCK_M, BLOCK_N, TMA_OUT)
        store_tile(y, m, n, act_value(acc, ACT, PRECISE), M, N, BLOCK_M, BLOCK_N, TMA_OUT)


# Not another kernel for every way to cut the rows.
@triton.jit(do_not_specialize=["first_tile", "boundary", "chunk_rows", "chunk_count", "rest_rows"])
def _gemm_act(
    a, b, bias, y, pre, finished, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
    first_tile, boundary, chunk_rows, chunk_count, rest_rows,
    ACT: tl.constexpr, PRECISE: tl.constexpr, AUX: tl.constexpr, SIGNAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EPILOGUE: tl.constexpr, B_IS_KN: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # Flattened, so that the loads of the next tile run beside the epilogue of this one.
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP_M)
        if SIGNAL:
            tile_m = (tile_m + first_tile) % tiles_m
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = multiply(
            a, b, m, n, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
            BLOCK_M, BLOCK_N, BLOCK_K, B_IS_KN, TMA, PRECISION, WIDEN,
        )  # fmt: skip
        _epilogue(
            acc, bias, y, pre, m, n, M, N, ACT, PRECISE, AUX, EPILOGUE, BLOCK_M, BLOCK_N, TMA_OUT
        )  # fmt: skip
        if SIGNAL:
            count_tile(
                finished, m, M, boundary, chunk_rows, chunk_count, rest_rows, BLOCK_M
            )  # fmt: skip


def gemm_act(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    act: str,
    *,
    aux: bool = False,
    config: GemmConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``act(F.linear(x, weight, bias))``; with ``aux``, ``(that, F.linear(x, weight, bias))``.

    Args:
        x_MK: [M, K]; weight_NK: [N, K]; bias_N: [N] or None. Any strides; float32, bfloat16 or
            float16, all the same; sums and the activation are in float32.
        act: an activation of ``tpkernels.reference``.
        config: tiles; None: the default rule for these sizes.

    Returns:
        [M, N] of x's dtype, contiguous: one or two tensors of their own.

    Float32 products are rounded to tf32 only where PyTorch's setting allows it.
    """
    gemm = Gemm("gemm_act_aux" if aux else "gemm_act", x_MK, weight_NK, config)
    y = gemm.new_output()
    pre = gemm.new_output() if aux else None
    if gemm.empty:
        return (y, pre) if pre is not None else y
    _launch(gemm, bias_N, act, y, pre)
    return (y, pre) if pre is not None else y


def gemm_signaled(
    x_MK: Tensor,
    weight_NK: Tensor,
    out_MN: Tensor,
    counters: TileCounters,
    chunks: RowChunks,
    *,
    first_row: int = 0,
    config: GemmConfig | None = None,
    spare_programs: int = 0,
) -> tuple[int, int]:
    """``out = F.linear(x, weight)``, counting finished tiles of every chunk of rows.

    Args:
        out_MN: [M, N], contiguous, of x's dtype; written.
        counters: one count a chunk.
        chunks: which rows they are.
        first_row: the tiles of this row come first, those of rows before it last.
        spare_programs: multiprocessors left to others, since the collective (and the waiting
            kernel, where there is one) needs somewhere to run beside this persistent one.

    Returns:
        (rows, columns) of the tiles, by which ``SignalPlan.expected`` knows the counts.

    Raises:
        ConfigError: more chunks than counts, or matrices that do not fit.
    """
    gemm = Gemm("gemm_signaled", x_MK, weight_NK, config)
    if out_MN.shape != (gemm.M, gemm.N) or out_MN.dtype is not x_MK.dtype:
        raise ConfigError(
            f"gemm_signaled: out must be {(gemm.M, gemm.N)} {x_MK.dtype}, got "
            f"{tuple(out_MN.shape)} {out_MN.dtype}"
        )
    if not out_MN.is_contiguous():
        raise ConfigError(
            f"gemm_signaled: out must be contiguous, its strides are {out_MN.stride()}"
        )
    if not gemm.empty:
        counters.check(chunks.of_row(gemm.M - 1) + 1)
        first_tile = first_row // gemm.config.block_m
        signal = (counters.finished, first_tile, chunks)
        _launch(gemm, None, "none", out_MN, None, signal, spare_programs)
    return gemm.config.block_m, gemm.config.block_n


def _launch(
    gemm: Gemm,
    bias_N: Tensor | None,
    act: str,
    y: Tensor,
    pre: Tensor | None,
    signal: tuple[Tensor, int, RowChunks] | None = None,
    spare_programs: int = 0,
) -> None:
    # A copy-engine store is complete for other devices only after a wait that Triton does not
    # offer, so tiles that are signalled are written by ordinary stores.
    tma_out = gemm.tma_output() and signal is None
    config = gemm.config
    finished, first_tile, chunks = signal or (None, 0, RowChunks(1, 0))
    block = (config.block_m, config.block_n // config.epilogue)
    gemm.launch(
        _gemm_act,
        gemm.a,
        gemm.b,
        gemm.row(bias_N),
        gemm.tile_of(y, block, tma_out),
        None if pre is None else gemm.tile_of(pre, block, tma_out),
        finished,
        gemm.M,
        gemm.N,
        gemm.K,
        *gemm.strides,
        first_tile,
        *chunks.arguments(),
        spare=spare_programs,
        ACT=act,
        AUX=pre is not None,
        SIGNAL=signal is not None,
        EPILOGUE=config.epilogue,
        TMA_OUT=tma_out,
    )
