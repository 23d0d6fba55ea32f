"""``gemm_glu`` in Triton: ``act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)``."""

# M tokens, K in features, N out features

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.config import GemmConfig
from tpkernels.kernels.epilogue import act_value
from tpkernels.kernels.launch import Gemm, same_order
from tpkernels.kernels.tile import halves, load_row, multiply_twice, store_tile, tile_at


@triton.jit
def _epilogue(
    acc_gate, acc_up, b_gate, b_up, y, gate, up, m, n, M, N,
    ACT: tl.constexpr, PRECISE: tl.constexpr, AUX: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA_OUT: tl.constexpr,
):  # fmt: skip
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left_gate, right_gate = halves(acc_gate, BLOCK_M, BLOCK_N)
        left_up, right_up = halves(acc_up, BLOCK_M, BLOCK_N)
        _epilogue(
            left_gate, left_up, b_gate, b_up, y, gate, up, m, n, M, N, ACT, PRECISE, AUX,
            PARTS // 2, BLOCK_M, HALF, TMA_OUT,
        )  # fmt: skip
        _epilogue(
            right_gate, right_up, b_gate, b_up, y, gate, up, m, n + HALF, M, N, ACT, PRECISE, AUX,
            PARTS // 2, BLOCK_M, HALF, TMA_OUT,
        )  # fmt: skip
    else:
        if b_gate is not None:
            acc_gate += load_row(b_gate, n, N, BLOCK_N)
        if b_up is not None:
            acc_up += load_row(b_up, n, N, BLOCK_N)
        if AUX:
            store_tile(gate, m, n, acc_gate, M, N, BLOCK_M, BLOCK_N, TMA_OUT)
            store_tile(up, m, n, acc_up, M, N, BLOCK_M, BLOCK_N, TMA_OUT)
        y_MN = act_value(acc_gate, ACT, PRECISE) * acc_up
        store_tile(y, m, n, y_MN, M, N, BLOCK_M, BLOCK_N, TMA_OUT)


@triton.jit
def _gemm_glu(
    a, b0, b1, b_gate, b_up, y, gate, up, M, N, K, a_stride_m, a_stride_k,
    b0_stride_n, b0_stride_k, b1_stride_n, b1_stride_k,
    ACT: tl.constexpr, PRECISE: tl.constexpr, AUX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EPILOGUE: tl.constexpr, B_IS_KN: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(index, tiles_m, tiles_n, GROUP_M)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc_gate, acc_up = multiply_twice(
            a, b0, b1, m, n, M, N, K, a_stride_m, a_stride_k,
            b0_stride_n, b0_stride_k, b1_stride_n, b1_stride_k,
            BLOCK_M, BLOCK_N, BLOCK_K, B_IS_KN, TMA, PRECISION, WIDEN,
        )  # fmt: skip
        _epilogue(
            acc_gate, acc_up, b_gate, b_up, y, gate, up, m, n, M, N, ACT, PRECISE, AUX, EPILOGUE,
            BLOCK_M, BLOCK_N, TMA_OUT,
        )  # fmt: skip


def gemm_glu(
    x_MK: Tensor,
    w_gate_NK: Tensor,
    w_up_NK: Tensor,
    b_gate_N: Tensor | None,
    b_up_N: Tensor | None,
    act: str,
    *,
    aux: bool = False,
    config: GemmConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``act(gate) * up`` of ``gate = F.linear(x, w_gate, b_gate)``, ``up = F.linear(x, w_up, ..)``.

    Args:
        x_MK: [M, K]; w_gate_NK, w_up_NK: [N, K]; b_gate_N, b_up_N: [N] or None. Any strides;
            float32, bfloat16 or float16, all the same; sums and products are in float32.
        act: an activation of ``tpkernels.reference``.
        aux: return (that, gate, up).
        config: tiles; None: the default rule for these sizes.

    Returns:
        [M, N] of x's dtype, contiguous: one or three tensors of their own.
    """
    w_gate_NK, w_up_NK = same_order(w_gate_NK, w_up_NK)
    gemm = Gemm("gemm_glu_aux" if aux else "gemm_glu", x_MK, w_gate_NK, config, more_b=(w_up_NK,))
    y, gate, up = (gemm.new_output() if wanted else None for wanted in (True, aux, aux))
    assert y is not None
    if not gemm.empty:
        tma_out = gemm.tma_output()
        block = (gemm.config.block_m, gemm.config.block_n // gemm.config.epilogue)
        gemm.launch(
            _gemm_glu,
            gemm.a,
            gemm.b,
            gemm.operand_b(w_up_NK),
            gemm.row(b_gate_N),
            gemm.row(b_up_N),
            *(None if out is None else gemm.tile_of(out, block, tma_out) for out in (y, gate, up)),
            gemm.M,
            gemm.N,
            gemm.K,
            *gemm.strides,
            *w_up_NK.stride(),
            ACT=act,
            AUX=aux,
            EPILOGUE=gemm.config.epilogue,
            TMA_OUT=tma_out,
        )
    return y if gate is None or up is None else (y, gate, up)
