"""``gemm_dglu`` in Triton: the gradients at gate and up of a gated MLP's second GEMM's input."""

# M tokens, K out features of the second GEMM (summed here), N its in features

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.epilogue import act_slope, act_value
from tpkernels.kernels.launch import Gemm
from tpkernels.kernels.tile import halves, load_tile, multiply, store_tile, tile_at


@triton.jit
def _epilogue(
    acc, gate, up, in_stride_m, in_stride_n, d_gate, d_up, m, n, M, N,
    ACT: tl.constexpr, PRECISE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA_IN: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        _epilogue(
            left, gate, up, in_stride_m, in_stride_n, d_gate, d_up, m, n, M, N, ACT, PRECISE,
            PARTS // 2, BLOCK_M, HALF, TMA_IN, TMA_OUT,
        )  # fmt: skip
        _epilogue(
            right, gate, up, in_stride_m, in_stride_n, d_gate, d_up, m, n + HALF, M, N, ACT,
            PRECISE, PARTS // 2, BLOCK_M, HALF, TMA_IN, TMA_OUT,
        )  # fmt: skip
    else:
        gate_MN = load_tile(gate, m, n, in_stride_m, in_stride_n, M, N, BLOCK_M, BLOCK_N, TMA_IN)
        gate_MN = gate_MN.to(tl.float32)
        d_up_MN = acc * act_value(gate_MN, ACT, PRECISE)
        store_tile(d_up, m, n, d_up_MN, M, N, BLOCK_M, BLOCK_N, TMA_OUT)
        up_MN = load_tile(up, m, n, in_stride_m, in_stride_n, M, N, BLOCK_M, BLOCK_N, TMA_IN)
        d_gate_MN = acc * up_MN.to(tl.float32) * act_slope(gate_MN, ACT, PRECISE)
        store_tile(d_gate, m, n, d_gate_MN, M, N, BLOCK_M, BLOCK_N, TMA_OUT)


@triton.jit
def _gemm_dglu(
    a, b, gate, up, d_gate, d_up, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
    in_stride_m, in_stride_n, ACT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EPILOGUE: tl.constexpr, B_IS_KN: tl.constexpr, TMA: tl.constexpr,
    TMA_IN: tl.constexpr, TMA_OUT: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
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
            acc, gate, up, in_stride_m, in_stride_n, d_gate, d_up, m, n, M, N, ACT, PRECISE,
            EPILOGUE, BLOCK_M, BLOCK_N, TMA_IN, TMA_OUT,
        )  # fmt: skip


def gemm_dglu(
    dy_MK: Tensor,
    weight_KN: Tensor,
    gate_MN: Tensor,
    up_MN: Tensor,
    act: str,
    *,
    config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) of ``act(gate) * up`` for the gradient ``dy @ weight`` that reaches it.

    Args:
        dy_MK: [M, K]; weight_KN: [K, N]; gate_MN, up_MN: [M, N]. Any strides; float32, bfloat16
            or float16, all the same; sums and products are in float32.
        act: an activation of ``tpkernels.reference``.
        config: tiles; None: the default rule for these sizes.

    Returns:
        Two [M, N] of dy's dtype, contiguous.
    """
    if gate_MN.stride() != up_MN.stride():
        gate_MN, up_MN = gate_MN.contiguous(), up_MN.contiguous()
    gemm = Gemm("gemm_dglu", dy_MK, weight_KN.t(), config, epilogue=(gate_MN, up_MN))
    d_gate, d_up = gemm.new_output(), gemm.new_output()
    if not gemm.empty:
        tma_out = gemm.tma_output()
        tma_in = gemm.tma_input(gate_MN) and gemm.tma_input(up_MN)
        block = (gemm.config.block_m, gemm.config.block_n // gemm.config.epilogue)
        gemm.launch(
            _gemm_dglu,
            gemm.a,
            gemm.b,
            *(gemm.tile_of(tile, block, tma_in) for tile in (gate_MN, up_MN)),
            *(gemm.tile_of(tile, block, tma_out) for tile in (d_gate, d_up)),
            gemm.M,
            gemm.N,
            gemm.K,
            *gemm.strides,
            *gate_MN.stride(),
            ACT=act,
            EPILOGUE=gemm.config.epilogue,
            TMA_IN=tma_in,
            TMA_OUT=tma_out,
        )
    return d_gate, d_up
