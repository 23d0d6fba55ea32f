"""`python bench/harness.py [PROGRAM] ...`: `tpkernels bench` from a checkout that is not installed.

The other scripts here are its programs. Any Python that has torch will do, from any directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(*program: str) -> int:
    """Run a program of `tpkernels bench` on this command's arguments."""
    from tpkernels.benchmarks.command import main as run

    return run([*program, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
