"""`python bench/bench_zero3.py ...`: `tpkernels bench zero3`, from a checkout."""

from __future__ import annotations

import sys

from harness import main

if __name__ == "__main__":
    sys.exit(main("zero3"))
