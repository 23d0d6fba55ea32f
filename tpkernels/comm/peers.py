"""Makes the peer group of a process group, or agrees on why it cannot be.

The ranks meet in the process group's store. Each says which host it is on and what it can; if all
share one host, the first makes the memory and hands it to the others; and each says how that went.
All read the same answers, so all come to the same conclusion.
"""

# R ranks

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from tpkernels import native
from tpkernels.errors import CommunicationError

SPANS_HOSTS = "its ranks share no host"
SWITCHED_OFF = "TPKERNELS_NATIVE=0"

# How long the rank that made the memory waits for the others to come for it. ASSUMPTION: all have
# just been heard of in the store, so that only one that cannot come needs longer.
_HAND_OVER_SECONDS = 30.0

# How much later than this one others may notice that they cannot be connected. ASSUMPTION: all
# began within that time, as they had just met.
_GIVING_UP_SECONDS = 1.0

# Between two looks for the word of others: more and more, as those that are late come much later.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.05


@dataclass(frozen=True)
class Peers:
    """A peer group and why it is one; or None and why not, the same on all ranks."""

    group: Any  # _C.PeerGroup
    reason: str


class Meeting:
    """Where the R ranks of a group leave word for each other while ``what`` is made for it.

    Raises:
        CommunicationError: from any method, naming the ranks that left no word in time.
    """

    def __init__(
        self, store: Any, rank: int, size: int, name: str, seconds: float, what: str = "tpshm"
    ) -> None:
        self.rank, self.size, self.name, self.seconds = rank, size, name, seconds
        self.what = what
        # A store that served a group of this name before keeps what was said then. All ranks of
        # that group had come before any comes again.
        self.prefix = f"tpshm/{(store.add('tpshm/arrivals', 1) - 1) // size}"
        self._store = store
        self._end = time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Of this stage of the meeting; never so little that word already left is not read."""
        return max(1.0, self._end - time.monotonic())

    def next_stage(self) -> None:
        """All were there a moment ago: what comes next has a limit of its own."""
        self._end = time.monotonic() + self.seconds

    def say(self, topic: str, value: Any) -> None:
        """Leave word."""
        self._store.set(f"{self.prefix}/{topic}/{self.rank}", json.dumps(value))

    def hear(self, topic: str, rank: int) -> Any:
        """What ``rank`` says."""
        return self._read(topic, [rank])[0]

    def hear_all(self, topic: str) -> list[Any]:
        """What each of the ranks says."""
        return self._read(topic, list(range(self.size)))

    def why_no_connections(self, error: RuntimeError) -> str:
        """What to say of ``error``, with which Gloo gave up connecting the ranks.

        Those that live say how it went for them, at about the same time.
        """
        end = time.monotonic() + _GIVING_UP_SECONDS
        try:
            while (absent := self._silent("connections")) and time.monotonic() < end:
                time.sleep(_LONGEST_PAUSE_SECONDS)
        except RuntimeError:
            sign = "the store does not answer, and "
        else:
            ranks = ", ".join(map(str, absent))
            sign = f"no sign of rank {ranks} (of the group) and " if absent else ""
        first_line = (str(error).splitlines() or [""])[0]
        return (
            f"tpshm: rank {self.rank} of {self.size} makes group {self.name}: {sign}no connections "
            f"over Gloo: {first_line}. Fix: see what the other ranks do instead, or allow more "
            "seconds in TPKERNELS_TIMEOUT"
        )

    def _silent(self, topic: str) -> list[int]:
        return [
            rank
            for rank in range(self.size)
            if not self._store.check([f"{self.prefix}/{topic}/{rank}"])
        ]

    def _read(self, topic: str, ranks: list[int]) -> list[Any]:
        keys = [f"{self.prefix}/{topic}/{rank}" for rank in ranks]
        try:
            self._wait(keys)
            return [json.loads(value) for value in self._store.multi_get(keys)]
        except (RuntimeError, TimeoutError) as error:
            raise CommunicationError(self._absence(keys, ranks, error)) from error

    def _wait(self, keys: list[str]) -> None:
        # Not the store's own wait, during which no signal's handler runs.
        end = time.monotonic() + self.seconds_left()
        pause = _FIRST_PAUSE_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _absence(self, keys: list[str], ranks: list[int], error: Exception) -> str:
        here = f"{self.what}: rank {self.rank} of {self.size} makes group {self.name}"
        try:
            absent = [r for r, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
        except RuntimeError:
            first_line = (str(error).splitlines() or [""])[0]
            return (
                f"{here}: the store does not answer, the rank that holds it is gone: {first_line}"
            )
        return (
            f"{here}: no sign of rank {', '.join(map(str, absent))} (of the group) within "
            f"{self.seconds:g} s. Fix: see what that rank does instead, or allow more seconds in "
            "TPKERNELS_TIMEOUT"
        )


def make_peers(meeting: Meeting, global_ranks: list[int], seconds: float) -> Peers:
    """The peer group of the ranks at ``meeting``, with ``seconds`` as its time limit."""
    if meeting.size == 1:
        module = native.load()
        if module is None:
            return Peers(None, _why_not())
        memory = module.PeerMemory.loopback(1)[0]
        group = module.PeerGroup(memory, meeting.name, global_ranks, seconds)
        return Peers(group, "a group of one rank")
    meeting.say("facts", _facts())
    refusal = _refusal(meeting.hear_all("facts"))
    if refusal is not None:
        return Peers(None, refusal)
    meeting.next_stage()
    memory, problem = _shared_memory(meeting)
    meeting.say("outcome", problem)
    problems = {rank: said for rank, said in enumerate(meeting.hear_all("outcome")) if said}
    if problems:
        rank = min(problems)
        return Peers(None, f"rank {rank}: {problems[rank]}")
    module = native.load()
    assert module is not None
    group = module.PeerGroup(memory, meeting.name, global_ranks, seconds)
    return Peers(group, "its ranks share one host")


def _facts() -> dict[str, Any]:
    module = native.load()
    if module is None:
        return {"host": _host(), "protocol": None, "why": _why_not()}
    return {"host": _host(), "protocol": module.protocol_version, "why": None}


def _why_not() -> str:
    return native.status().reason


def _host() -> str:
    """The same for processes that can hand memory to each other: kernel, network, user."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} {os.getpid()}"
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    network = os.stat("/proc/self/ns/net")  # Unix sockets without a file belong to it
    return f"{boot} {network.st_dev}:{network.st_ino} {os.geteuid()}"


def _refusal(facts: list[dict[str, Any]]) -> str | None:
    """Why ranks with these facts cannot share memory, or None."""
    if len({said["host"] for said in facts}) > 1:
        return SPANS_HOSTS
    lacking = {rank: said["why"] for rank, said in enumerate(facts) if said["why"]}
    if lacking:
        if [said["why"] for said in facts] == [SWITCHED_OFF] * len(facts):
            return SWITCHED_OFF
        rank = min(lacking)
        return f"rank {rank} has no native code: {lacking[rank]}"
    versions = {said["protocol"] for said in facts}
    if len(versions) > 1:
        shown = ", ".join(f"rank {r}: {said['protocol']}" for r, said in enumerate(facts))
        return f"its ranks run builds with different protocols of shared memory ({shown})"
    return None


def _shared_memory(meeting: Meeting) -> tuple[Any, str | None]:
    """This rank's view of memory that the first rank made, or what went wrong."""
    module = native.load()
    assert module is not None
    if meeting.rank:
        address = meeting.hear("address", 0)
        if address is None:
            return None, None  # the first rank says why
        try:
            memory = module.PeerMemory.take(
                address, meeting.rank, meeting.size, meeting.seconds_left()
            )
        except CommunicationError as error:
            return None, str(error)
        return memory, None
    try:
        memory = module.PeerMemory.create(0, meeting.size)
        offer = module.MemoryOffer()
    except CommunicationError as error:
        meeting.say("address", None)
        return None, str(error)
    meeting.say("address", offer.address)
    try:
        offer.serve(memory, meeting.size - 1, min(meeting.seconds_left(), _HAND_OVER_SECONDS))
    except CommunicationError as error:
        return None, str(error)
    return memory, None
