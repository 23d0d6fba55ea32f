"""`python bench/bench_overlap.py ...`: `tpkernels bench overlap`, from a checkout."""

from __future__ import annotations

import sys

from harness import main

if __name__ == "__main__":
    sys.exit(main("overlap"))
