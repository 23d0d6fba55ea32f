"""``Unit``: one thing to the scheduler, one or more flat buffers to the memory.

Its state is the scheduler's; what is here performs: gather, wait, free, reduce, and which tensors
the modules show as their parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from tpkernels import instrument
from tpkernels.errors import ConfigError
from tpkernels.reference.prefetch_scheduler import UnitBytes
from tpkernels.zero.flat_buffer import FlatBuffer, Slot
from tpkernels.zero.gradients import GradientBuffer
from tpkernels.zero.roll_call import GATHER, REDUCE, RollCall
from tpkernels.zero.transfers import Transfers, Wait


@dataclass
class _Reduction:
    """One that was started, of gradients ``filled``, those ``missed`` on this rank with zeros."""

    gradient: GradientBuffer
    whole: Tensor
    filled: set[int]
    missed: set[int]
    wait: Wait


class Unit:
    """Parameters that are gathered and freed together.

    Args:
        name: qualified name of its first module; ``"(root)"`` is the model itself.
        modules: whose forward needs it.
        buffers: flat buffers, in an order that is the same on all ranks.
        gradients: of the buffers that are trained.
    """

    def __init__(
        self,
        index: int,
        name: str,
        modules: list[nn.Module],
        buffers: list[FlatBuffer],
        gradients: list[GradientBuffer],
        transfers: Transfers,
    ) -> None:
        self.index, self.name, self.modules = index, name, modules
        self.buffers, self.gradients = buffers, gradients
        self._transfers = transfers
        self._gathering: list[Wait] = []
        self._reducing: list[_Reduction] = []
        self.shown = 0  # how many hold its whole parameters in its modules
        self.arrived: set[tuple[int, int]] = set()  # gradients of this backward
        self.expected: set[tuple[int, int]] | None = None  # None: of all trained parameters
        self.stall_seconds = 0.0
        self.gather_bytes_sent = 0
        self.reduce_bytes_sent = 0

    def bytes(self, *, resident: bool, held: bool) -> UnitBytes:
        """What the scheduler charges for it."""
        gradients = sum(each.nbytes for each in self.gradients)
        return UnitBytes(
            gathered=sum(buffer.nbytes for buffer in self.buffers),
            staging=sum(
                buffer.layout.shard_numel * buffer.master.element_size()
                for buffer in self.buffers
                if buffer.master.device != buffer.whole.device
            ),
            gradients=gradients,
            reduce_input=gradients,
            resident=resident,
            held=held,
        )

    def slots(self) -> Iterator[tuple[int, int, Slot]]:
        """(buffer, place in it, slot) of every parameter."""
        for which, buffer in enumerate(self.buffers):
            for index, slot in enumerate(buffer.slots):
                yield which, index, slot

    def _operation(self, name: str) -> instrument.operation:
        """For who records, and for errors: what is inside serves this unit."""
        first = self.buffers[0]
        return instrument.operation(name, self.name, first.group.name, first.whole)

    # --- gathering ---

    def gather(self, roll: RollCall) -> None:
        """Start the all-gather of every buffer."""
        call = roll.start(GATHER, self.index)
        for buffer in self.buffers:
            self._transfers.allocate(buffer)
        with self._operation("zero.gather"):
            self._gathering = [self._transfers.gather(buffer) for buffer in self.buffers]
        if call is not None:
            self._gathering.insert(0, lambda: roll.finish(call))  # type: ignore[arg-type, return-value]
        for buffer in self.buffers:
            others = buffer.group.size - 1
            self.gather_bytes_sent += others * buffer.own.nbytes

    def wait(self) -> None:
        """Wait for it; compute may use the whole parameters from here on."""
        if not self._gathering:
            return
        begin = time.perf_counter()
        with self._operation("zero.wait"):
            while self._gathering:  # after an error the rest is left to `drain`
                self._gathering[0]()
                del self._gathering[0]
        self.stall_seconds += time.perf_counter() - begin

    def free(self) -> None:
        """Take the memory of the whole parameters."""
        self.wait()  # WAW: nothing may still be on its way into it
        for buffer in self.buffers:
            self._transfers.free(buffer)

    def enter(self) -> None:
        """It was waited for, perhaps on another stream: compute reads it on this one now."""
        for buffer in self.buffers:
            self._transfers.use(buffer)

    def show_whole(self) -> None:
        """The modules' parameters are the whole ones; counted."""
        self.wait()  # of one unsharded by hand nobody may have waited
        self.enter()
        self.shown += 1
        if self.shown > 1:
            return
        for which, _, slot in self.slots():
            wanted = slot.shard.requires_grad
            if slot.whole.requires_grad != wanted:
                if wanted and not self.buffers[which].trains:
                    raise ConfigError(
                        f"{slot.name} was frozen when zero() was called and requires a gradient "
                        "now; it has no place for one. Fix: freeze and unfreeze before zero()"
                    )
                slot.whole.requires_grad_(wanted)
            for module, attribute in slot.owners:
                module._parameters[attribute] = slot.whole

    def show_shards(self) -> None:
        """The modules' parameters are this rank's shards again, once all are done."""
        self.shown -= 1
        if self.shown == 0:
            self.hide()

    def hide(self) -> None:
        """Show the shards, whoever holds what."""
        self.shown = 0
        for _, _, slot in self.slots():
            for module, attribute in slot.owners:
                module._parameters[attribute] = slot.shard

    # --- gradients ---

    def trained(self) -> Iterator[tuple[int, int, Slot]]:
        """(gradient buffer, place in it, slot) of the parameters that want a gradient now."""
        for which, gradient in enumerate(self.gradients):
            for index, slot in enumerate(gradient.buffer.slots):
                if slot.shard.requires_grad:
                    yield which, index, slot

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient was collected and not yet reduced."""
        return any(each.whole is not None for each in self.gradients)

    def collect(self, which: int, index: int, gradient: Tensor) -> None:
        """Add the gradient of parameter ``index`` of gradient buffer ``which``."""
        self._open(self.gradients[which]).add(index, gradient)

    def _open(self, collected: GradientBuffer) -> GradientBuffer:
        self._transfers.write(collected.open(self._transfers.empty))
        return collected

    def fill_lacking(self) -> None:
        """Count those of :meth:`lacking` as zero."""
        for which, index, _ in self.lacking():
            self._open(self.gradients[which]).fill(index)

    def is_complete(self) -> bool:
        """Whether every gradient that this backward can bring has arrived."""
        if self.expected is not None:
            return bool(self.expected) and self.expected <= self.arrived
        return all((which, index) in self.arrived for which, index, _ in self.trained())

    def lacking(self) -> list[tuple[int, int, Slot]]:
        """Of :meth:`trained`, those that collected no gradient."""
        return [each for each in self.trained() if each[1] not in self.gradients[each[0]].filled]

    def missing(self) -> list[str]:
        """Names of the parameters that collected no gradient."""
        return [slot.name for _, _, slot in self.lacking()]

    def reduce(self, roll: RollCall) -> None:
        """Start the reduction of all that was collected."""
        pairs = [(which, i) for which, g in enumerate(self.gradients) for i in sorted(g.filled)]
        call = roll.start(REDUCE, self.index, (part for pair in pairs for part in pair))
        first = len(self._reducing)
        for gradient in self.gradients:
            if gradient.whole is None:
                continue
            self._transfers.write(gradient.whole)  # zeros where nothing came
            whole, filled, missed = gradient.take()
            self.reduce_bytes_sent += (
                whole.nbytes // gradient.buffer.group.size * (gradient.buffer.group.size - 1)
            )
            with self._operation("zero.reduce"):
                wait = self._transfers.reduce(whole)
            self._reducing.append(_Reduction(gradient, whole, filled, missed, wait))
        if call is not None:
            started = self._reducing[first]
            started.wait = _after(lambda: roll.finish(call), started.wait)

    def wait_reduce(self, world: int) -> None:
        """Wait for it, and hand each shard its gradient."""
        while self._reducing:  # likewise
            each = self._reducing[0]
            begin = time.perf_counter()
            with self._operation("zero.wait_reduce"):
                parts = each.wait()
            del self._reducing[0]
            self.stall_seconds += time.perf_counter() - begin
            each.gradient.install(parts, each.filled, each.missed, world)
            self._transfers.finish(each.whole, keep=each.gradient.give_back(each.whole))

    def drain(self) -> None:
        """After an error: let what is in flight end, and forget it."""
        gathering, self._gathering = self._gathering, []
        reducing, self._reducing = self._reducing, []
        if not all(_ends(wait) for wait in gathering):
            for buffer in self.buffers:
                self._transfers.lose(buffer)
        ends = True
        for each in reducing:
            ends = ends and _ends(each.wait)
            if ends:
                self._transfers.finish(each.whole)
        for gradient in self.gradients:
            for whole in gradient.drop():
                self._transfers.finish(whole)
        self.arrived.clear()


def _ends(wait: Wait) -> bool:
    """Wait; whether that was possible. If not, the error that led here is the one to report."""
    try:
        wait()
    except RuntimeError:  # where the ranks parted before, or one is gone
        return False
    return True


def _after(first: Callable[[], None], then: Wait) -> Wait:
    def wait() -> Tensor:
        first()
        return then()

    return wait
