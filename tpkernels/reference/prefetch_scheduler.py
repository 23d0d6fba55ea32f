"""When to gather, wait for, keep and free the units of a sharded model: the specification.

Pure logic: no tensors, no clock, no communication. Events go in, actions come out, and the caller
performs them in the order given. What is decided depends on the events alone, so ranks that report
the same events perform the same collectives. ``csrc/runtime/prefetch_scheduler`` is the same
machine in C++; where it is not built, this one serves.

A unit is *in use* between ``use`` and ``release``, *idle* while it is gathered and not in use:

    use(1)      [ in use ][ idle: kept for backward, if it fits   ][ in use ]
    gather 2         [....][ in use ]
    gather 3              [..........][ in use ]
                          idle bytes never exceed prefetch_bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple

from tpkernels.reference.use_order import Phase, UseOrder

UNLIMITED = 2**62  # of bytes; sums stay below 2**63


class ActionKind(IntEnum):
    """What the caller is to do with a unit."""

    GATHER = 0  # start its all-gather; of a stale copy: into the same memory
    WAIT = 1  # let the compute wait for its all-gather
    FREE = 2  # its gathered copy is not needed: a copy still in flight is waited for first
    REDUCE = 3  # start the reduce-scatter of its gradients
    WAIT_REDUCE = 4  # wait for that, and free the buffers


class Action(NamedTuple):
    """One step of the caller's, in order."""

    kind: ActionKind
    unit: int


@dataclass(frozen=True)
class UnitBytes:
    """What one unit is charged, in bytes.

    Attributes:
        gathered: the whole unit in the dtype it computes in.
        staging: what its all-gather holds besides, until it is complete (a cast or host copy).
        gradients: its whole gradients, from the first one until they are reduced.
        reduce_input: what its reduce-scatter holds besides, while it is in flight.
        resident: once gathered it stays so and counts as in use (ZeRO-1 and 2, small units).
        held: it counts as in use from forward to backward (``reshard_after_forward=False``).
    """

    gathered: int
    staging: int = 0
    gradients: int = 0
    reduce_input: int = 0
    resident: bool = False
    held: bool = False


@dataclass
class _Unit:
    bytes: UnitBytes
    gathered: bool = False
    waited: bool = False  # the staging bytes are free again
    fresh: bool = False  # of the newest weights
    touched: bool = False  # used since it was gathered
    uses: int = 0
    held_for_backward: bool = False
    held_for_forward: bool = False
    collecting: bool = False  # gradient bytes are charged
    reducing: bool = False
    hits: int = 0
    misses: int = 0
    wasted: int = 0

    @property
    def is_ready(self) -> bool:
        return self.gathered and self.fresh

    @property
    def is_held(self) -> bool:
        return self.held_for_backward or self.held_for_forward

    @property
    def is_idle(self) -> bool:
        return self.gathered and not self.uses and not self.is_held and not self.bytes.resident

    @property
    def cost(self) -> int:
        """Bytes of the gathered copy, now or if it were gathered next."""
        return self.bytes.gathered + (0 if self.gathered and self.waited else self.bytes.staging)

    @property
    def need(self) -> int:
        """Bytes that its next gather adds."""
        return self.cost if not self.gathered else self.bytes.staging * self.waited

    @property
    def gradients_to_come(self) -> int:
        return 0 if self.collecting or self.reducing else self.bytes.gradients


@dataclass
class Counters:
    """Totals since the start; bytes are peaks."""

    gathers: int = 0
    hits: int = 0
    misses: int = 0
    wasted: int = 0
    peak_idle_bytes: int = 0
    peak_live_bytes: int = 0
    peak_gathered_bytes: int = 0


class PrefetchScheduler:
    """Decides for ``len(units)`` units within a byte budget.

    Args:
        units: their sizes.
        prefetch_bytes: bound of the bytes gathered and not in use.
        max_live_bytes: bound of all bytes charged, as far as the units in use and their gradients
            allow.
        max_pending_reduces: reduce-scatters in flight at once.
        reshard_after_backward: False keeps what backward used, as if in use, until the next
            forward has used it or has ended.

    Raises:
        ValueError: a size, a bound or, later, the number of a unit that cannot be.
    """

    implementation: ClassVar[str] = "reference"

    def __init__(
        self,
        units: Sequence[UnitBytes],
        prefetch_bytes: int,
        max_live_bytes: int = UNLIMITED,
        max_pending_reduces: int = 2,
        reshard_after_backward: bool = True,
    ) -> None:
        _check_units(units)
        _check_bounds(prefetch_bytes, max_live_bytes)
        if max_pending_reduces < 1:
            raise ValueError(
                f"max_pending_reduces is {max_pending_reduces}, allowed is 1 or more. "
                "Fix: 1 waits for each reduce-scatter before the next"
            )
        self._units = [_Unit(each) for each in units]
        self._prefetch_bytes = prefetch_bytes
        self._max_live_bytes = max_live_bytes
        self._max_pending_reduces = max_pending_reduces
        self._reshard_after_backward = reshard_after_backward
        self._order = UseOrder(len(units))
        self._pending_reduces: list[int] = []
        self._actions: list[Action] = []
        self.counters = Counters()

    # --- events ---

    def begin_forward(self, mode: str, trains: bool) -> list[Action]:
        """A forward of the whole model begins; ``trains``: a backward may follow it."""
        self._order.begin_forward(mode, trains)
        self._settle()
        return self._take()

    def end_forward(self) -> list[Action]:
        """It ended: its order is remembered; idle units stay only for a backward to come."""
        trains = self._order.trains
        self._order.end_forward()
        for unit in self._units:
            unit.held_for_forward = False
        self._settle(drop_unwanted=True, gather=trains)
        return self._take()

    def begin_backward(self) -> list[Action]:
        """A backward begins, of all forwards since the last one."""
        self._order.begin_backward()
        self._settle()
        return self._take()

    def end_backward(self) -> list[Action]:
        """It ended: every reduce-scatter is waited for and every idle unit freed."""
        self._order.end_backward()
        for unit in self._units:
            unit.held_for_backward = False
        self._wait_for_reduces(0)
        self._settle(drop_unwanted=True)
        return self._take()

    def use(self, index: int, record: bool = True) -> list[Action]:
        """``index`` is needed now. ``record=False``: recomputed, or asked for by hand."""
        unit = self._unit(index)
        was_ready = unit.is_ready
        if not (was_ready and (unit.uses or unit.is_held or unit.bytes.resident)):
            unit.hits += was_ready
            unit.misses += not was_ready
            self.counters.hits += was_ready
            self.counters.misses += not was_ready
        if record and self._order.phase is not Phase.IDLE:
            self._order.use(index)
        unit.uses += 1
        if not was_ready:
            self._make_room(unit.need)
            self._gather(index)
        unit.touched = True
        if record:
            self._settle()
        self._wait(index)
        return self._take()

    def release(self, index: int) -> list[Action]:
        """One use of ``index`` is over."""
        unit = self._unit(index)
        if unit.uses == 0:
            raise ValueError(f"unit {index} is released more often than used")
        unit.uses -= 1
        if unit.uses == 0:
            if self._order.was_used(index):  # a use by hand or a recomputation changes no hold
                if self._order.phase is Phase.FORWARD:
                    unit.held_for_backward |= unit.bytes.held and self._order.trains
                    unit.held_for_forward = False
                else:
                    unit.held_for_backward = False
                    unit.held_for_forward = not self._reshard_after_backward
            if not unit.fresh:
                unit.held_for_backward = unit.held_for_forward = False
            if unit.is_idle and not (unit.fresh and index in self._wanted()):
                self._free(index)
            self._settle()
        return self._take()

    def collect(self, index: int) -> list[Action]:
        """The first gradient of ``index`` arrived: its gradient bytes are charged from here on."""
        unit = self._unit(index)
        if not unit.collecting:
            while unit.reducing:  # an earlier part of it is still on its way
                self._wait_for_reduces(len(self._pending_reduces) - 1)
            self._make_room(unit.bytes.gradients)
            unit.collecting = True
        return self._take()

    def reduce(self, index: int) -> list[Action]:
        """The gradients of ``index`` are complete."""
        unit = self._unit(index)
        if not unit.collecting:
            raise ValueError(f"unit {index} has collected no gradients")
        self._wait_for_reduces(self._max_pending_reduces - 1)
        self._make_room(unit.bytes.reduce_input)
        unit.collecting, unit.reducing = False, True
        self._pending_reduces.append(index)
        self._emit(ActionKind.REDUCE, index)
        self._note_peaks()
        self._make_room(0)  # where it did not fit, it is waited for at once
        return self._take()

    def invalidate(self, indices: Iterable[int] | None = None) -> list[Action]:
        """The weights of ``indices`` (None: of all) changed: copies gathered before are stale."""
        changed = range(len(self._units)) if indices is None else list(indices)
        for index in changed:
            self._unit(index)
        if indices is None:
            self._order.expect_no_backward()
        for index in changed:
            unit = self._units[index]
            unit.fresh = unit.held_for_backward = unit.held_for_forward = False
            if unit.is_idle:
                self._free(index)
        return self._take()

    def set_budget(self, prefetch_bytes: int, max_live_bytes: int = UNLIMITED) -> list[Action]:
        """Other bounds from here on; what no longer fits is freed."""
        _check_bounds(prefetch_bytes, max_live_bytes)
        self._prefetch_bytes, self._max_live_bytes = prefetch_bytes, max_live_bytes
        self._make_room(0)
        self._settle()
        return self._take()

    def reset(self, forget: bool = False) -> list[Action]:
        """After an error: everything in flight is waited for, and all but residents freed.

        ``forget``: the orders too, which ranks that parted may know differently.
        """
        self._wait_for_reduces(0)
        for index, unit in enumerate(self._units):
            unit.uses, unit.collecting = 0, False
            unit.held_for_backward = unit.held_for_forward = False
            if unit.is_idle:
                self._free(index)
            elif unit.gathered:
                self._wait(index)
        self._order.expect_nothing()
        if forget:
            self._order = UseOrder(len(self._units))
        return self._take()

    # --- what there is ---

    @property
    def idle_bytes(self) -> int:
        """Bytes gathered, or being gathered, and not in use."""
        return sum(unit.cost for unit in self._units if unit.is_idle)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all gathered copies."""
        return sum(unit.cost for unit in self._units if unit.gathered)

    @property
    def live_bytes(self) -> int:
        """All bytes charged: gathered copies, staging, gradients, reduce-scatter inputs."""
        gradients = sum(
            unit.bytes.gradients * (unit.collecting + unit.reducing)
            + unit.bytes.reduce_input * unit.reducing
            for unit in self._units
        )
        return self.gathered_bytes + gradients

    def unit_counters(self, index: int) -> tuple[int, int, int]:
        """(hits, misses, wasted gathers) of one unit."""
        unit = self._unit(index)
        return unit.hits, unit.misses, unit.wasted

    def is_gathered(self, index: int) -> bool:
        """Whether a copy of ``index`` is there or on its way."""
        return self._unit(index).gathered

    def _unit(self, index: int) -> _Unit:
        if not 0 <= index < len(self._units):
            raise ValueError(f"unit {index} is unknown, there are {len(self._units)}, from 0")
        return self._units[index]

    # --- admission ---

    def _wanted(self) -> list[int]:
        """The units that should be gathered now though not in use, the nearest use first."""
        backward = self._order.phase is Phase.BACKWARD
        room = self._prefetch_bytes
        live_room = self._max_live_bytes - (self.live_bytes - self.idle_bytes)
        if backward:  # those in use will soon have gradients
            live_room -= sum(unit.gradients_to_come for unit in self._units if unit.uses)
        wanted = []
        for index in self._order.upcoming:
            unit = self._units[index]
            if unit.bytes.gathered + unit.bytes.staging > self._prefetch_bytes:
                continue  # never prefetched; those behind it are
            if self._stays(unit):
                continue
            need = unit.need if unit.bytes.resident else unit.cost
            live_need = 0  # one in use is needed again: room to keep it when it is released
            if not unit.uses:
                live_need = need + (unit.gradients_to_come if backward else 0)
            if need > room or live_need > live_room:
                break
            room -= need
            live_room -= live_need
            if not unit.uses:
                wanted.append(index)
        return wanted

    def _stays(self, unit: _Unit) -> bool:
        """Whether it is, or when released will be, gathered without being idle."""
        if unit.bytes.resident or not unit.uses:
            return unit.is_ready and (unit.is_held or unit.bytes.resident)
        if self._order.phase is Phase.FORWARD:
            return unit.bytes.held and self._order.trains
        return self._order.phase is Phase.BACKWARD and not self._reshard_after_backward

    def _idle(self, besides: Sequence[int] = ()) -> list[int]:
        """Idle units, the one whose use is farthest or not expected last."""
        idle = [i for i, unit in enumerate(self._units) if unit.is_idle and i not in besides]
        return sorted(idle, key=lambda i: self._order.upcoming.get(i, len(self._order.upcoming)))

    def _settle(self, drop_unwanted: bool = False, gather: bool = True) -> None:
        """Free what is over budget, then gather ahead what fits."""
        if drop_unwanted:
            for index, unit in enumerate(self._units):
                if unit.bytes.resident and unit.gathered:
                    self._wait(index)  # WAR: its gather reads weights that may change now
        wanted = self._wanted()
        unwanted = self._idle(besides=wanted)
        while unwanted and (drop_unwanted or self._is_over()):
            self._free(unwanted.pop())
        for index in wanted if gather else ():
            unit = self._units[index]
            if unit.is_ready:
                continue
            while unwanted and self._is_over(unit.need):
                self._free(unwanted.pop())
            self._gather(index)

    def _is_over(self, need: int = 0) -> bool:
        return (
            self.idle_bytes + need > self._prefetch_bytes
            or self.live_bytes + need > self._max_live_bytes
        )

    def _make_room(self, need: int) -> None:
        """Before ``need`` bytes more: what costs least to give up goes first."""
        idle = self._idle()
        while idle and idle[-1] not in self._order.upcoming and self._is_full(need):
            self._free(idle.pop())
        while self._pending_reduces and self._is_full(need):
            self._wait_for_reduces(len(self._pending_reduces) - 1)
        while idle and self._is_full(need):
            self._free(idle.pop())

    def _is_full(self, need: int) -> bool:
        return self.live_bytes + need > self._max_live_bytes

    def _gather(self, index: int) -> None:
        unit = self._units[index]
        if unit.gathered:  # stale, resident or in use
            self._wait(index)  # WAW: it may still be on its way into this memory
            self._note_waste(unit)
        unit.gathered, unit.waited, unit.fresh, unit.touched = True, False, True, False
        self.counters.gathers += 1
        self._emit(ActionKind.GATHER, index)
        self._note_peaks()

    def _wait(self, index: int) -> None:
        if not self._units[index].waited:
            self._units[index].waited = True
            self._emit(ActionKind.WAIT, index)

    def _free(self, index: int) -> None:
        unit = self._units[index]
        self._wait(index)
        self._note_waste(unit)
        self._emit(ActionKind.FREE, index)
        unit.gathered = unit.waited = unit.fresh = False

    def _wait_for_reduces(self, most: int) -> None:
        while len(self._pending_reduces) > most:
            index = self._pending_reduces.pop(0)
            self._units[index].reducing = False
            self._emit(ActionKind.WAIT_REDUCE, index)

    def _note_waste(self, unit: _Unit) -> None:
        unit.wasted += not unit.touched
        self.counters.wasted += not unit.touched

    def _note_peaks(self) -> None:
        counters = self.counters
        counters.peak_idle_bytes = max(counters.peak_idle_bytes, self.idle_bytes)
        counters.peak_gathered_bytes = max(counters.peak_gathered_bytes, self.gathered_bytes)
        counters.peak_live_bytes = max(counters.peak_live_bytes, self.live_bytes)

    def _emit(self, kind: ActionKind, index: int) -> None:
        self._actions.append(Action(kind, index))

    def _take(self) -> list[Action]:
        self._note_peaks()
        actions, self._actions = self._actions, []
        return actions


def _check_units(units: Sequence[UnitBytes]) -> None:
    for index, unit in enumerate(units):
        for name in ("gathered", "staging", "gradients", "reduce_input"):
            value = getattr(unit, name)
            if value < 0:
                raise ValueError(f"units[{index}].{name} is {value}, allowed is 0 or more")
    total = sum(each.gathered + each.staging + each.gradients + each.reduce_input for each in units)
    if total > UNLIMITED:
        raise ValueError("units have more than 2**62 bytes together, allowed are 2**62")


def _check_bounds(prefetch_bytes: int, max_live_bytes: int) -> None:
    for name, value in (("prefetch_bytes", prefetch_bytes), ("max_live_bytes", max_live_bytes)):
        if not 0 <= value <= UNLIMITED:
            raise ValueError(
                f"{name} is {value}, allowed are 0 to 2**62. Fix: 2**62 stands for no bound"
            )
