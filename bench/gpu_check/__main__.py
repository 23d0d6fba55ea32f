"""``bench/gpu_check.sh``: build, test and measure a copy of this checkout; write a summary.

Needs nothing but Python to start: torch, pytest and the rest are looked for by the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import summary
from machine import commit_of
from plan import Settings, environment, machine_step, steps
from runner import Interrupted, Log, Result, Runner
from workspace import Workspace

SECONDS, QUICK_SECONDS = 470, 170  # the rest of 8 and 3 minutes is for start and summary
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
USAGE_ERROR = 2
ROOT = Path(__file__).resolve().parents[2]


_TORCH_FIX = "Fix: PYTHON=/path/to/a/python/with/torch, or pip install 'torch>=2.11'"


class Refused(Exception):
    """The run cannot start: what was given, and the fix."""


def main(argv: list[str]) -> int:
    """0 if every step that ran passed, 1 if not, 2 if the run could not start."""
    began = time.monotonic()
    options = _parser().parse_args(argv)
    try:
        out = _output_folder(options.out_dir)
        with _interruptible():
            return _check(options, out, began)
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


def _output_folder(out: Path) -> Path:
    fix = "Fix: name a directory that can be written"
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = [name for name in summary.FILES if os.path.lexists(out / name)]
        if present and not summary.ours(out):
            raise Refused(
                f"OUT_DIR {out} holds {', '.join(present)}, of no earlier run: they would be "
                "replaced. Fix: name another directory, or move them away"
            )
        for name in present:  # a run never mixes with an older one
            (out / name).unlink()
        _remove_parts(out)
        (out / summary.LOG).touch()
    except FileExistsError as error:
        raise Refused(f"OUT_DIR {out} is a file. {fix}") from error
    except OSError as error:
        raise Refused(f"OUT_DIR {out} cannot be written: {error.strerror}. {fix}") from error
    return out.resolve()


def _remove_parts(out: Path) -> None:
    """What a step that was killed in the middle of writing left of our files."""
    for name in summary.FILES:
        (out / f"{name}.part").unlink(missing_ok=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Each of :data:`STOP_SIGNALS` raises :class:`Interrupted`, once."""

    def interrupt(number: int, _: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    yield


def _check(options: argparse.Namespace, out: Path, began: float) -> int:
    settings = Settings(
        out=out,
        dry_run=options.dry_run,
        quick=options.quick or options.dry_run,
        commit=options.commit or commit_of(ROOT),
    )
    seconds = SECONDS if options.dry_run or not options.quick else QUICK_SECONDS
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, Log(out / summary.LOG) as log:
        space = Workspace(ROOT, Path(folder), out)
        results: list[Result] = []

        def keep(*, running: bool = True) -> str:
            """What there is so far, for when this process is killed."""
            space.keep_table()
            spent = time.monotonic() - began
            return summary.write(out, results, settings, spent, running=running)

        environ = environment(settings, space)
        runner = Runner(log, space.tree, environ, began + seconds, space.keep_table)
        try:
            keep()
            space.copy(with_extension=settings.dry_run)
            facts = _look(runner, settings, results)
            for step in steps(settings, space, facts):
                keep()
                results.append(runner.run(step))
        except Interrupted as interrupted:
            runner.say(f"interrupted by {interrupted}")
            results += runner.unfinished
        except Refused:
            keep(running=False)
            raise
        text = keep(running=False)
    _remove_parts(out)
    print(text)
    return 0 if all(result.fine for result in results) else 1


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
