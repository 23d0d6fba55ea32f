"""Exchanges over lanes: what is in flight between this rank and the others of a group."""

from __future__ import annotations

import datetime
import os
import select
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet, finalize

from torch import Tensor

from tpkernels.comm.lanes_wire import Goodbye, Lane, LostPeer
from tpkernels.comm.tpshm import time_limit
from tpkernels.errors import CommunicationError, ConfigError

_LOOK_SECONDS = 0.05  # between two looks at what another thread has moved
_GOODBYE_SECONDS = 1.0  # between a rank's last data and its goodbye; else it just died
_GATHERING_SECONDS = 0.3  # between the first goodbye and those of the others
_ASKING_SECONDS = 0.6  # in which ranks that wait themselves answer one that gave up on them


class Exchange:
    """Messages with other ranks that have been started; made by :meth:`Lanes.exchange`.

    Attributes:
        operation: for errors.
        received: all that it receives is there.
        done: all of it is sent and received.

    It keeps its tensors alive until it is done. Sent ones must not be written to before it is.
    """

    __slots__ = ("_lanes", "_receives", "_sends", "_tensors", "done", "operation", "received")

    def __init__(
        self, lanes: Lanes, operation: str, tensors: Any, sends: int, receives: int
    ) -> None:
        self._lanes, self.operation, self._tensors = lanes, operation, tensors
        self._sends, self._receives = sends, receives  # messages to go
        self.received, self.done = not receives, not (sends or receives)

    def wait(self, received_only: bool = False) -> None:
        """Move all exchanges of these lanes until this one is done, or has received.

        Raises:
            CommunicationError: a rank is gone, does something else or has given up, at once; or
                nothing moves within the time limit. Names operation, group and rank.
        """
        self._lanes._wait(self, received_only)

    def sent_one(self) -> None:
        """One of its messages is sent: called by a lane."""
        self._sends -= 1
        self._end_if_done()

    def received_one(self) -> None:
        """One of its messages is received: called by a lane."""
        self._receives -= 1
        self.received = not self._receives
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not (self._sends or self._receives):
            self.done, self._tensors = True, None
            self._lanes._in_flight -= 1


class Lanes:
    """A group's lanes: one to every other rank. Made by :func:`lanes_of`, on all ranks.

    Attributes:
        size, rank: of the group, and this process's number in it.

    Safe to use from several threads. After an error they are closed, and all that is called later
    raises that error again; the other ranks are told and raise as well.
    """

    def __init__(
        self,
        lanes: list[Lane],
        rank: int,
        group_name: str,
        global_ranks: list[int],
        timeout: datetime.timedelta,
    ) -> None:
        self.size, self.rank = len(lanes) + 1, rank
        # Each rank begins with another one.
        lanes = sorted(lanes, key=lambda lane: (lane.peer - rank) % self.size)
        self._lanes = {lane.peer: lane for lane in lanes}
        self._group_name, self._global_ranks, self._timeout = group_name, global_ranks, timeout
        self._lock = threading.Lock()
        self._in_flight = 0  # exchanges that are not done
        self._broken: str | None = None
        finalize(self, _close, lanes)
        _all_lanes.add(self)

    def exchange(
        self,
        sends: Mapping[int, Sequence[Tensor]],
        receives: Mapping[int, Sequence[Tensor]],
        operation: str,
    ) -> Exchange:
        """Start sending to and receiving from other ranks; never blocks.

        Args:
            sends, receives: by rank of the group, contiguous CPU tensors of any dtype, empty ones
                too: one message a rank, sent from and filled into them in order. A rank that is
                named here must name this one, with as many bytes.
            operation: for errors; the same on all ranks.

        Raises:
            ConfigError: a tensor or rank that cannot be.
            CommunicationError: as :meth:`Exchange.wait`.
        """
        for peer, tensors in (*sends.items(), *receives.items()):
            self._check(peer, tensors, operation)
        exchange = Exchange(self, operation, (sends, receives), len(sends), len(receives))
        with self._lock:
            self._raise_if_broken()
            if exchange.done:
                return exchange
            try:
                self._in_flight += 1
                for peer, tensors in receives.items():
                    self._lanes[peer].enqueue_receive(tensors, operation, exchange)
                for peer, tensors in sends.items():
                    self._lanes[peer].enqueue_send(tensors, operation, exchange)
            except BaseException as error:  # a signal's: some lanes have it, and some do not
                self._break(operation, self.rank, type(error).__name__)
                raise
            self._move()
        return exchange

    def progress(self) -> None:
        """Move what can be moved without waiting; free when nothing is in flight.

        Raises:
            CommunicationError: as :meth:`Exchange.wait`.
        """
        if self._in_flight:
            with self._lock:
                self._raise_if_broken()
                self._move()
        elif self._broken is not None:
            self._raise_if_broken()

    def abandon(self, error: BaseException, operation: str = "") -> None:
        """Give up because of ``error``, which this rank met elsewhere, and tell the others why."""
        said = (str(error).strip().splitlines() or [""])[0]
        with self._lock:
            if self._broken is None:
                self._break(operation, self.rank, f"{type(error).__name__}: {said}")

    # --- inside, with the lock ------------------------------------------------------------------

    def _check(self, peer: int, tensors: Sequence[Tensor], operation: str) -> None:
        if peer not in self._lanes:
            raise ConfigError(
                f"{operation}: rank {peer} is not another rank of a group of {self.size}, in "
                f"which this is rank {self.rank}"
            )
        for tensor in tensors:
            if not (tensor.is_cpu and tensor.is_contiguous()):
                raise ConfigError(
                    f"{operation}: lanes take contiguous CPU tensors, got {tuple(tensor.shape)} "
                    f"on {tensor.device} with strides {tensor.stride()}. Fix: .contiguous()"
                )

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise CommunicationError(self._broken)

    def _move(self) -> bool:
        """Move what can be moved; whether that was anything."""
        moved = False
        lane = None
        try:
            for lane in self._lanes.values():
                if lane.outgoing and lane.send():
                    moved = True
                if lane.incoming and lane.receive():
                    moved = True
        except LostPeer as problem:
            assert lane is not None
            self._lose(lane, problem)
            self._raise_if_broken()
        except BaseException as error:  # between a system call and its account, by a signal
            self._break("", self.rank, type(error).__name__)
            raise
        return moved

    def _lose(self, lane: Lane, problem: LostPeer) -> None:
        if problem.operation:
            return self._break(
                problem.operation, self.rank, f"{self._named([lane.peer])} {problem}"
            )
        operation, farewell = lane.operation(), lane.goodbye(_GOODBYE_SECONDS)
        if farewell is not None:
            return self._break(operation, farewell.origin, farewell.text)
        gone = f"no sign of life from {self._named([lane.peer])}: {problem}"
        return self._break(operation, self.rank, gone)

    def _break(self, operation: str, origin: int, text: str) -> None:
        """Close, for what rank ``origin`` says, and tell the others."""
        if origin == self.rank:
            self._tell(origin, f"{operation or 'an exchange'}: {text}", [])
            self._close_for(operation, text)
        else:
            self._tell(origin, text, [])
            self._close_for(operation, f"{self._named([origin])} gave up: {text}")

    def _tell(self, origin: int, text: str, waits: list[int]) -> None:
        for lane in self._lanes.values():
            lane.say_goodbye(Goodbye(origin, text, waits))

    def _close_for(self, operation: str, blame: str) -> None:
        _close(self._lanes.values())
        self._in_flight = 0
        self._broken = (
            f"{operation or 'an exchange'} on group {self._group_name} (global ranks "
            f"{self._global_ranks}) failed on rank {self._global_ranks[self.rank]}: {blame}"
        )

    def _named(self, ranks: Iterable[int]) -> str:
        shown = ", ".join(str(self._global_ranks[rank]) for rank in ranks)
        return f"rank {shown} (global rank)"

    # --- waiting --------------------------------------------------------------------------------

    def _wait(self, exchange: Exchange, received_only: bool) -> None:
        talking: list[Lane] = []  # whose goodbyes have come
        seconds = 0.0
        end = None
        while True:
            with self._lock:
                if exchange.done or (received_only and exchange.received):
                    return
                self._raise_if_broken()
                moved = self._move()
                if exchange.done or (received_only and exchange.received):
                    return
                for lane in talking:  # after what came before them is taken
                    self._hear(lane, exchange)
                poll, controls = self._poll()
            now = time.monotonic()
            if moved or end is None:  # the limit is one of silence
                seconds = time_limit(self._timeout)
                end = now + seconds
            elif now > end:
                self._give_up(exchange, seconds)
            # Without the lock: others may start and move exchanges meanwhile.
            ready = poll.poll(max(0.0, min(end - now, _LOOK_SECONDS)) * 1e3)
            talking = [controls[file] for file, _ in ready if file in controls]

    def _poll(self) -> tuple[Any, dict[int, Lane]]:
        """What to wait on; and of which lanes the connections are that say goodbye."""
        poll = select.poll()
        controls = {}
        for lane in self._lanes.values():
            events = select.POLLIN if lane.incoming else 0
            events |= select.POLLOUT if lane.outgoing else 0
            if events:
                poll.register(lane.data, events)
            if not lane.ended:
                poll.register(lane.control, select.POLLIN)
                controls[lane.control.fileno()] = lane
        return poll, controls

    def _hear(self, lane: Lane, exchange: Exchange) -> None:
        """Rank ``lane.peer`` says goodbye, or has closed and has nothing more to say."""
        farewell = lane.goodbye()
        if farewell is None:
            return
        awaited = self._awaited(exchange)
        self._tell(farewell.origin, farewell.text, awaited)
        said = {lane.peer: farewell, **self._gather(_GATHERING_SECONDS, {lane.peer})}
        story = f"{self._named([farewell.origin])} gave up: {farewell.text}"
        said[self.rank] = Goodbye(farewell.origin, "", awaited)
        self._close_for(exchange.operation, story + self._who_waits(said))
        self._raise_if_broken()

    def _gather(self, seconds: float, known: set[int]) -> dict[int, Goodbye]:
        """What ranks beside the ``known`` say: those that wait for one another give up together."""
        said, end = {}, time.monotonic() + seconds
        for peer in self._lanes.keys() - known:
            farewell = self._lanes[peer].goodbye(max(0.0, end - time.monotonic()))
            if farewell is not None:
                said[peer] = farewell
        return said

    def _who_waits(self, said: Mapping[int, Goodbye]) -> str:
        return "".join(
            f"; {self._named([peer])} waits for {self._named(farewell.waits)}"
            for peer, farewell in sorted(said.items())
            if farewell.waits
        )

    def _awaited(self, exchange: Exchange) -> list[int]:
        return [lane.peer for lane in self._lanes.values() if lane.concerns(exchange)]

    def _give_up(self, exchange: Exchange, seconds: float) -> None:
        """Nothing moved for ``seconds``: say so to all, and see who is there to answer."""
        with self._lock:
            self._raise_if_broken()
            awaited = self._awaited(exchange)
            text = f"nothing from {self._named(awaited)} within {seconds:g} s"
            self._tell(self.rank, f"{exchange.operation}: {text}", awaited)
            said = self._gather(_ASKING_SECONDS, set())
            if silent := [peer for peer in awaited if peer not in said]:
                text += f": no sign of life from {self._named(silent)}"
            fix = "Fix: see what it does instead, or allow more seconds in TPKERNELS_TIMEOUT"
            self._close_for(exchange.operation, f"{text}{self._who_waits(said)}. {fix}")
            self._raise_if_broken()


def _close(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.close()


# A child of this process must not use its connections, nor hold them open when it has ended.
_all_lanes: WeakSet[Lanes] = WeakSet()


def _leave_to_parent() -> None:
    for lanes in _all_lanes:
        lanes._lock = threading.Lock()
        if lanes._broken is None:
            lanes._close_for("an exchange", "this process was forked from the one that is the rank")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
