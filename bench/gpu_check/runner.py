"""Runs one step after another, each under its own limit and all under one deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lifeline import tied_to_us

GRACE = 8.0  # seconds between asking a step to end and killing it
RESERVE = 12.0  # seconds that the last step and the summary need
TICK = 2.0  # seconds between what is done while a step runs
LOG_BYTES = 8 << 20  # what is kept of a longer log: its two ends
_ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Warning)\b.*|.*\b(error|fatal|FAILED)\b.*")


class Interrupted(Exception):
    """The whole run is to end now."""


@dataclass(frozen=True)
class Step:
    """A command, and how long it may take.

    Attributes:
        command: ``{seconds}`` in it becomes the time it may plan with.
        limit: seconds until it is stopped; least: not started with less left.
        skipped: why it is no part of this run; None: it is.
        failed: why it cannot run though it is part of it.
        informative: what it finds does not fail the run.
        last: may use the time reserved for the end.
        env: added to the environment.
    """

    name: str
    command: tuple[str, ...] = ()
    limit: float = 60.0
    least: float = 5.0
    skipped: str | None = None
    failed: str | None = None
    informative: bool = False
    last: bool = False
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a step ended: passed, failed, timed out, interrupted, skipped, not run, or informative
    (an informative step that did not pass: ``detail`` says how it ended)."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""
    output: str = ""

    @property
    def fine(self) -> bool:
        """Whether it speaks against exit status 0."""
        return self.state in ("passed", "skipped", "not run", "informative")


class Log:
    """One file with the output of all steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Log:
        self.file: IO[bytes] = self.path.open("wb")
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        self.shorten()

    def write(self, text: str) -> None:
        self.file.write(text.encode())
        self.file.flush()

    def since(self, offset: int) -> str:
        """What was written from ``offset`` on, without its middle where that is too long."""
        with self.path.open("rb") as file:
            return _ends(file, offset, LOG_BYTES)[0].decode(errors="replace")

    def shorten(self) -> None:
        """Cut the middle out of a file longer than :data:`LOG_BYTES`, and say so there."""
        with self.path.open("rb") as file:
            kept, left_out = _ends(file, 0, LOG_BYTES)
        if left_out:
            self.path.write_bytes(kept)


def _ends(file: IO[bytes], offset: int, most: int) -> tuple[bytes, int]:
    """From ``offset`` on: all, or ``most`` bytes in which a line stands for the middle; and how
    many bytes were left out."""
    length = file.seek(0, os.SEEK_END) - offset
    file.seek(offset)
    if length <= most:
        return file.read(), 0
    half = most // 2 - 100
    left_out = length - 2 * half
    head = file.read(half)
    file.seek(-half, os.SEEK_END)
    text = f"\n##### {left_out} bytes are left out here: the output was longer than {most} bytes\n"
    return head + text.encode() + file.read(), left_out


class Runner:
    """Runs steps in ``folder`` until ``deadline`` (of ``time.monotonic``)."""

    def __init__(
        self,
        log: Log,
        folder: Path,
        env: dict[str, str],
        deadline: float,
        meanwhile: Callable[[], None] = lambda: None,
        name: str = "gpu_check",
    ) -> None:
        self.log, self.folder, self.env, self.deadline = log, folder, env, deadline
        self.meanwhile = meanwhile  # called every TICK while a step runs
        self.name = name  # of the script, before each line of progress
        self.unfinished: list[Result] = []  # the step that an interrupt ended

    def say(self, text: str) -> None:
        """A line of progress, and in the log."""
        print(f"{self.name}: {text}", flush=True)
        self.log.write(f"\n##### {text}\n")

    def run(self, step: Step) -> Result:
        """Run ``step`` to its end or to its limit; what it leaves running is killed.

        Raises:
            Interrupted: a signal came; the step is in ``unfinished``.
        """
        left = self.deadline - time.monotonic() - (0.0 if step.last else RESERVE)
        if step.skipped is not None:
            result = Result(step.name, "skipped", detail=step.skipped)
        elif step.failed is not None:
            result = Result(step.name, "failed", detail=step.failed)
        elif left < step.least:
            result = Result(step.name, "not run", detail="no time left")
        else:
            return self._run(step, min(step.limit, left))
        self.say(f"{step.name}: {result.state}, {result.detail}")
        return result

    def _run(self, step: Step, limit: float) -> Result:
        # Half of the grace is for a step that ends by itself at the time it planned with.
        planned = max(1, round(limit - min(15.0, limit / 4)))
        command = [word.replace("{seconds}", str(planned)) for word in step.command]
        self.say(f"{step.name} (at most {limit:.0f} s)")
        offset, began = self.log.file.tell(), time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=self.log.file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied_to_us(),
            )
        except OSError as error:
            return Result(step.name, "failed", 0.0, f"{command[0]}: {error.strerror}")
        state = "failed"
        try:
            self._wait(process, began + limit)
            state = "passed" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "timed out"
            _end(process)
        except Interrupted:
            state = "interrupted"
            _end(process)
            raise
        finally:
            _kill_group(process)
            self.log.file.seek(0, os.SEEK_END)
            output = self.log.since(offset)
            detail = "" if state == "passed" else _error(output)
            if state == "failed" and process.returncode < 0:
                detail = f"killed by signal {-process.returncode}; {detail}"
            if step.informative and state in ("failed", "timed out"):
                state, detail = "informative", f"{state}: {detail}"
            result = Result(step.name, state, time.monotonic() - began, detail, output)
            self.say(f"{step.name}: {state}, {result.seconds:.0f} s")
            if state == "interrupted":
                self.unfinished.append(result)
        return result

    def _wait(self, process: subprocess.Popen[bytes], until: float) -> None:
        """Until it ends or the time comes, which raises TimeoutExpired."""
        while True:
            left = until - time.monotonic()
            try:
                process.wait(min(max(left, 0.0), TICK))
                return
            except subprocess.TimeoutExpired:
                if left <= TICK:
                    raise
                self.meanwhile()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask as Ctrl-C does, so that what was found is written; then the group is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(output: str) -> str:
    """The line that says most: the first that reads like an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = next((line for line in lines if _ERROR.match(line)), lines[-1] if lines else "")
    return found[:160]
