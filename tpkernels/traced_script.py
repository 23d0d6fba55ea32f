"""One rank of ``tpkernels trace``: runs the user's program as Python would, and records around it.

The program need not know: it may start and destroy process groups, exit, raise, or be ended by the
launcher because another rank failed. What was recorded is written in any case.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tpkernels import instrument, launch
from tpkernels.errors import ConfigError, TPKernelsError
from tpkernels.trace.channel import Channel
from tpkernels.trace.outputs import Outputs
from tpkernels.trace.recorder import IntervalRecorder
from tpkernels.trace.recording import Recording
from tpkernels.trace.session import compared, described, finish, one_at_a_time, taken

_PYTHON = re.compile(r"python[0-9.]*(\.exe)?$")


@dataclass(frozen=True)
class Program:
    """What to run: ``how`` is ``script``, ``module`` or ``code``."""

    how: str
    target: str
    arguments: list[str]

    @staticmethod
    def parse(words: list[str]) -> Program:
        """From a command line: ``[python] script.py ...``, ``python -m module ...``, ``python -c
        code ...`` or ``tpkernels command ...``.

        Raises:
            ConfigError: it is none of these, or its script is not there.
        """
        rest = words[1:] if words and _PYTHON.match(Path(words[0]).name) else words
        if not rest:
            raise ConfigError(
                f"tpkernels trace: no program in {words}. Fix: tpkernels trace -- python script.py"
            )
        first = rest[0]
        if first in ("-m", "-c") and rest is not words and len(rest) > 1:
            return Program("module" if first == "-m" else "code", rest[1], rest[2:])
        if Path(first).name == "tpkernels" and rest is words:
            return Program("module", "tpkernels", rest[1:])
        if first.startswith("-") or not Path(first).is_file():
            raise ConfigError(
                f"tpkernels trace: {first!r} is not a Python script; allowed after --: "
                "[python] script.py ..., python -m module ..., python -c code ..., "
                "tpkernels command .... Fix: name one of these"
            )
        return Program("script", first, rest[1:])

    def run(self) -> None:
        """In this process, as ``__main__``."""
        if self.how == "script":
            sys.argv = [self.target, *self.arguments]
            sys.path[0] = str(Path(self.target).resolve().parent)
            runpy.run_path(self.target, run_name="__main__")
        elif self.how == "module":
            sys.argv = [self.target, *self.arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *self.arguments]
            sys.path[0] = ""
            exec(compile(self.target, "<string>", "exec"), {"__name__": "__main__"})


def run(program: Program, outputs: Outputs, directory: Path | None) -> int:
    """Run ``program`` on this rank; returns the exit status to end with.

    Args:
        directory: where each rank leaves its recording for the launcher to merge; None: rank 0
            merges, or each rank leaves its own beside the page when one failed.

    Raises:
        CommunicationError: a rank did not come to the start.
    """
    channel = Channel.of_launcher()
    if channel is None:
        raise ConfigError(
            "tpkernels trace: RANK is set, but this rank was started by neither torchrun nor "
            "--nproc, so that ranks cannot compare their clocks. Fix: start them with one of these"
        )
    clock = time.perf_counter_ns
    with one_at_a_time:
        points = compared(channel, "start", clock)
        recorder = IntervalRecorder(clock)
        rank, world_size = channel.rank, channel.world_size
        path = outputs.of_rank(rank) if directory is None else directory / f"rank{rank}.json"
        writing = threading.Lock()

        def write(error: str | None, status: int | None, wait: bool) -> Recording:
            recording = taken(recorder, rank, world_size, points, wait)
            recording.error, recording.exit_status = error, status
            with writing:
                recording.write(path)
            return recording

        watch = _Watch(lambda: write("the launcher ended it: SIGTERM", None, wait=False))
        instrument.record_to(recorder)
        try:
            status, error = _outcome(program)
        finally:
            instrument.record_to(None)
        recording = write(error, status, wait=status == 0)
        if status != 0:
            channel.fail(error or f"it exited with status {status}")
        elif directory is None:
            finish(recording, channel, clock, outputs)
            path.unlink()
        else:
            try:
                recording.clock += compared(channel, "end", clock)
            except TPKernelsError:
                pass  # another rank failed: clocks were compared once, at the start
            else:
                recording.write(path)
        watch.end()
        return status


def _outcome(program: Program) -> tuple[int, str | None]:
    """The exit status that Python would end with, and what is wrong in words."""
    try:
        program.run()
    except SystemExit as ended:
        if ended.code is None or ended.code == 0:
            return 0, None
        if isinstance(ended.code, int):
            return ended.code, f"it exited with status {ended.code}"
        print(ended.code, file=sys.stderr)
        return 1, f"it exited: {ended.code}"
    except KeyboardInterrupt as error:
        return launch.INTERRUPTED, described(error)
    except Exception as error:
        error.__traceback__ = _own_frames(error.__traceback__)
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            traceback.print_exception(error)
        return launch.report_failure(error), described(error)
    return 0, None


def _own_frames(found: TracebackType | None) -> TracebackType | None:
    """Without those of this file and of ``runpy``, as if Python had run the program itself."""
    own = (__file__, "<frozen runpy>", runpy.__file__)
    at = found
    while at is not None and at.tb_frame.f_code.co_filename in own:
        at = at.tb_next
    return at or found


class _Watch:
    """Writes when the launcher ends this rank, even while the main thread waits in C++.

    Python's own handlers run between two instructions of the main thread, which may wait for a
    collective for ever. The byte that the interpreter writes at once is read by another thread;
    it writes, and then ends the process as if nobody had handled the signal.
    """

    def __init__(self, write: Callable[[], Any]) -> None:
        self._write = write
        self._read, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._before = signal.signal(signal.SIGTERM, self._handle)
        signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="tpkernels-trace").start()

    def _handle(self, number: int, frame: Any) -> None:
        """The thread does it."""

    def _watch(self) -> None:
        while byte := os.read(self._read, 1):
            if byte[0] != signal.SIGTERM:
                continue
            try:
                self._write()
            finally:
                if signal.getsignal(signal.SIGTERM) == self._handle:  # the program has no other
                    # `signal.signal` is for the main thread only.
                    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
                    os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Back to what was before."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        os.close(self._written)
