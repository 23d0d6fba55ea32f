"""The `tpkernels bench` command: errors are one line, and an interrupt keeps what was measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tpkernels.cli import USAGE_ERROR
from tpkernels.errors import ConfigError

INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """`bench [PROGRAM] options`; without a program, gemm_gelu and mlp.

    `bench --tune` is `bench tune`, and `bench --report` is `bench report`.

    Returns:
        0; 1 where a result was wrong; 2 for options that cannot work; 130 when interrupted.
    """
    try:
        with interruptible():
            from tpkernels.benchmarks import programs  # reads the environment

            return programs.run(argv)
    except ConfigError as error:
        print(f"tpkernels bench: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tpkernels bench: interrupted; what was written before is kept", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: with the rows that there are."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
