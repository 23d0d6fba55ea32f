"""``ZeroManager``: what a user does with a sharded model, besides calling it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.clip_grad import clip_grad_norm_
from tpkernels.errors import ConfigError, ShardedSaveError
from tpkernels.huggingface import wrap_save_pretrained
from tpkernels.reference.prefetch_scheduler import ActionKind
from tpkernels.zero.agreed_settings import check_budget
from tpkernels.zero.byte_sizes import UNLIMITED, parse_bytes
from tpkernels.zero.engine import Engine
from tpkernels.zero.guards import attach_guards
from tpkernels.zero.optimizer import make_optimizer
from tpkernels.zero.state_dict import attach_state_dict_hooks
from tpkernels.zero.stats import collect_stats, format_stats
from tpkernels.zero.unit import Unit
from tpkernels.zero.whole_edits import WholeEdits
from tpkernels.zero.whole_places import put_all_back


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
        self._open_edits: list[WholeEdits] = []  # of gathered() around one another
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
        """Gather the units that hold parameters of ``module`` (default: all) until :meth:`reshard`.

        Collective: call it on all ranks. Their parameters are whole after it, or with ``async_op``
        after ``wait()`` of the handle it returns. They are in use: no budget frees them.
        To read only: an edit in place is lost at :meth:`reshard`, and nothing says so. Edit them
        inside ``gathered(writeback=True)``.
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
        """Undo :meth:`unshard`; units that were not unsharded by hand are left alone.

        Raises:
            ConfigError: a parameter was replaced meanwhile (``p.data = x``); that is undone.
        """
        while self._handles:
            self._handles.pop().wait()
        units = self._units_of(module)
        replaced = [] if self._open_edits else put_all_back(units)
        for unit in units:
            if self._engine.by_hand[unit.index]:
                self._engine.by_hand[unit.index] -= 1
                self._engine.release(unit)
                if not self._open_edits:
                    self._engine.suspect(unit)
        if replaced:
            raise ConfigError(
                f"{', '.join(replaced[:5])} replaced (.data = ..., an assignment, model.to()) "
                "between unshard() and reshard(), which is to read: the shards are unchanged, and "
                "it is undone. Fix: edit inside manager.gathered(module, writeback=True)"
            )

    @contextlib.contextmanager
    def gathered(
        self,
        module: nn.Module | None = None,
        *,
        writeback: bool = False,
        from_rank: int | None = None,
    ) -> Iterator[None]:
        """Inside, units that hold parameters of ``module`` (default: all) are whole.

        Collective. To edit them (in place, through ``.data``, or by new values of the same shape
        and dtype), say ``writeback=True``: the ranks must make the same edit, or ``from_rank``
        says whose counts (its number within the group). One may be inside another.

        Raises:
            ConfigError: edited without ``writeback``, replaced by another shape or dtype, or an
                optimizer stepped the shards inside; on every rank, nothing is written to the
                shards.
            AgreementError: the ranks' edits differ; likewise.
        """
        self._check_from_rank(from_rank, writeback)
        for outer in self._open_edits:
            outer.note()
        self.unshard(module)
        edits = WholeEdits(self._units_of(module), self._engine.group)
        self._open_edits.append(edits)
        edited = edits.units()  # whatever is raised: no copy that may hold an edit is used again
        try:
            yield
            edited = edits.write_back(from_rank) if writeback else edits.refuse()
        except BaseException:
            edits.put_back()
            for outer in self._open_edits:
                outer.note()
            raise
        finally:
            self._open_edits.remove(edits)
            self.reshard(module)
            self._engine.notice_edits(edited)
            for outer in self._open_edits:
                outer.resume(edits.written)

    def _check_from_rank(self, from_rank: Any, writeback: bool) -> None:
        ranks = range(self._engine.group.size)
        whole = isinstance(from_rank, int) and not isinstance(from_rank, bool)
        if from_rank is not None and not (writeback and whole and from_rank in ranks):
            raise ConfigError(
                f"from_rank={from_rank!r}, writeback={writeback!r}; allowed: None, or with "
                f"writeback=True a rank of the group, 0 to {len(ranks) - 1}. Fix: "
                "gathered(module, writeback=True, from_rank=0)"
            )

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
        self._engine.refuse_unreduced("clip_grad_norm_()")
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
        made.register_step_pre_hook(lambda *_: self._engine.refuse_unreduced("step()", stepped))
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
        """Other bounds from here on; None keeps one. The same on all ranks; collective.

        Raises:
            AgreementError: the ranks were given different bounds; none is changed.
        """
        engine = self._engine
        prefetch, live = engine.prefetch_bytes, engine.max_live_bytes
        if prefetch_bytes is not None:
            prefetch = parse_bytes(prefetch_bytes, "prefetch_bytes")
        if max_live_bytes is not None:
            live = parse_bytes(max_live_bytes, "max_live_bytes")
        check_budget(prefetch, live, engine.group, engine.replicas)
        engine.prefetch_bytes, engine.max_live_bytes = prefetch, live
        bound = UNLIMITED if engine.max_live_bytes is None else engine.max_live_bytes
        engine.perform(engine.scheduler.set_budget(engine.prefetch_bytes, bound))

    def reset(self) -> None:
        """Shard every unit, whatever was going on; for after an error that was caught.

        Gradients that are not reduced yet are dropped, those collected in ``no_sync`` too.
        """
        self._handles.clear()
        put_all_back(self._engine.units)
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedSaveError(
            "a ZeroManager holds process groups and memory of this process; it cannot be pickled "
            "or copied. Fix: torch.save(tpkernels.full_state_dict(model), path), and zero() on "
            "the model that is built again"
        )

    def _units_of(self, module: nn.Module | None) -> list[Unit]:
        """The units whose modules are in ``module``, or that hold parameters of it."""
        if module is None:
            return self._engine.units
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"module={module!r} is a {type(module).__name__}; allowed: None (all), or a module "
                "of the model. Fix: model.get_submodule(name) where it is a name"
            )
        inside = {id(each) for each in module.modules()}
        units = [
            unit
            for unit in self._engine.units
            if any(id(each) in inside for each in unit.modules)
            or any(id(owner) in inside for _, _, slot in unit.slots() for owner, _ in slot.owners)
        ]
        if not units:
            raise ConfigError(
                f"{type(module).__name__} holds no parameter of this model, whose units are "
                f"{[unit.name for unit in self._engine.units][:8]}. Fix: pass a module that does"
            )
        return units
