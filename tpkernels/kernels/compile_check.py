"""Compile the tuned tile configurations for given GPUs, none of which need be here.

    python -m tpkernels.kernels.compile_check [--all] [--json] [sm_80 sm_90 ...]

Prints what each kernel takes, and exits with 1 if one spills registers, exceeds shared memory or
is too large for as many blocks of it on a multiprocessor as its configuration says.
"""

# M rows of the output, N its columns, K the summed dimension

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from tpkernels.kernels import available
from tpkernels.kernels.config import GemmConfig, configs, default_config
from tpkernels.reference import ACTIVATIONS

if TYPE_CHECKING:
    from tpkernels.kernels.ahead_of_time import CompiledKernel

SIZE = 4096  # any size does, divisible by 16 as those of real models are
# Triton makes a kernel of its own for sizes of 1 and for those that 16 does not divide.
EDGES = (
    (1, 1, 1),
    (1, SIZE, SIZE),
    (SIZE, 1, SIZE),
    (SIZE, SIZE, 1),
    (7, 13, 5),
    (4097, 4099, 4101),
)
# KiB of shared memory that a block, and that all blocks of a multiprocessor may take (CUDA C++
# Programming Guide, compute capabilities); 1 KiB of the latter a block is the system's.
SHARED_LIMIT = {
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (12, 0): (99, 100),
}
REGISTERS = 65536  # of a multiprocessor
# The most that each kernel can be asked for: biases, second outputs, the erf of "gelu".
FULLEST = ("gemm_act_aux", "gemm_dact_dbias", "gemm_glu_aux", "gemm_dglu")
REST = ("gemm_act", "gemm_signaled", "gemm_dact", "gemm_glu")


@dataclass(frozen=True)
class Case:
    """One kernel to compile; ``weight`` is the order of its weight's strides, NK or KN."""

    capability: tuple[int, int]
    op: str
    dtype: torch.dtype
    config: GemmConfig
    act: str = "gelu"
    weight: str = "NK"
    sizes: tuple[int, int, int] = (SIZE, SIZE, SIZE)  # M, N, K


def cases(capability: tuple[int, int], everything: bool = False) -> Iterator[Case]:
    """The cases for a GPU: each tuned configuration in its fullest form, or in every form."""
    for dtype in (torch.bfloat16, torch.float32):
        for op in FULLEST:
            for config in configs(op, dtype, capability):
                yield Case(capability, op, dtype, config)
    signaled = configs("gemm_signaled", torch.bfloat16, capability)
    yield Case(capability, "gemm_signaled", torch.bfloat16, signaled[0])
    for sizes in EDGES:
        for op in (*FULLEST, "gemm_signaled") if everything or capability >= (9, 0) else ():
            config = default_config(op, torch.bfloat16, capability, *sizes)
            yield Case(capability, op, torch.bfloat16, config, sizes=sizes)
    if not everything:
        return
    for op in (*FULLEST, *REST):
        for config in configs(op, torch.float16, capability):
            for weight in ("NK", "KN"):
                yield Case(capability, op, torch.float16, config, weight=weight)
        for config in configs(op, torch.bfloat16, capability):
            for act in ACTIVATIONS if op != "gemm_signaled" else ("none",):
                yield Case(capability, op, torch.bfloat16, config, act)
        if capability >= (9, 0):  # operands that the copy engine cannot read
            for config in configs(op, torch.bfloat16, available.OLDEST_CAPABILITY):
                yield Case(capability, op, torch.bfloat16, config)


def compile_case(case: Case) -> list[dict[str, Any]]:
    """Compile one case by the very launcher that serves it: a row a kernel."""
    from tpkernels.kernels.ahead_of_time import compiling_for

    # The last of float32 is the one for products that PyTorch's setting keeps in float32.
    ieee = (
        case.dtype is torch.float32
        and case.config == configs(case.op, case.dtype, case.capability)[-1]
    )
    torch.backends.cuda.matmul.fp32_precision = "ieee" if ieee else "tf32"
    with compiling_for(case.capability) as compiled:
        launch(case)
    common = {
        "architecture": "sm_{}{}".format(*case.capability),
        "op": case.op,
        "dtype": str(case.dtype).removeprefix("torch."),
        "act": case.act,
        "weight": case.weight,
        "config": str(case.config),  # asked for; odd sizes take smaller tiles
        "sizes": case.sizes,
        "precision": "tf32" if case.dtype is torch.float32 and not ieee else "ieee",
        "blocks": case.config.blocks,
        "shared_limit": SHARED_LIMIT[case.capability][0] << 10,
    }
    return [{**common, **asdict(kernel), "resident": resident(case, kernel)} for kernel in compiled]


def resident(case: Case, kernel: CompiledKernel) -> int:
    """Blocks of ``kernel`` that fit a multiprocessor at the same time."""
    shared = (SHARED_LIMIT[case.capability][1] << 10) // (kernel.shared + (1 << 10))
    registers = -(-kernel.registers // 8) * 8 * 32 * case.config.warps  # allocated by eights
    return min(shared, REGISTERS // registers)


def launch(case: Case) -> None:
    """Call the launcher of a case's op on memory that nothing was written to."""
    from tpkernels.kernels.gemm_act import gemm_act, gemm_signaled
    from tpkernels.kernels.gemm_dact import gemm_dact
    from tpkernels.kernels.gemm_dglu import gemm_dglu
    from tpkernels.kernels.gemm_glu import gemm_glu
    from tpkernels.kernels.row_chunks import RowChunks
    from tpkernels.kernels.tile_counters import TileCounters

    act, config, (m, n, k) = case.act, case.config, case.sizes

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=case.dtype)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return matrix(rows, columns) if case.weight == "NK" else matrix(columns, rows).t()

    bias = torch.empty(n, dtype=case.dtype)
    match case.op:
        case "gemm_act" | "gemm_act_aux":
            aux = case.op == "gemm_act_aux"
            gemm_act(matrix(m, k), weight(n, k), bias, act, aux=aux, config=config)
        case "gemm_signaled":
            counters, chunks = TileCounters(bias.device), RowChunks(max(1, m // 4), 64)
            x, out = matrix(m, k), matrix(m, n)
            gemm_signaled(x, weight(n, k), out, counters, chunks, config=config)
            counters.wait_until(0, 1)
            counters.wait_for_more(0, 1)
        case "gemm_dact" | "gemm_dact_dbias":
            dbias = case.op == "gemm_dact_dbias"
            gemm_dact(matrix(m, k), weight(k, n), matrix(m, n), act, dbias=dbias, config=config)
        case "gemm_glu" | "gemm_glu_aux":
            aux, w = case.op == "gemm_glu_aux", weight(n, k)
            gemm_glu(matrix(m, k), w, w, bias, bias, act, aux=aux, config=config)
        case "gemm_dglu":
            gate = matrix(m, n)
            gemm_dglu(matrix(m, k), weight(k, n), gate, gate, act, config=config)


def is_unfit(row: dict[str, Any]) -> bool:
    """Whether a kernel exceeds shared memory; of sizes that are read in vectors, also whether it
    spills registers, or fewer blocks fit a multiprocessor than its configuration is made for.
    """
    odd = any(size % 16 for size in row["sizes"])
    wasteful = row["spilled_bytes"] > 0 or row["resident"] < row["blocks"]
    return row["shared"] > row["shared_limit"] or (wasteful and not odd)


def _capability(text: str) -> tuple[int, int]:
    known = {"sm_{}{}".format(*capability): capability for capability in SHARED_LIMIT}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; allowed: {', '.join(known)}")
    return known[text]


def main(argv: list[str] | None = None) -> int:
    """Compile, print a row a kernel as it is done, and return 0 if none is unfit."""
    parser = argparse.ArgumentParser(
        prog="python -m tpkernels.kernels.compile_check",
        description="Compile the tuned tile configurations; no GPU is needed.",
    )
    parser.add_argument(
        "architecture", nargs="*", type=_capability, default=[(8, 0), (9, 0)], metavar="sm_XY",
        help="sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120 (default: sm_80 sm_90)",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every form: hundreds of kernels")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    installed = available.triton_status()
    if not installed.available or available.interpreting():
        reason = installed.reason if not installed.available else "TRITON_INTERPRET is set"
        parser.error(f"{reason}. Fix: {installed.fix or 'unset TRITON_INTERPRET'}")
    wanted = [case for each in options.architecture for case in cases(each, options.all)]
    kernels = unfit = 0
    # Each worker is a process of its own: Triton's compiler state is one a process.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        for row in chain.from_iterable(workers.map(compile_case, wanted)):
            print(json.dumps(row) if options.json else text_of(row), flush=True)
            kernels += 1
            unfit += is_unfit(row)
    if not options.json:
        print(f"{kernels} kernels, {unfit} that spill registers or do not fit")
    return 1 if unfit else 0


def text_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['architecture']:<6} {row['op']:<15} {row['dtype']:<8} {row['act']:<9} "
        f"{row['weight']} {row['config']:<26} {row['registers']:>3} registers, "
        f"{row['spilled_bytes']:>4} bytes spilled, {row['shared'] / 1024:5.1f} KiB of "
        f"{row['shared_limit'] >> 10} KiB, {row['resident']} at once  "
        f"{' '.join(row['instructions'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
