"""How long a benchmark may take, and what it says meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Budget:
    """Seconds for a whole run; None for no limit."""

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    def spent(self) -> float:
        return self._clock() - self._start

    def left(self) -> float:
        """Infinite without a limit; never negative."""
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.spent())


class Progress:
    """One line that changes on a terminal, one line a case elsewhere; on stderr.

    `left_out` gathers what was not done, as (what, why), for :meth:`close` to say.
    """

    def __init__(self, total: int, budget: Budget, stream: TextIO | None = None) -> None:
        self.total = total
        self.budget = budget
        self.stream = stream or sys.stderr
        self.left_out: list[tuple[str, str]] = []
        self._done = 0
        self._width = 0

    def step(self, text: str) -> None:
        """The next case begins."""
        self._done += 1
        limit = "" if self.budget.seconds is None else f" of {self.budget.seconds:g}"
        line = f"[{self._done}/{self.total}] {self.budget.spent():.0f}{limit} s  {text}"
        if self.stream.isatty():
            self.stream.write("\r" + line[:119].ljust(self._width))
            self._width = min(len(line), 119)
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def skip(self, text: str, why: str) -> None:
        """A case is left out."""
        self._done += 1
        self.left_out.append((text, why))

    def close(self) -> None:
        """Clear the line; say what was left out, by reason."""
        if self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self._width = 0
        reasons: dict[str, list[str]] = {}
        for text, why in self.left_out:
            reasons.setdefault(why, []).append(text)
        for why, texts in reasons.items():
            shown = "; ".join(texts[:4]) + ("; ..." if len(texts) > 4 else "")
            noun = "case" if len(texts) == 1 else "cases"
            self.stream.write(f"left out {len(texts)} {noun}, {why}: {shown}\n")
        self.stream.flush()
