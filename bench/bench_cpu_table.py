"""What csrc/ops/cpu_table.cpp is made from: each way of a fused CPU GEMM, interleaved in one run.

    python bench/bench_cpu_table.py [--threads 1] [--dtypes bfloat16 float32] [--rows 1 4 16 32 64]

Columns: microseconds of eager ``F.gelu(F.linear(x, w, b))`` and eager's time over that of each way
of ``tpk.ops.gemm_gelu`` (above 1: the way is faster). 20th percentiles, of calls with the same
weights (warm) or with weights rotated beyond the cache (cold). Other instruction sets' rows: set
``ONEDNN_MAX_CPU_ISA`` for oneDNN.
"""

# M tokens, N out features, K in features

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import native, ops

SHAPES = ((1536, 768), (768, 1536), (4096, 1024), (1024, 4096))  # (N, K)
WAYS = ("decode", "onednn", "library", "auto")
BEYOND_CACHE = 160 << 20  # bytes of weights; ASSUMPTION: several times the last-level cache
SECONDS = 0.4  # of calls for each row of the table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32", "float16"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32, 64, 128, 256])
    parser.add_argument("--cold", action="store_true", help="also with weights beyond the cache")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    extension = native.load()
    if extension is None:
        raise SystemExit(f"the compiled kernels are not there: {native.status().reason}")
    print(extension.cpu_table_summary(plain=True))
    print(f"{'dtype':9} {'N':>5} {'K':>5} {'M':>4} {'':5} {'eager us':>9}", *WAYS)
    with torch.no_grad():
        for dtype in (getattr(torch, name) for name in options.dtypes):
            for n, k in SHAPES:
                for m in options.rows:
                    _measure(extension, dtype, m, n, k, options.cold)


def _measure(extension: object, dtype: torch.dtype, m: int, n: int, k: int, cold: bool) -> None:
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    one = torch.randn(n, k).mul_(k**-0.5).to(dtype)
    count = BEYOND_CACHE // one.nbytes + 1 if cold else 1
    weights = [one, *(one.clone() for _ in range(count - 1))]

    def forced(way: str) -> Callable[[Tensor], Tensor]:
        def call(weight: Tensor) -> Tensor:
            extension.force_cpu_way(way)  # type: ignore[attr-defined]
            return ops.gemm_gelu(x, weight, bias)

        return call

    calls = {"eager": lambda weight: F.gelu(F.linear(x, weight, bias))}
    calls |= {way: forced(way) for way in WAYS}
    for kind, used in (("warm", weights[:1]), ("cold", weights))[: 1 + cold]:
        times: dict[str, list[float]] = {name: [] for name in calls}
        begin, turn = time.perf_counter(), 0
        while time.perf_counter() < begin + SECONDS or turn < 5 * len(calls):
            for name, call in calls.items():
                weight = used[turn % len(used)]
                turn += 1
                if kind == "warm":
                    call(weight)
                before = time.perf_counter()
                call(weight)
                times[name].append(time.perf_counter() - before)
        fast = {name: statistics.quantiles(each, n=5)[0] for name, each in times.items()}
        ratios = (f"{fast['eager'] / fast[way]:6.2f}" for way in WAYS)
        shape = f"{str(dtype)[6:]:9} {n:5} {k:5} {m:4} {kind:5}"
        print(f"{shape} {fast['eager'] * 1e6:9.1f}", *ratios, flush=True)
    extension.force_cpu_way("auto")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
