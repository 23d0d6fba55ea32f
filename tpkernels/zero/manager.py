"""``ZeroManager``: what a user does with a sharded model, besides calling it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.clip_grad import clip_grad_norm_
from tpkernels.errors import ConfigError
from tpkernels.huggingface import wrap_save_pretrained
from tpkernels.reference.prefetch_scheduler import ActionKind
from tpkernels.zero.byte_sizes import UNLIMITED, parse_bytes
from tpkernels.zero.engine import Engine
from tpkernels.zero.guards import attach_guards
from tpkernels.zero.optimizer import make_optimizer
from tpkernels.zero.state_dict import attach_state_dict_hooks
from tpkernels.zero.stats import collect_stats, format_stats
from tpkernels.zero.unit import Unit
from tpkernels.zero.whole_edits import WholeEdits


class UnshardHandle:
    """What ``unshard(async_op=True)`` gives: :meth:`wait` makes the parameters whole."""

    def __init__(self, finish: Any) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait for the all-gathers; a second call does nothing."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class ZeroManager:
    """Manages a model that :func:`tpkernels.zero` sharded. Verbs are as in ``fully_shard``.

    Outside forward and backward the model's parameters are this rank's shards: 1-D fp32 tensors,
    possibly empty, that any element-wise optimizer steps in place.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handles: list[UnshardHandle] = []  # that may not have been waited for
        attach_state_dict_hooks(engine)
        self._refuse_added = attach_guards(engine)
        wrap_save_pretrained(engine.module)

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._engine.module

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's shard of every parameter, a tied one once, in the order of the model."""
        self._engine.recover()
        return self.module.parameters()

    # --- gathering by hand ---

    def unshard(self, module: nn.Module | None = None, async_op: bool = False) -> Any:
        """Gather the units in ``module`` (default: all) until :meth:`reshard`.

        Collective: call it on all ranks. Their parameters are whole after it, or with ``async_op``
        after ``wait()`` of the handle it returns. They are in use: no budget frees them.
        To read only: an edit is lost at :meth:`reshard`, and nothing says so. Edit them inside
        ``gathered(writeback=True)``.
        """
        engine = self._engine
        engine.recover()
        engine.notice_edits()
        engine.notice_hidden_edits()
        units = self._units_of(module)
        later = []
        for unit in units:
            for kind, index in engine.scheduler.use(unit.index, False):
                if kind == ActionKind.WAIT and index == unit.index:
                    later.append(unit)
                else:
                    engine.perform([(kind, index)])
            engine.by_hand[unit.index] += 1

        def finish() -> None:
            for unit in later:
                unit.wait()
            for unit in units:
                unit.show_whole()
            engine.settle()

        handle = UnshardHandle(finish)
        if async_op:
            self._handles.append(handle)
            return handle
        handle.wait()
        return None

    def reshard(self, module: nn.Module | None = None) -> None:
        """Undo :meth:`unshard`; units that were not unsharded by hand are left alone."""
        while self._handles:
            self._handles.pop().wait()
        for unit in self._units_of(module):
            if self._engine.by_hand[unit.index]:
                self._engine.by_hand[unit.index] -= 1
                self._engine.release(unit)

    @contextlib.contextmanager
    def gathered(
        self,
        module: nn.Module | None = None,
        *,
        writeback: bool = False,
        from_rank: int | None = None,
    ) -> Iterator[None]:
        """Inside, the parameters of the units in ``module`` (default: all) are whole.

        Collective. To edit them in place (through ``.data`` too), say ``writeback=True``: the ranks
        must make the same edit, or ``from_rank`` says whose counts (its number within the group).

        Raises:
            ConfigError: edited without ``writeback``, or an optimizer stepped the shards inside;
                on every rank, nothing is written to the shards.
            AgreementError: the ranks' edits differ; likewise.
        """
        group = self._engine.group
        if from_rank is not None and (not writeback or not 0 <= from_rank < group.size):
            raise ConfigError(
                f"from_rank={from_rank!r} must be 0 to {group.size - 1}, with writeback=True"
            )
        self.unshard(module)
        edits = WholeEdits(self._units_of(module), group)
        edited = edits.units()  # whatever is raised: no copy that may hold an edit is used again
        try:
            yield
            if writeback:
                edited = edits.write_back(from_rank)
            else:
                edits.refuse()
                edited = []
        finally:
            self.reshard(module)
            self._engine.notice_edits(edited)

    # --- gradients ---

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backward reduces gradients over the ranks, or only collects them.

        Collected gradients are whole: the bytes of all trained parameters in the reduce dtype,
        on every rank, until a backward reduces them together with its own.
        """
        self._engine.reduces = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only collect gradients; the first one outside reduces the sum."""
        before = self._engine.reduces
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(before)

    def clip_grad_norm_(self, max_norm: float | None = None, norm_type: float = 2.0) -> Tensor:
        """:func:`tpkernels.clip_grad_norm_` of the model; None: the config's gradient_clipping."""
        bound = self._engine.config.gradient_clipping if max_norm is None else max_norm
        if bound is None:
            raise ConfigError(
                "max_norm is not given, nor does the config say gradient_clipping. Fix: "
                "manager.clip_grad_norm_(1.0)"
            )
        return clip_grad_norm_(self.module, bound, norm_type)

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        param_groups: Any = None,
        *,
        element_wise: bool = False,
        **settings: Any,
    ) -> torch.optim.Optimizer:
        """``cls`` over this rank's shards: ``manager.optimizer(torch.optim.AdamW, lr=3e-4)``.

        Where the config says ``gradient_clipping``, its ``step`` clips first.

        Args:
            param_groups: groups of ``module.parameters()``; None: one group of all. Shards are
                1-D: group by name, or by ``len(tpkernels.spec_of(p).whole_shape)``.
            element_wise: the caller knows that ``cls``, which we do not know, is.

        Raises:
            UnsupportedModuleError: an optimizer that looks at whole parameters.
            ConfigError: parameters that were added to the model after ``zero``, or are none of it.

        Warns:
            TPKernelsWarning: a group without parameters.
        """
        self._refuse_added()
        made = make_optimizer(
            cls, list(self.parameters()), param_groups, settings, element_wise=element_wise
        )
        if self._engine.config.gradient_clipping is not None:
            made.register_step_pre_hook(self._clip_before_step)
        made.register_state_dict_pre_hook(self._refuse_while_gathered)
        stepped = {id(each) for group in made.param_groups for each in group["params"]}
        units = [
            unit.index
            for unit in self._engine.units
            if any(id(slot.shard) in stepped for _, _, slot in unit.slots())
        ]
        made.register_step_post_hook(lambda *_: self._engine.notice_edits(units))
        return made

    def _refuse_while_gathered(self, _: Any) -> None:
        shown = [unit.name for unit in self._engine.units if unit.shown]
        if shown:
            raise ConfigError(
                f"optimizer.state_dict() while {shown[0]!r} is gathered: the model shows whole "
                "parameters, by which PyTorch's get_optimizer_state_dict does not find the shards "
                "that are stepped. Fix: call it outside of manager.gathered() and unshard()"
            )

    def _clip_before_step(self, *_: Any) -> None:
        self.clip_grad_norm_()

    # --- passes ---

    @contextlib.contextmanager
    def mode(self, name: str) -> Iterator[None]:
        """Forwards inside keep an order of their own under ``name`` (a reference model's pass)."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"mode={name!r} must be a name, for example 'reference'")
        before, self._engine.mode = self._engine.mode, name
        try:
            yield
        finally:
            self._engine.mode = before

    def set_budget(self, prefetch_bytes: Any = None, max_live_bytes: Any = None) -> None:
        """Other bounds from here on; None keeps one. The same on all ranks."""
        engine = self._engine
        if prefetch_bytes is not None:
            engine.prefetch_bytes = parse_bytes(prefetch_bytes, "prefetch_bytes")
        if max_live_bytes is not None:
            engine.max_live_bytes = parse_bytes(max_live_bytes, "max_live_bytes")
        bound = UNLIMITED if engine.max_live_bytes is None else engine.max_live_bytes
        engine.perform(engine.scheduler.set_budget(engine.prefetch_bytes, bound))

    def reset(self) -> None:
        """Shard every unit, whatever was going on; for after an error that was caught.

        Gradients that are not reduced yet are dropped, those collected in ``no_sync`` too.
        """
        self._handles.clear()
        self._engine.reset()

    # --- what happened ---

    def stats(self) -> dict[str, Any]:
        """Counters since the start: bytes now and at their peak, hits, stalls; fit for JSON."""
        self._engine.recover()
        return collect_stats(self._engine)

    def report(self) -> str:
        """The same as one page of text."""
        return format_stats(self.stats())

    def __repr__(self) -> str:
        config = self._engine.config
        return (
            f"ZeroManager(stage {config.stage}, {len(self._engine.units)} units, "
            f"{self._engine.group.size} ranks)"
        )

    def _units_of(self, module: nn.Module | None) -> list[Unit]:
        if module is None:
            return self._engine.units
        inside = {id(each) for each in module.modules()}
        units = [u for u in self._engine.units if any(id(m) in inside for m in u.modules)]
        if not units:
            raise ConfigError(
                f"{type(module).__name__} holds no unit of this model; the units are "
                f"{[unit.name for unit in self._engine.units][:8]}. Fix: pass one of their modules"
            )
        return units
