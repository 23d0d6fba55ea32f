"""``Engine``: performs what the scheduler decides, when the hooks say what happens."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.agreement import control_device
from tpkernels.comm.collectives import all_reduce_max
from tpkernels.comm.exchange import in_flight
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError
from tpkernels.reference.prefetch_scheduler import ActionKind
from tpkernels.zero.config import ZeroConfig
from tpkernels.zero.gradients import group_size
from tpkernels.zero.hooks import Call, ModuleHooks
from tpkernels.zero.roll_call import COMPARE, RollCall
from tpkernels.zero.transfers import Transfers
from tpkernels.zero.unit import Unit
from tpkernels.zero.unused import expect_reachable
from tpkernels.zero.whole_edits import own_part_differs


class Engine:
    """Units, the scheduler, and the passes over the model.

    Attributes:
        mode: the user's name for the passes that follow, or None: "train" with gradients, "eval"
            without.
        reduces: whether gradients are reduced when they are complete, or only collected.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[Unit],
        scheduler: Any,
        group: Group,
        replicas: Group | None,
        config: ZeroConfig,
        transfers: Transfers,
        residents: Collection[int] = (),
    ) -> None:
        self._transfers = transfers
        self.module, self.units, self.config = module, units, config
        self.group, self.replicas = group, replicas
        self.scheduler = scheduler
        self.precision = config.precision
        self.prefetch_bytes, self.max_live_bytes = config.prefetch_bytes, config.max_live_bytes
        self.mode: str | None = None
        self.reduces = True
        self._world = group_size(group, replicas)
        self._roll = RollCall(
            group, [unit.name for unit in units], self._explain, config.find_unused_parameters
        )
        self._backward_runs = False
        self._reduced: set[int] = set()  # in the backward that runs
        self._used: set[tuple[int, int, int]] = set()  # (unit, buffer, place): real gradients here
        # Without gathers to keep ranks in step, only the end of backward is the same on all.
        self._reduces_late = config.find_unused_parameters and config.stage < 3
        self._backward: weakref.ref[_Backward] | None = None
        self._open: dict[int, list[Call]] = {}
        self._versions = [self._version(unit) for unit in units]
        self._residents = set(residents)
        self._outdated: set[int] = set()  # units whose copy, if there is one, is of older weights
        self._suspects: set[int] = set()  # residents that may differ from their shards
        self._root = next((unit for unit in units if module in unit.modules), None)
        self.by_hand: Counter[int] = Counter()  # units gathered by hand, how often
        self._borrows_root = False  # a part of the model was called by itself
        for unit in units:
            for which, index, slot in unit.trained():
                # Weakly: the collector does not see what autograd holds, the model through it.
                slot.whole.register_post_accumulate_grad_hook(
                    partial(_tell_arrived, weakref.ref(self), unit.index, which, index)
                )
        self.hooks = ModuleHooks(self, module, units)

    # --- what the scheduler decides ---

    def perform(self, actions: list[Any]) -> None:
        """Do ``actions`` in order."""
        for kind, index in actions:
            unit = self.units[index]
            if kind == ActionKind.GATHER:
                self._outdated.discard(index)
                unit.gather(self._roll)
            elif kind == ActionKind.WAIT:
                unit.wait()
            elif kind == ActionKind.FREE:
                unit.free()
            elif kind == ActionKind.REDUCE:
                unit.reduce(self._roll)
            else:
                unit.wait_reduce(self._world)
        self._trim_pool()

    def settle(self) -> None:
        """The host may change shards from here on."""
        self._transfers.settle()

    def _trim_pool(self) -> None:
        """What is gathered and not in use, and memory for it, are within one bound."""
        self._transfers.pool.keep(self.prefetch_bytes - self.scheduler.idle_bytes)

    # --- forward ---

    def begin_forward(self, module: nn.Module) -> Unit | None:
        """``module`` is entered, and none around it runs; the unit that it may use besides its own.

        A part of the model, called by itself, may use parameters that are in the root's unit.
        """
        self.recover()
        self.notice_edits()
        self.notice_hidden_edits()
        trains = torch.is_grad_enabled()
        self.perform(self.scheduler.begin_forward(self.mode or _mode(trains), trains))
        if self._root is None or module is self.module:
            return None
        self.use(self._root, True)
        self._borrows_root = True
        return self._root

    def end_forward(self, output: Any) -> None:
        """It is left."""
        if self.config.find_unused_parameters and torch.is_grad_enabled():
            expect_reachable(self.units, output)
        if self._borrows_root:
            assert self._root is not None
            self._borrows_root = False
            self.release(self._root)
        self.perform(self.scheduler.end_forward())
        self.settle()

    def use(self, unit: Unit, record: bool) -> None:
        """A module of ``unit`` is about to run forward."""
        self.perform(self.scheduler.use(unit.index, record))
        unit.show_whole()

    def release(self, unit: Unit) -> None:
        """It has run."""
        unit.show_shards()
        self.perform(self.scheduler.release(unit.index))

    # --- backward ---

    def begin_backward(self) -> None:
        """Autograd has reached the model; does nothing if it had."""
        self.recover()
        if self._backward_runs:
            return
        self._backward_runs = True
        self.notice_edits()
        self._reduced.clear()
        self._used.clear()
        for unit in self.units:
            unit.arrived.clear()
            for collected in unit.gradients:
                collected.forget_zeroed()
        self.perform(self.scheduler.begin_backward())
        backward = _Backward(self._end_backward)
        self._backward = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)  # type: ignore[attr-defined]

    def open_call(self, call: Call) -> None:
        """Autograd is about to run backward through ``call``."""
        if call.is_open:
            return
        if torch.is_grad_enabled() and self.config.reshard_after_backward and not call.unit.shown:
            raise ConfigError(
                "create_graph=True needs the gathered weights after backward, which frees them. "
                "Fix: zero(..., config=ZeroConfig(reshard_after_backward=False)), or run it inside "
                "`with manager.gathered(model):`"
            )
        call.is_open = True
        self._open.setdefault(call.unit.index, []).append(call)
        self.perform(self.scheduler.use(call.unit.index))
        call.unit.show_whole()  # a part of its forward may be recomputed without its hooks

    def close_call(self, call: Call) -> None:
        """Every gradient of the inputs of ``call`` is there."""
        call.is_open = False
        unit = call.unit
        self._open[unit.index].remove(call)
        unused = unit.expected == set() and unit.index not in self._reduced
        if unused and self.reduces and not self._reduces_late and any(unit.trained()):
            self._reduce(unit)  # here, since on other ranks its gradients came before this
        unit.show_shards()
        self.perform(self.scheduler.release(unit.index))

    def _arrived(self, unit: Unit, which: int, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if torch.is_grad_enabled():
            raise ConfigError(
                "backward(create_graph=True) would have to keep the graph of gradients that are "
                "reduced over ranks. Fix: torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        self.begin_backward()
        if not unit.has_gradients:
            self.perform(self.scheduler.collect(unit.index))
        unit.collect(which, index, gradient)
        unit.arrived.add((which, index))
        if unit.is_complete():
            if self.reduces and not self._reduces_late:
                self._reduce(unit)
            for call in list(self._open.get(unit.index, ())):
                if call.inputs == 0:
                    self.close_call(call)

    def _reduce(self, unit: Unit) -> None:
        self._reduced.add(unit.index)
        self._suspects.add(unit.index)
        if self.config.find_unused_parameters:
            if not unit.has_gradients:
                self.perform(self.scheduler.collect(unit.index))
            lacking = {each[:2] for each in unit.lacking()}
            self._used |= {
                (unit.index, *each[:2]) for each in unit.trained() if each[:2] not in lacking
            }
            unit.fill_lacking()
        unit.arrived.clear()  # a second round of gradients is complete on its own
        self.perform(self.scheduler.reduce(unit.index))

    def _end_backward(self) -> None:
        for unit in reversed(self.units):
            late = self.config.find_unused_parameters and unit.index not in self._reduced
            if self.reduces and (unit.has_gradients or (late and any(unit.trained()))):
                self._reduce(unit)
            for call in list(self._open.get(unit.index, ())):
                self.close_call(call)
            unit.expected = None
            if not self.reduces:
                for collected in unit.gradients:
                    collected.mark_collected()
        self._backward_runs = False
        self.perform(self.scheduler.end_backward())
        if self.config.find_unused_parameters and self.reduces:
            self._install_doubtful()
        self.settle()

    def _install_doubtful(self) -> None:
        """Parameters that got a gradient on some ranks only get it; on none, they get none."""
        trained = [(unit.index, *each[:2]) for unit in self.units for each in unit.trained()]
        device = control_device(self.group)
        mask = torch.tensor([each in self._used for each in trained], dtype=torch.int32).to(device)
        for group in (self.group, self.replicas):
            if group is not None:
                mask = all_reduce_max(mask, group.name)
        used = {each for each, on in zip(trained, mask.tolist(), strict=True) if on}
        for unit in self.units:
            for which, gradient in enumerate(unit.gradients):
                gradient.install_doubtful({i for u, w, i in used if (u, w) == (unit.index, which)})

    def refuse_unreduced(self, does: str, shards: Collection[int] | None = None) -> None:
        """Raise if parameters have gradients that were only collected, which ``does`` cannot see.

        ``shards``: ids of those that matter; None: all.
        """
        if self._backward_runs:  # an optimizer that steps each parameter when its gradient is there
            return
        waiting = [
            slot.name
            for unit in self.units
            for collected in unit.gradients
            for slot in collected.waiting()
            if shards is None or id(slot.shard) in shards
        ]
        if waiting:
            raise ConfigError(
                f"{does} while gradients that no_sync() collected wait to be reduced "
                f"({', '.join(waiting[:5])}): it would not see them. Fix: run the last backward of "
                "a step outside no_sync(), or drop them with zero_grad()"
            )

    # --- staleness and errors ---

    def notice_edits(self, surely: Iterable[int] = ()) -> None:
        """Copies gathered before an optimizer's step or another edit in place are not used.

        ``surely``: units edited whether or not that shows (through ``.data`` it does not).
        """
        edited = set(surely)
        for unit in self.units:
            version = self._version(unit)
            if version != self._versions[unit.index] or unit.index in edited:
                self._versions[unit.index] = version
                edited.add(unit.index)
                for buffer in unit.buffers:
                    buffer.outdate()
        if edited:
            self._outdated |= edited
            self.perform(self.scheduler.invalidate(sorted(edited)))

    def suspect(self, unit: Unit) -> None:
        """Its copy may have been edited: compare it before the next forward."""
        self._suspects.add(unit.index)

    def notice_hidden_edits(self) -> None:
        """The same for edits that no version shows (through ``.data``), by value; collective.

        Asked of copies that are there and should be of the newest weights: those kept for a
        backward that has not come, and residents with new gradients, which an optimizer may have
        stepped, or that were gathered by hand. A training step with a torch optimizer has neither,
        and pays nothing.
        """
        if self._backward_runs:
            return
        compared = [
            unit
            for unit in self.units
            if self.scheduler.is_gathered(unit.index)
            and unit.index not in self._outdated
            and not self.by_hand[unit.index]  # edits of these are gathered()'s to judge
            and (unit.index not in self._residents or unit.index in self._suspects)
        ]
        self._suspects.clear()
        if not compared:
            return
        indices = [unit.index for unit in compared]
        self._roll.finish(self._roll.start(COMPARE, indices[0], indices))
        for unit in compared:
            unit.wait()  # RAW: its gather may not have written this rank's part yet
            unit.enter()
        differs = [any(own_part_differs(b).any() for b in unit.buffers) for unit in compared]
        mask = torch.tensor(differs, dtype=torch.int32, device=control_device(self.group))
        agreed = all_reduce_max(mask, self.group.name).tolist()
        if any(agreed):
            self.notice_edits(index for index, on in zip(indices, agreed, strict=True) if on)

    @staticmethod
    def _version(unit: Unit) -> tuple[int, ...]:
        return tuple(buffer.master._version for buffer in unit.buffers)

    def recover(self) -> None:
        """Reset after a pass that ended with an error that no hook reports."""
        backward = self._backward() if self._backward is not None else None
        if (self._backward_runs and backward is None) or self.hooks.is_abandoned:
            self.reset()

    def reset(self) -> None:
        """Shard every unit again, whatever was going on; gradients half collected are dropped."""
        self._backward_runs = self._borrows_root = False
        self._open = {}
        self.by_hand.clear()
        self.hooks.forget()
        held = in_flight()  # until it is known whether they end
        for unit in self.units:
            unit.drain()
            unit.hide()
        restarts = self._roll.is_broken and self._transfers.restart()
        if restarts:
            self._roll.restart()
        del held
        self.scheduler.reset(restarts)
        # What was decided need not have been done: nothing that is there is trusted.
        self.scheduler.invalidate(range(len(self.units)))
        for unit in self.units:
            if not self.scheduler.is_gathered(unit.index):
                unit.free()
        self.settle()
        self._trim_pool()

    def _explain(self, index: int) -> str:
        missing = self.units[index].missing() if self.units[index].has_gradients else []
        waiting = [unit.name for unit in self.units if unit.has_gradients and unit.missing()]
        if missing:
            return f"here {', '.join(missing[:5])} got no gradient"
        if waiting:
            unit = next(unit for unit in self.units if unit.name == waiting[0])
            return f"here {', '.join(unit.missing()[:5])} of {waiting[0]!r} got no gradient yet"
        return "here every gradient is there"


def _tell_arrived(
    engine: weakref.ref[Engine], unit: int, which: int, index: int, parameter: Tensor
) -> None:
    if (alive := engine()) is not None:
        alive._arrived(alive.units[unit], which, index, parameter)


class _Backward:
    """Called when a backward ends; autograd drops it uncalled when one fails."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()


def _mode(trains: bool) -> str:
    return "train" if trains else "eval"
