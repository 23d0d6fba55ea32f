"""Runs one step after another, each under its own limit and all under one deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

GRACE = 8.0  # seconds between asking a step to end and killing it
RESERVE = 12.0  # seconds that the last step and the summary need
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
        last: may use the time reserved for the end.
        env: added to the environment.
    """

    name: str
    command: tuple[str, ...] = ()
    limit: float = 60.0
    least: float = 5.0
    skipped: str | None = None
    last: bool = False
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """How a step ended: passed, failed, timed out, interrupted, skipped or not run."""

    name: str
    state: str
    seconds: float = 0.0
    detail: str = ""
    output: str = ""

    @property
    def fine(self) -> bool:
        """Whether it speaks against exit status 0."""
        return self.state in ("passed", "skipped", "not run")


class Log:
    """One file with the output of all steps."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Log:
        self.file: IO[bytes] = self.path.open("wb")
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text.encode())
        self.file.flush()

    def since(self, offset: int) -> str:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


class Runner:
    """Runs steps in ``folder`` until ``deadline`` (of ``time.monotonic``)."""

    def __init__(self, log: Log, folder: Path, env: dict[str, str], deadline: float) -> None:
        self.log, self.folder, self.env, self.deadline = log, folder, env, deadline
        self.unfinished: list[Result] = []  # the step that an interrupt ended

    def say(self, text: str) -> None:
        """A line of progress, and in the log."""
        print(f"gpu_check: {text}", flush=True)
        self.log.write(f"\n##### {text}\n")

    def run(self, step: Step) -> Result:
        """Run ``step`` to its end or to its limit; what it leaves running is killed.

        Raises:
            Interrupted: a signal came; the step is in ``unfinished``.
        """
        left = self.deadline - time.monotonic() - (0.0 if step.last else RESERVE)
        if step.skipped is not None:
            result = Result(step.name, "skipped", detail=step.skipped)
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
            )
        except OSError as error:
            return Result(step.name, "failed", 0.0, f"{command[0]}: {error.strerror}")
        state = "failed"
        try:
            process.wait(limit)
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
            result = Result(step.name, state, time.monotonic() - began, detail, output)
            self.say(f"{step.name}: {state}, {result.seconds:.0f} s")
            if state == "interrupted":
                self.unfinished.append(result)
        return result


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
