"""What goes wrong in a rank, told in the parent: one error that names every rank involved."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Literal

# What Gloo says on the ranks whose peer died or left: a consequence, never the cause.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket timeout|remote process exited"
    r"|op\.preamble\.length|application timeout|has left the group",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        rank: the rank in the pool.
        kind: `"died"` (the process is gone), `"raised"` (an exception left the function) or
            `"hung"` (it had not returned when the time was up).
        type_name: qualified name of the exception, when `kind == "raised"`.
        message: the exception's text, the exit status, or how long the rank was waited for.
        traceback: the remote traceback, or the Python stack the rank hung or died in.
        exception: the exception itself where it could be pickled.
    """

    rank: int
    kind: Literal["died", "raised", "hung"]
    message: str
    type_name: str = ""
    traceback: str = ""
    exception: BaseException | None = field(default=None, compare=False)

    @property
    def lost_peer(self) -> bool:
        """Whether this exception only says that another rank has gone away."""
        return self.kind == "raised" and bool(_LOST_PEER.search(self.message))

    def headline(self) -> str:
        """One line: which rank, and what happened to it."""
        if self.kind == "raised":
            first, _, rest = self.message.partition("\n")
            return f"rank {self.rank} raised {self.type_name}: {first}{' ...' if rest else ''}"
        return f"rank {self.rank} {self.message}"


class RankError(RuntimeError):
    """A function run by `RankPool.run` failed on at least one rank.

    The failure shown first is the cause as far as can be told: a rank that died, else the lowest
    rank that raised something of its own, else the ranks that lost a peer or hung.

    Attributes:
        rank, kind, type_name, remote_traceback: of that first failure.
        failures: every failed rank, the first failure at the front.
    """

    def __init__(self, failures: list[RankFailure], world_size: int) -> None:
        self.failures = failures
        first = failures[0]
        self.rank = first.rank
        self.kind = first.kind
        self.type_name = first.type_name
        self.remote_traceback = first.traceback
        super().__init__(_describe(failures, world_size))


class RankTimeoutError(RankError, TimeoutError):
    """Ranks did not return within the time limit; the pool was killed."""


def rank_error(failures: list[RankFailure], world_size: int) -> RankError:
    """The error to raise for `failures` (in any order), the likely cause first."""
    ordered = sorted(failures, key=lambda failure: (_precedence(failure), failure.rank))
    only_hangs = all(failure.kind == "hung" for failure in ordered)
    error = (RankTimeoutError if only_hangs else RankError)(ordered, world_size)
    error.__cause__ = ordered[0].exception
    return error


def exit_status(returncode: int) -> str:
    """`"exited with status 3"`, `"was killed by SIGKILL"`."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _precedence(failure: RankFailure) -> int:
    if failure.kind == "died":
        return 0
    if failure.kind == "raised":
        return 2 if failure.lost_peer else 1
    return 3


def _describe(failures: list[RankFailure], world_size: int) -> str:
    first, *others = failures
    lines = [f"{first.headline()} (of {world_size} ranks)"]
    if "\n" in first.message:
        lines.extend(f"  {line}" for line in first.message.splitlines()[1:])
    lines.extend(f"  also: {failure.headline()}" for failure in others)
    for failure in failures:
        # A peer's stack is worth its lines only where it shows what that rank waits for.
        if failure.traceback and (failure is first or failure.kind == "hung"):
            lines.append(f"--- rank {failure.rank}, {_TITLES[failure.kind]} ---")
            lines.append(failure.traceback.rstrip())
    return "\n".join(lines)


_TITLES = {"died": "where it died", "raised": "traceback", "hung": "where it hangs"}
