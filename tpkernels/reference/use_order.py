"""Which units of a sharded model are used next: orders recorded of earlier passes.

Orders are kept by mode, several of each, so that evaluation between training steps and branches
that alternate cost nothing. Within a pass, a use that was not expected looks for its place in all
orders known of that mode; the longest common context wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

RECORDED_ORDERS = 4  # distinct orders remembered of each mode: branches that alternate
ALTERNATES_FROM = 2  # changes of order in a row
PENDING_FORWARDS = 16  # forwards remembered until a backward comes; of others the last

Order = tuple[int, ...]


class Phase(IntEnum):
    """Between which events a step is."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass
class _Known:
    """An order of a mode, and which one followed the last time: of branches that alternate."""

    order: Order
    follower: Order | None = None


@dataclass
class _Mode:
    """The orders known of a mode, the newest last, and how many passes in a row changed it."""

    orders: list[_Known] = field(default_factory=list)
    changes: int = 0


@dataclass
class _Pass:
    """The forward or backward that runs: what was used so far, and what is expected."""

    mode: str = ""
    trains: bool = False
    history: list[int] = field(default_factory=list)
    order: Order = ()
    position: int = -1


class UseOrder:
    """Notes the uses of ``units`` units, and says which to expect.

    Attributes:
        upcoming: unit -> its place among those expected from here on, the nearest first.
    """

    def __init__(self, units: int) -> None:
        self.phase = Phase.IDLE
        self.upcoming: dict[int, int] = {}
        self._units = units
        self._pass = _Pass()
        self._modes: dict[str, _Mode] = {}  # the newest last
        self._backwards: list[tuple[tuple[Order, ...], Order]] = []  # after which forwards
        self._forwards: tuple[Order, ...] = ()  # whose backward has not come

    @property
    def trains(self) -> bool:
        """Whether a forward runs that a backward may follow."""
        return self._pass.trains

    def was_used(self, index: int) -> bool:
        """Whether ``index`` was used in the pass that runs."""
        return index in self._pass.history

    def begin_forward(self, mode: str, trains: bool) -> None:
        """A forward begins."""
        self._begin(Phase.FORWARD, _Pass(mode, trains, order=self._expected(mode)))

    def end_forward(self) -> None:
        """It is remembered; what to expect from here on is the backward of all that wait for it."""
        order = tuple(self._pass.history)
        if order:
            mode = self._modes.pop(self._pass.mode, _Mode())  # the newest last
            if mode.orders:
                newest = mode.orders[-1]
                newest.follower = order
                mode.changes = mode.changes + 1 if newest.order != order else 0
            this = next((each for each in mode.orders if each.order == order), _Known(order))
            others = [each for each in mode.orders if each is not this]
            mode.orders = [*others, this][-RECORDED_ORDERS:]
            self._modes[self._pass.mode] = mode
        if self.trains:
            self._forwards = (*self._forwards, order)[-PENDING_FORWARDS:]
        coming = self._backward_order(self._forwards) if self._forwards else ()
        self._begin(Phase.IDLE, _Pass(order=coming))

    def begin_backward(self) -> None:
        """A backward begins."""
        self._begin(Phase.BACKWARD, _Pass(order=self._backward_order(self._forwards)))

    def end_backward(self) -> None:
        """It is remembered together with its forwards."""
        if self._pass.history:
            others = [entry for entry in self._backwards if entry[0] != self._forwards]
            entry = (self._forwards, tuple(self._pass.history))
            self._backwards = [*others, entry][-RECORDED_ORDERS:]
        self.expect_nothing()

    def use(self, index: int) -> None:
        """``index`` is used in the pass that runs."""
        self._pass.history.append(index)
        self._locate(index)
        self._predict()

    def expect_no_backward(self) -> None:
        """The weights changed: of the forwards so far none can follow."""
        if self.phase is Phase.IDLE:
            self.expect_nothing()
        elif self.phase is Phase.FORWARD:
            self._forwards = ()
            self._predict()

    def expect_nothing(self) -> None:
        """No pass runs, and no backward is to come."""
        self._forwards = ()
        self._begin(Phase.IDLE, _Pass())

    def _begin(self, phase: Phase, what: _Pass) -> None:
        self.phase, self._pass = phase, what
        self._predict()

    def _expected(self, mode: str) -> Order:
        """The newest of ``mode``, or what followed it before where orders alternate.

        They do where the last two passes both changed the order: after one change the new order is
        as likely to stay. Of an unknown mode that of the newest mode.
        """
        if mode not in self._modes:
            mode = next(reversed(self._modes), mode)
        if mode not in self._modes:
            return tuple(range(self._units))
        known = self._modes[mode]
        newest = known.orders[-1]
        follower = newest.follower if known.changes >= ALTERNATES_FROM else None
        return follower or newest.order

    def _backward_order(self, forwards: tuple[Order, ...]) -> Order:
        """As recorded after just these forwards, else their reverse."""
        for key, order in self._backwards:
            if key == forwards:
                return order
        return tuple(index for forward in reversed(forwards) for index in reversed(forward))

    def _locate(self, index: int) -> None:
        """Find where in which known order the last use stands."""
        now = self._pass
        if now.position + 1 < len(now.order) and now.order[now.position + 1] == index:
            now.position += 1
            return
        orders = [now.order]
        if self.phase is Phase.FORWARD:
            known = reversed(self._modes.get(now.mode, _Mode()).orders)
            orders += [each.order for each in known if each.order != now.order]
        best: tuple[int, int, int] | None = None  # (context, -which order, -distance)
        for which, order in enumerate(orders):
            for place, each in enumerate(order):
                if each != index:
                    continue
                context = _common_suffix(order[: place + 1], now.history)
                ahead = place - now.position if place > now.position else len(order) + place
                score = (context, -which, -ahead)
                if best is None or score > best:
                    best, found = score, (order, place)
        if best is not None:
            now.order, now.position = found

    def _predict(self) -> None:
        now = self._pass
        left = Counter(now.order)
        left.subtract(now.history)
        rest = []
        for index in (*now.order[now.position + 1 :], *now.order[: now.position + 1]):
            if left[index] > 0:  # what was passed over may still come
                left[index] -= 1
                rest.append(index)
        if now.trains:
            rest += self._backward_order((*self._forwards, (*now.history, *rest)))
        self.upcoming = {index: place for place, index in enumerate(dict.fromkeys(rest))}


def _common_suffix(order: Sequence[int], history: Sequence[int]) -> int:
    length = 0
    for a, b in zip(reversed(order), reversed(history), strict=False):
        if a != b:
            break
        length += 1
    return length
