"""``bench/multi_gpu_check.sh``: correctness and overlap between GPUs, of a copy of this checkout.

Built like ``bench/gpu_check``, whose runner it uses; needs nothing but Python to start.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent / "gpu_check"))

import comparison  # noqa: E402
import multi_steps  # noqa: E402
from check_run import Check, Refused, interruptible, run, settings_of  # noqa: E402
from runner import Interrupted  # noqa: E402

SECONDS, QUICK_SECONDS = 1770, 570  # of 30 and 10 minutes
USAGE_ERROR = 2


def main(argv: list[str]) -> int:
    """0 if every step that ran passed, 1 if not, 2 if the run could not start."""
    began = time.monotonic()
    options = _parser().parse_args(argv)
    check = Check(
        "multi_gpu_check",
        HERE.parents[1],
        comparison.FILES,
        comparison.ours,
        multi_steps.steps,
        comparison.write,
    )
    try:
        settings = settings_of(check, options)
        with interruptible():
            seconds = QUICK_SECONDS if options.quick else SECONDS
            return run(check, settings, began, seconds)
    except Refused as refused:
        print(f"multi_gpu_check: error: {refused}", file=sys.stderr)
        return USAGE_ERROR
    except Interrupted:  # before there was anything to sum up
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multi_gpu_check.sh",
        description="On a machine with two or more GPUs: every overlap strategy over NCCL against "
        "the dense result, backward, CUDA graphs, late and killed ranks, peers' memory, and times "
        "against plain NCCL, DTensor and PyTorch's async tensor parallelism. Each step under its "
        "own time limit, in a temporary copy of this checkout. Under 30 minutes.",
        epilog="OUT_DIR gets report.md, results.jsonl, chart.svg and log.txt, as far as their "
        "steps came. Exit status: 0 if every step that ran passed, 1 if not, 2 if the run could "
        "not start. PYTHON names the Python (default python3).",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="made if it is not there")
    parser.add_argument("--quick", action="store_true", help="the most telling part, in 10 minutes")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="without GPUs: the same programs on 2 CPU ranks over Gloo at tiny sizes; what needs "
        "CUDA is left out",
    )
    parser.add_argument("--commit", metavar="TEXT", help="the commit to name, without git")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
