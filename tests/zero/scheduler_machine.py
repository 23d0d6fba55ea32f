"""Any history of a sharded model's units, through every implementation of the scheduler at once.

``Performer`` does what the actions say on a memory of its own and checks each against the rules; it
shares no code with the schedulers. ``SchedulerMachine`` is the hypothesis machine that makes the
histories.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tpkernels import native
from tpkernels.reference import prefetch_scheduler as reference
from tpkernels.reference.prefetch_scheduler import UNLIMITED, ActionKind, UnitBytes

COUNTERS = tuple(vars(reference.Counters()))
REDUCES_AT_ONCE = 2


def make_all(units: list[UnitBytes], *bounds, **options) -> list:
    """One scheduler of each implementation there is."""
    made = [reference.PrefetchScheduler(units, *bounds, **options)]
    module = native.load()
    if module is not None:
        compiled = [module.UnitBytes(*astuple(each)) for each in units]
        made.append(module.PrefetchScheduler(compiled, *bounds, **options))
    return made


@dataclass
class Copy:
    """A gathered unit in the performer's memory."""

    generation: int
    waited: bool = False


class Performer:
    """Performs actions, and knows what each needs, what is in use and what the bounds are."""

    def __init__(self, units: list[UnitBytes], prefetch_bytes: int, max_live_bytes: int) -> None:
        self.units = units
        self.bounds = (prefetch_bytes, max_live_bytes)
        self.generations = [0] * len(units)
        self.memory: dict[int, Copy] = {}
        self.uses: Counter[int] = Counter()
        self.kept_for_backward: set[int] = set()
        self.kept_for_forward: set[int] = set()
        self.collecting: set[int] = set()
        self.reducing: list[int] = []
        self.gathers = 0

    def perform(self, actions: list[tuple[int, int]]) -> None:
        for kind, unit in actions:
            getattr(self, ActionKind(kind).name.lower())(unit)
        prefetch_bytes, max_live_bytes = self.bounds
        assert self.idle_bytes() <= prefetch_bytes
        assert self.gathered_bytes() <= prefetch_bytes + self.gathered_bytes(self.in_use())
        assert self.live_bytes() <= max(max_live_bytes, self.pinned_bytes())

    def gather(self, unit: int) -> None:
        copy = self.memory.get(unit)
        if copy is not None:
            assert copy.generation != self.generations[unit], f"{unit} is gathered already"
            assert copy.waited, f"{unit} is written while on its way"
            assert self.units[unit].resident or self.uses[unit], f"{unit} is stale and was kept"
        self.memory[unit] = Copy(self.generations[unit])
        self.gathers += 1
        ahead = not self.uses[unit]
        most = self.bounds[1] if ahead else max(self.bounds[1], self.pinned_bytes())
        assert self.live_bytes() <= most
        assert self.idle_bytes() <= self.bounds[0]

    def wait(self, unit: int) -> None:
        assert not self.memory[unit].waited, f"{unit} is waited for twice"
        self.memory[unit].waited = True

    def free(self, unit: int) -> None:
        assert self.memory[unit].waited, f"{unit} is freed while on its way"
        assert unit not in self.in_use(), f"{unit} is freed while in use"
        del self.memory[unit]

    def reduce(self, unit: int) -> None:
        assert unit not in self.reducing
        self.collecting.remove(unit)
        self.reducing.append(unit)
        assert len(self.reducing) <= REDUCES_AT_ONCE
        own = self.units[unit].gradients + self.units[unit].reduce_input
        assert self.live_bytes() <= max(self.bounds[1], self.pinned_bytes() + own)

    def wait_reduce(self, unit: int) -> None:
        assert self.reducing.pop(0) == unit

    def in_use(self) -> set[int]:
        """Units that may not be freed."""
        residents = {index for index, unit in enumerate(self.units) if unit.resident}
        used = {unit for unit, uses in self.uses.items() if uses}
        return used | residents | self.kept_for_backward | self.kept_for_forward

    def gathered_bytes(self, among: set[int] | None = None) -> int:
        return sum(
            self.units[unit].gathered + (0 if copy.waited else self.units[unit].staging)
            for unit, copy in self.memory.items()
            if among is None or unit in among
        )

    def idle_bytes(self) -> int:
        return self.gathered_bytes(set(self.memory) - self.in_use())

    def pinned_bytes(self) -> int:
        """What cannot be given up: units in use and gradients that are not on their way."""
        gradients = sum(self.units[unit].gradients for unit in self.collecting)
        return self.gathered_bytes(self.in_use()) + gradients

    def live_bytes(self) -> int:
        reducing = [self.units[unit] for unit in self.reducing]
        inputs = sum(unit.gradients + unit.reduce_input for unit in reducing)
        gradients = sum(self.units[unit].gradients for unit in self.collecting)
        return self.gathered_bytes() + gradients + inputs


class Driver:
    """Sends each event to every implementation, compares, and lets the performer act."""

    def __init__(
        self,
        units: list[UnitBytes],
        prefetch_bytes: int = UNLIMITED,
        max_live_bytes: int = UNLIMITED,
        reshard_after_backward: bool = True,
    ) -> None:
        self.units = units
        self.reshard_after_backward = reshard_after_backward
        self.schedulers = make_all(
            units, prefetch_bytes, max_live_bytes, REDUCES_AT_ONCE, reshard_after_backward
        )
        self.performer = Performer(units, prefetch_bytes, max_live_bytes)
        self.phase = ""
        self.trains = False
        self.used: set[int] = set()  # in the pass that runs
        self.awaits_backward = False
        self.uses = 0
        self.actions: list[tuple[int, int]] = []  # of the last event

    @property
    def counters(self) -> reference.Counters:
        return self.schedulers[0].counters

    def event(self, name: str, *args) -> None:
        results = [getattr(scheduler, name)(*args) for scheduler in self.schedulers]
        assert all(result == results[0] for result in results), (name, args, results)
        self.actions = results[0]
        self.performer.perform(self.actions)
        first = counts(self.schedulers[0], len(self.units))
        for scheduler in self.schedulers:
            assert scheduler.idle_bytes == self.performer.idle_bytes()
            assert scheduler.gathered_bytes == self.performer.gathered_bytes()
            assert scheduler.live_bytes == self.performer.live_bytes()
            assert counts(scheduler, len(self.units)) == first
        assert self.counters.gathers == self.performer.gathers

    def refused(self, name: str, *args) -> None:
        """The event is an error, the same from all."""
        messages = set()
        for scheduler in self.schedulers:
            try:
                getattr(scheduler, name)(*args)
            except ValueError as error:
                messages.add(str(error))
            else:
                raise AssertionError(f"{scheduler.implementation} accepts {name}{args}")
        assert len(messages) == 1, messages

    def begin_forward(self, mode: str = "train", trains: bool = True) -> None:
        self._enter("forward", trains)
        self.event("begin_forward", mode, trains)

    def end_forward(self) -> None:
        self.awaits_backward |= self.trains
        self.performer.kept_for_forward.clear()
        self._enter("")
        self.event("end_forward")
        if not self.awaits_backward:
            self.check_nothing_is_left()

    def begin_backward(self) -> None:
        self._enter("backward")
        self.event("begin_backward")

    def end_backward(self) -> None:
        self.performer.kept_for_backward.clear()
        self.awaits_backward = False
        self._enter("")
        self.event("end_backward")
        self.check_nothing_is_left()
        assert not self.performer.reducing

    def use(self, unit: int, record: bool = True) -> None:
        self.uses += 1
        if record and self.phase:
            self.used.add(unit)
        self.performer.uses[unit] += 1
        self.event("use", unit, record)
        copy = self.performer.memory[unit]
        assert copy.waited, "used before its gather is complete"
        assert copy.generation == self.performer.generations[unit], "a stale copy is used"

    def release(self, unit: int) -> None:
        performer = self.performer
        performer.uses[unit] -= 1
        if not performer.uses[unit]:
            if unit in self.used and self.phase == "forward":
                performer.kept_for_forward.discard(unit)
                if self.trains and self.units[unit].held:
                    performer.kept_for_backward.add(unit)
            elif unit in self.used:
                performer.kept_for_backward.discard(unit)
                if not self.reshard_after_backward:
                    performer.kept_for_forward.add(unit)
            if performer.memory[unit].generation != performer.generations[unit]:
                self._keep_no_longer([unit])
        self.event("release", unit)

    def collect(self, unit: int) -> None:
        if unit not in self.performer.collecting:
            self.performer.collecting.add(unit)
            self.event("collect", unit)

    def reduce(self, unit: int) -> None:
        self.event("reduce", unit)

    def invalidate(self, units: list[int] | None = None) -> None:
        changed = range(len(self.units)) if units is None else units
        for unit in changed:
            self.performer.generations[unit] += 1
        self._keep_no_longer(changed)
        if units is None and self.phase != "backward":
            self.awaits_backward = False
        self.event("invalidate", units)
        if units is None:
            assert not self.performer.idle_bytes()

    def set_budget(self, prefetch_bytes: int, max_live_bytes: int = UNLIMITED) -> None:
        self.performer.bounds = (prefetch_bytes, max_live_bytes)
        self.event("set_budget", prefetch_bytes, max_live_bytes)

    def reset(self, forget: bool = False) -> None:
        self.performer.uses.clear()
        self.performer.collecting.clear()
        self._keep_no_longer(range(len(self.units)))
        self.awaits_backward = False
        self._enter("")
        self.event("reset", forget)
        self.check_nothing_is_left()
        assert not self.performer.reducing

    def check_nothing_is_left(self) -> None:
        """Nothing gathered that is not in use, nothing on its way."""
        assert set(self.performer.memory) <= self.performer.in_use()
        assert all(copy.waited for copy in self.performer.memory.values())

    def step(self, forward: list[int], backward: list[int] | None = None, **options) -> None:
        """A forward over ``forward`` and a backward over ``backward``, by default its reverse."""
        self.forward(forward, **options)
        self.backward(forward[::-1] if backward is None else backward)

    def forward(self, order: list[int], mode: str = "train", trains: bool = True) -> None:
        self.begin_forward(mode, trains)
        for unit in order:
            self.use(unit)
            self.release(unit)
        self.end_forward()

    def backward(self, order: list[int]) -> None:
        self.begin_backward()
        for unit in order:
            self.use(unit)
            self.collect(unit)
            self.release(unit)
            self.reduce(unit)
        self.end_backward()

    def _enter(self, phase: str, trains: bool = False) -> None:
        self.phase, self.trains = phase, trains
        self.used.clear()

    def _keep_no_longer(self, units) -> None:
        self.performer.kept_for_backward.difference_update(units)
        self.performer.kept_for_forward.difference_update(units)


def counts(scheduler, units: int) -> list:
    """All counters, of the whole and of each unit."""
    whole = [getattr(scheduler.counters, name) for name in COUNTERS]
    return [*whole, *(scheduler.unit_counters(unit) for unit in range(units))]


sizes = st.integers(0, 8)
budgets = st.sampled_from([0, 1, 3, 5, 8, 13, 21, 34, UNLIMITED])
unit_bytes = st.builds(
    UnitBytes,
    gathered=sizes,
    staging=st.just(0) | sizes,
    gradients=st.just(0) | sizes,
    reduce_input=st.just(0) | sizes,
    resident=st.sampled_from([False, False, False, True]),
    held=st.sampled_from([False, False, False, True]),
)


@st.composite
def orders(draw, base: list[int]) -> list[int]:
    """Around ``base``: as it is, some left out, one repeated, or shuffled."""
    kind = draw(st.sampled_from(["same", "same", "branch", "repeat", "shuffle"]))
    if kind == "branch":
        return [unit for unit in base if draw(st.booleans())]
    if kind == "repeat":
        return [*base, draw(st.sampled_from(base))]
    return draw(st.permutations(base)) if kind == "shuffle" else list(base)


class SchedulerMachine(RuleBasedStateMachine):
    """Passes in any order, with exceptions, changed weights and other bounds at any point."""

    @initialize(
        units=st.lists(unit_bytes, min_size=1, max_size=6),
        prefetch_bytes=budgets,
        max_live_bytes=budgets,
        reshard_after_backward=st.booleans(),
        data=st.data(),
    )
    def start(self, units, prefetch_bytes, max_live_bytes, reshard_after_backward, data) -> None:
        self.driver = Driver(units, prefetch_bytes, max_live_bytes, reshard_after_backward)
        self.base = data.draw(st.permutations(range(len(units))))
        self.by_hand: list[int] = []

    @rule(data=st.data(), mode=st.sampled_from(["train", "train", "eval"]), root=st.booleans())
    def forward(self, data, mode, root) -> None:
        order = data.draw(orders(self.base), "order")
        self.driver.begin_forward(mode, mode == "train")
        self._pass(data, order, root, self._compute)
        if self.driver.phase:
            self.driver.end_forward()

    @rule(data=st.data(), root=st.booleans(), recompute=st.booleans(), accumulate=st.booleans())
    def backward(self, data, root, recompute, accumulate) -> None:
        order = data.draw(orders(self.base[::-1]), "order")

        def differentiate(unit: int) -> None:
            if recompute:
                self.driver.use(unit, False)
                self.driver.release(unit)
            self.driver.use(unit)
            self.driver.collect(unit)
            self.driver.release(unit)
            if not accumulate:
                self.driver.reduce(unit)

        self.driver.begin_backward()
        self._pass(data, order, root, differentiate)
        if self.driver.phase:
            self.driver.end_backward()

    def _compute(self, unit: int) -> None:
        self.driver.use(unit)
        self.driver.release(unit)

    def _pass(self, data, order, root, compute) -> None:
        """``compute`` for each unit, inside the first if ``root``, with or without an accident."""
        accident = data.draw(st.sampled_from(["", "", "", "reset", "invalidate", "budget"]))
        place = data.draw(st.integers(0, len(order)), "place") if accident else len(order)
        if root and order:
            self.driver.use(order[0])
        for unit in order[:place]:
            compute(unit)
        if accident == "reset":
            self.by_hand.clear()
            return self.driver.reset(data.draw(st.booleans(), "forget"))
        if accident == "invalidate":
            self.driver.invalidate(data.draw(st.none() | st.lists(st.sampled_from(self.base))))
        if accident == "budget":
            self.driver.set_budget(data.draw(budgets), data.draw(budgets))
        for unit in order[place:]:
            compute(unit)
        if root and order:
            self.driver.release(order[0])

    @rule(data=st.data(), record=st.booleans())
    def use_by_hand(self, data, record) -> None:
        unit = data.draw(st.sampled_from(self.base))
        self.driver.use(unit, record)
        self.by_hand.append(unit)

    @precondition(lambda self: self.by_hand)
    @rule(data=st.data())
    def release_by_hand(self, data) -> None:
        place = data.draw(st.integers(0, len(self.by_hand) - 1))
        self.driver.release(self.by_hand.pop(place))

    @rule(data=st.data())
    def change_weights(self, data) -> None:
        self.driver.invalidate(data.draw(st.none() | st.lists(st.sampled_from(self.base))))

    @rule(prefetch_bytes=budgets, max_live_bytes=budgets)
    def change_bounds(self, prefetch_bytes, max_live_bytes) -> None:
        self.driver.set_budget(prefetch_bytes, max_live_bytes)

    @rule()
    def fail(self) -> None:
        self.driver.reset()
        self.by_hand.clear()

    @rule(data=st.data())
    def begin_and_stop(self, data) -> None:
        """A pass that raised, and nobody told."""
        if data.draw(st.booleans()):
            self.driver.begin_forward("train", data.draw(st.booleans()))
        else:
            self.driver.begin_backward()

    @rule(data=st.data())
    def misuse(self, data) -> None:
        unit = data.draw(st.sampled_from(self.base))
        self.driver.refused("use", len(self.base))
        self.driver.refused("invalidate", [unit, -1])
        if not self.driver.performer.uses[unit]:
            self.driver.refused("release", unit)
        if unit not in self.driver.performer.collecting:
            self.driver.refused("reduce", unit)
