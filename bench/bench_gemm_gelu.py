"""`python bench/bench_gemm_gelu.py ...`: `tpkernels bench gemm_gelu`, from a checkout."""

from __future__ import annotations

import sys

from harness import main

if __name__ == "__main__":
    sys.exit(main("gemm_gelu"))
