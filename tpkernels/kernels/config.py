"""Tile configurations of the Triton GEMMs: the short list that is tuned, and the default rule."""

# M rows of the output, N its columns, K the summed dimension

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from tpkernels.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernels
_TEXT = re.compile(r"(\d+)x(\d+)x(\d+) g(\d+) s(\d+) w(\d+)(?: e(\d+))?(?: b(\d+))?( tma)?")


@dataclass(frozen=True)
class GemmConfig:
    """How a GEMM is cut into tiles and pipelined.

    Attributes:
        block_m, block_n, block_k: one tile of the output, and the step along K.
        group_m: rows of tiles that are walked together, so that L2 keeps their inputs.
        stages: tiles of the inputs in flight. warps: warps of a program.
        epilogue: parts that the epilogue is cut into, so that it fits the registers.
        blocks: programs that share a multiprocessor, so that one's epilogue runs beside the
            other's products.
        tma: move tiles by the copy engine (sm_90 and newer) where the operands are aligned for it.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    stages: int = 3
    warps: int = 8
    epilogue: int = 1
    blocks: int = 1
    tma: bool = False

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        text = f"{tile} g{self.group_m} s{self.stages} w{self.warps}"
        text += f" e{self.epilogue}" if self.epilogue > 1 else ""
        text += f" b{self.blocks}" if self.blocks > 1 else ""
        return text + " tma" * self.tma

    @property
    def volume(self) -> int:
        """Products that a step of one tile adds up."""
        return self.block_m * self.block_n * self.block_k

    @classmethod
    def parse(cls, text: str) -> GemmConfig:
        """The configuration that :meth:`__str__` wrote as ``text``.

        Raises:
            ConfigError: ``text`` is not of that form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a tile configuration; allowed: a text like "
                f"'{GemmConfig(128, 128, 64, tma=True)}'"
            )
        *numbers, tma = match.groups(default="")
        return cls(*[int(number or 1) for number in numbers], tma=bool(tma))  # type: ignore


def _list(*texts: str) -> tuple[GemmConfig, ...]:
    return tuple(map(GemmConfig.parse, texts))


# From the largest tile to the smallest, those that compile without spilled registers and within
# shared memory (checked ahead of time by the tests): what is left for a measurement to decide.
# More parts of the epilogue where it holds more at once: the slope needs the pre-activation. Two
# programs on a multiprocessor (b2) hide epilogues, which smaller K leaves longer in comparison.
_HOPPER_16BIT = {  # wgmma from 64 rows; the copy engine moves the tiles
    "gemm_act": _list(
        "128x256x64 g8 s4 w8 e2 tma",
        "256x128x64 g8 s3 w8 e2 tma",
        "128x128x64 g8 s4 w8 tma",
        "128x128x64 g8 s3 w4 e2 b2 tma",
        "128x128x64 g8 s3 w8 e2 b2 tma",
        "64x256x64 g8 s2 w4 e2 b2 tma",
        "64x128x64 g8 s3 w4 b2 tma",
        "64x64x128 g8 s3 w4 b2 tma",
        "16x128x128 g8 s4 w4 tma",
    ),
    "gemm_dact": _list(
        "128x256x64 g8 s3 w8 e4 tma",
        "256x128x64 g8 s3 w8 e4 tma",
        "128x128x64 g8 s4 w8 e2 tma",
        "128x128x64 g8 s3 w8 e4 b2 tma",
        "64x256x64 g8 s2 w4 e2 b2 tma",
        "64x128x64 g8 s3 w4 b2 tma",
        "64x64x128 g8 s3 w4 b2 tma",
        "16x128x128 g8 s4 w4 tma",
    ),
    "gemm_glu": _list(
        "128x128x64 g8 s4 w8 e2 tma",
        "128x128x64 g8 s3 w8 e2 tma",
        "128x64x64 g8 s3 w4 e2 b2 tma",
        "64x128x64 g8 s2 w4 e2 b2 tma",
        "64x64x64 g8 s3 w4 b2 tma",
        "16x64x128 g8 s4 w4 tma",
    ),
    "gemm_dglu": _list(
        "128x256x64 g8 s3 w8 e8 tma",
        "256x128x64 g8 s3 w8 e8 tma",
        "128x128x64 g8 s4 w8 e2 tma",
        "64x128x64 g8 s4 w4 e2 b2 tma",
        "64x64x128 g8 s3 w4 b2 tma",
        "16x128x128 g8 s4 w4 tma",
    ),
}
_AMPERE_16BIT = {  # mma.sync and cp.async; within 99 KB, the least that sm_86 and sm_89 have
    "gemm_act": _list(
        "128x256x32 g8 s3 w8 e4",
        "128x128x32 g8 s4 w8 e2",
        "128x128x32 g8 s3 w4 e2 b2",
        "64x128x64 g8 s3 w4 b2",
        "64x64x64 g8 s4 w4 b2",
        "16x128x128 g8 s3 w4",
    ),
    "gemm_dact": _list(
        "128x256x32 g8 s3 w8 e8",
        "128x128x32 g8 s4 w8 e2",
        "64x128x32 g8 s4 w4 e2 b2",
        "64x64x64 g8 s4 w4 b2",
        "16x128x128 g8 s3 w4",
    ),
    "gemm_glu": _list(
        "64x128x32 g8 s4 w8",
        "128x64x32 g8 s3 w4 e2 b2",
        "64x64x64 g8 s3 w4 b2",
        "16x64x128 g8 s3 w4",
    ),
    "gemm_dglu": _list(
        "128x256x32 g8 s3 w8 e8",
        "128x128x32 g8 s4 w8 e2",
        "64x128x32 g8 s4 w4 e4 b2",
        "64x64x64 g8 s4 w4 b2",
        "16x128x128 g8 s3 w4",
    ),
}
_HOPPER_32BIT = {  # tf32 on tensor cores, or fp32 on none
    "gemm_act": _list("64x128x32 g8 s4 w4 tma", "64x64x16 g8 s3 w8 tma"),
    "gemm_dact": _list("64x128x32 g8 s4 w4 e2 tma", "64x64x16 g8 s3 w8 tma"),
    "gemm_glu": _list("64x64x32 g8 s4 w4 tma", "64x64x16 g8 s3 w8 tma"),
    "gemm_dglu": _list("64x128x32 g8 s4 w4 e2 tma", "64x64x16 g8 s3 w8 tma"),
}
_AMPERE_32BIT = {
    "gemm_act": _list("128x64x32 g8 s3 w4", "64x64x16 g8 s3 w8"),
    "gemm_dact": _list("128x64x32 g8 s3 w4 e2", "64x64x16 g8 s3 w4"),
    "gemm_glu": _list("64x64x32 g8 s4 w4", "64x64x16 g8 s3 w8"),
    "gemm_dglu": _list("128x64x32 g8 s3 w4 e2", "64x64x16 g8 s3 w8"),
}
# For operands that cannot be read 16 bytes at a time, whose larger tiles would spill: (up to this
# many rows, tiles).
_UNALIGNED = (
    (16, GemmConfig.parse("16x64x32 g8 s3 w4")),
    (None, GemmConfig.parse("64x64x32 g8 s3 w8")),
)
_LIKE = {  # op -> the op whose list it shares
    "gemm_act_aux": "gemm_act",
    "gemm_signaled": "gemm_act",
    "gemm_dact_dbias": "gemm_dact",
    "gemm_glu_aux": "gemm_glu",
}
OPS = tuple(_HOPPER_16BIT) + tuple(_LIKE)
_PROGRAMS = 108  # multiprocessors of an A100, the smaller of the data centre GPUs served


def configs(op: str, dtype: torch.dtype, capability: tuple[int, int]) -> tuple[GemmConfig, ...]:
    """The configurations to tune for ``op``, from the largest tile to the smallest.

    Args:
        op: one of :data:`OPS`. dtype: float32, bfloat16 or float16.
        capability: compute capability, (8, 0) or newer. Consumer Blackwell (12, x) has the shared
            memory of Ampere and takes its list.
    """
    lists = {
        (True, False): _HOPPER_16BIT,
        (False, False): _AMPERE_16BIT,
        (True, True): _HOPPER_32BIT,
        (False, True): _AMPERE_32BIT,
    }
    hopper = (9, 0) <= capability < (12, 0)
    found = lists[hopper, dtype is torch.float32][_LIKE.get(op, op)]
    if op == "gemm_signaled":  # few rows are one chunk
        found = tuple(config for config in found if config.block_m >= 64)
    return found


def default_config(
    op: str, dtype: torch.dtype, capability: tuple[int, int], m: int, n: int, k: int
) -> GemmConfig:
    """The configuration where nothing was measured: by size alone, the same on every rank.

    The first of the list that is not mostly outside of m rows and gives every program a tile;
    else one of the smallest. Float32 without tf32 takes the last, which needs no tensor cores.
    """
    candidates = configs(op, dtype, capability)
    if dtype is torch.float32 and not float32_is_tf32():
        return candidates[-1]
    if dtype is torch.float32:
        return candidates[0]
    for config in candidates:
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        if config.block_m < 2 * m and tiles >= _PROGRAMS * config.blocks:
            return config
    return candidates[-1] if m <= candidates[-1].block_m else candidates[-2]


def unaligned_config(config: GemmConfig, m: int) -> GemmConfig:
    """``config``, or smaller tiles where it is meant for operands that are read in vectors."""
    smaller = next(tiles for rows, tiles in _UNALIGNED if rows is None or m <= rows)
    return smaller if config.volume > smaller.volume else config


def float32_is_tf32() -> bool:
    """Whether PyTorch's setting lets matrix products of float32 on CUDA round to tf32."""
    # Of PyTorch's three ways to set it, the one whose value follows the other two.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
