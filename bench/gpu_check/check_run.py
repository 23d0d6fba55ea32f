"""A run of steps into OUT_DIR: the folder, the copy of the checkout, signals, the summary so far.

What ``bench/gpu_check.sh`` and ``bench/multi_gpu_check.sh`` share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import commit_of
from plan import Settings, environment
from runner import Interrupted, Log, Result, Runner, Step
from workspace import Workspace

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOG = "log.txt"


class Refused(Exception):
    """The run cannot start: what was given, and the fix."""


@dataclass(frozen=True)
class Check:
    """What one script runs.

    Attributes:
        name: of the script. root: the checkout.
        files: what it writes in OUT_DIR. ours: whether those there are an earlier run's.
        steps: given the runner and the results so far, which it may look at between two steps.
        write: the summary, also while more is to come; returns the terminal's text.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    ours: Callable[[Path], bool]
    steps: Callable[[Settings, Workspace, Runner, list[Result]], Iterator[Step]]
    write: Callable[..., str]


def settings_of(check: Check, options: Any) -> Settings:
    """Of the command line, with OUT_DIR ready to be written to.

    Raises:
        Refused: OUT_DIR cannot be written, or holds what no run wrote.
    """
    return Settings(
        out=_output_folder(check, options.out_dir),
        dry_run=options.dry_run,
        quick=options.quick or options.dry_run,
        commit=options.commit or commit_of(check.root),
    )


def run(check: Check, settings: Settings, began: float, seconds: float) -> int:
    """0 if every step that ran passed, else 1; all within ``seconds`` of ``began``.

    Raises:
        Refused: by a step.
    """
    out = settings.out
    with (
        tempfile.TemporaryDirectory(prefix=f"{check.name.replace('_', '-')}-") as folder,
        Log(out / LOG) as log,
    ):
        space = Workspace(check.root, Path(folder), out)
        results: list[Result] = []

        def keep(*, running: bool = True) -> str:
            """What there is so far, for when this process is killed."""
            space.keep_table()
            spent = time.monotonic() - began
            return check.write(out, results, settings, spent, running=running)

        environ = environment(settings, space)
        runner = Runner(log, space.tree, environ, began + seconds, space.keep_table, check.name)
        try:
            keep()
            space.copy(with_extension=settings.dry_run)
            for step in check.steps(settings, space, runner, results):
                results.append(runner.run(step))
                keep()
        except Interrupted as interrupted:
            runner.say(f"interrupted by {interrupted}")
            results += runner.unfinished
        except Refused:
            keep(running=False)
            raise
        text = keep(running=False)
    _remove_parts(check, out)
    print(text)
    return 0 if all(result.fine for result in results) else 1


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Each of :data:`STOP_SIGNALS` raises :class:`Interrupted`, once."""

    def interrupt(number: int, _: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, interrupt)
    yield


def _output_folder(check: Check, out: Path) -> Path:
    fix = "Fix: name a directory that can be written"
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = [name for name in check.files if os.path.lexists(out / name)]
        if present and not check.ours(out):
            raise Refused(
                f"OUT_DIR {out} holds {', '.join(present)}, of no earlier run: they would be "
                "replaced. Fix: name another directory, or move them away"
            )
        for name in present:  # a run never mixes with an older one
            (out / name).unlink()
        _remove_parts(check, out)
        (out / LOG).touch()
    except FileExistsError as error:
        raise Refused(f"OUT_DIR {out} is a file. {fix}") from error
    except OSError as error:
        raise Refused(f"OUT_DIR {out} cannot be written: {error.strerror}. {fix}") from error
    return out.resolve()


def _remove_parts(check: Check, out: Path) -> None:
    """What a step that was killed in the middle of writing left of our files."""
    for name in check.files:
        (out / f"{name}.part").unlink(missing_ok=True)
