"""``bench/gpu_check.sh``: build, test and measure a copy of this checkout; write a summary.

Needs nothing but Python to start: torch, pytest and the rest are looked for by the steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import summary
from check_run import Check, Refused, interruptible, run, settings_of
from plan import Settings, machine_step, steps
from runner import Interrupted, Result, Runner, Step
from workspace import Workspace

SECONDS, QUICK_SECONDS = 470, 170  # the rest of 8 and 3 minutes is for start and summary
USAGE_ERROR = 2
ROOT = Path(__file__).resolve().parents[2]


_TORCH_FIX = "Fix: PYTHON=/path/to/a/python/with/torch, or pip install 'torch>=2.11'"


def main(argv: list[str]) -> int:
    """0 if every step that ran passed, 1 if not, 2 if the run could not start."""
    began = time.monotonic()
    options = _parser().parse_args(argv)
    check = Check("gpu_check", ROOT, summary.FILES, summary.ours, _steps, summary.write)
    seconds = SECONDS if options.dry_run or not options.quick else QUICK_SECONDS
    try:
        settings = settings_of(check, options)
        with interruptible():
            return run(check, settings, began, seconds)
    except Refused as refused:
        print(f"gpu_check: error: {refused}", file=sys.stderr)
        return USAGE_ERROR
    except Interrupted:  # before there was anything to sum up
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description="Build the extension, run the tests marked gpu and the benchmarks, each step "
        "under its own time limit, in a temporary copy of this checkout. Under 8 minutes.",
        epilog="OUT_DIR gets summary.md, log.txt, junit.xml, results.jsonl, table.json, report.md "
        "and chart.svg, as far as their steps came. Exit status: 0 if every step that ran passed, "
        "1 if not, 2 if the run could not start. PYTHON names the Python (default python3).",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="made if it is not there")
    parser.add_argument("--quick", action="store_true", help="the most telling part, in 3 minutes")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="without a GPU: leave out what needs CUDA, do the rest in a small form; an extension "
        "that is built already is used as it is",
    )
    parser.add_argument("--commit", metavar="TEXT", help="the commit to name, without git")
    return parser


def _steps(
    settings: Settings, space: Workspace, runner: Runner, results: list[Result]
) -> Iterator[Step]:
    yield from steps(settings, space, _look(runner, settings, results))


def _look(runner: Runner, settings: Settings, results: list[Result]) -> dict[str, str]:
    """The machine's facts by name; refuses one that the run cannot use."""
    found = runner.run(machine_step(settings))
    results.append(found)
    facts = dict(line.split(": ", 1) for line in found.output.splitlines() if ": " in line)
    if found.state == "timed out" and "cuda" not in facts:
        if importlib.util.find_spec("torch") is None:
            raise Refused(f"torch is not there for {sys.executable}. {_TORCH_FIX}")
        runner.say("machine: what it had not told is not known; torch is there, so going on")
        return facts
    if "torch" not in facts:
        raise Refused(f"{sys.executable} cannot import torch ({found.detail}). {_TORCH_FIX}")
    if facts.get("cuda") == "no" and not settings.dry_run:
        raise Refused(
            f"torch {facts['torch']} sees no CUDA device. Fix: run on a machine with a GPU and a "
            "CUDA torch, or give --dry-run to check everything else"
        )
    return facts


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
