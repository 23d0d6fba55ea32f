"""Makes the scheduler that decides when units are gathered: the compiled one where it is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from tpkernels import native
from tpkernels.reference import prefetch_scheduler as reference
from tpkernels.reference.prefetch_scheduler import UNLIMITED, Counters, UnitBytes

Actions = Sequence[tuple[int, int]]  # (kind, unit), to be performed in this order


class Scheduler(Protocol):
    """What the compiled scheduler and ``tpkernels.reference.prefetch_scheduler`` have in common."""

    implementation: ClassVar[str]
    counters: Counters

    def begin_forward(self, mode: str, trains: bool) -> Actions: ...
    def end_forward(self) -> Actions: ...
    def begin_backward(self) -> Actions: ...
    def end_backward(self) -> Actions: ...
    def use(self, index: int, record: bool = True) -> Actions: ...
    def release(self, index: int) -> Actions: ...
    def collect(self, index: int) -> Actions: ...
    def reduce(self, index: int) -> Actions: ...
    def invalidate(self, indices: Iterable[int] | None = None) -> Actions: ...
    def set_budget(self, prefetch_bytes: int, max_live_bytes: int = UNLIMITED) -> Actions: ...
    def reset(self, forget: bool = False) -> Actions: ...
    def unit_counters(self, index: int) -> tuple[int, int, int]: ...
    def is_gathered(self, index: int) -> bool: ...
    @property
    def idle_bytes(self) -> int: ...
    @property
    def gathered_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...


def make_scheduler(
    units: Sequence[UnitBytes],
    prefetch_bytes: int,
    max_live_bytes: int | None = None,
    max_pending_reduces: int = 2,
    reshard_after_backward: bool = True,
) -> Scheduler:
    """The compiled ``PrefetchScheduler``, or the Python one where there is none; equal actions.

    ``max_live_bytes=None`` is no bound; ``implementation`` of the result is ``"native"`` or
    ``"reference"``.

    Raises:
        ValueError: a size or bound that cannot be.
    """
    live = UNLIMITED if max_live_bytes is None else max_live_bytes
    rest = (prefetch_bytes, live, max_pending_reduces, reshard_after_backward)
    module: Any = native.load()
    if module is None:
        return reference.PrefetchScheduler(units, *rest)
    compiled = [
        module.UnitBytes(
            each.gathered,
            each.staging,
            each.gradients,
            each.reduce_input,
            each.resident,
            each.held,
        )
        for each in units
    ]
    return module.PrefetchScheduler(compiled, *rest)
