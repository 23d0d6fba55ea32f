"""What happens before and after a module's forward and backward, so that its unit is there.

    forward    [enter: use(unit)] ... the module's forward ... [exit: release(unit)]
    backward   [a node of the outputs is about to run: use] ... [the inputs' gradients are there:
               release]

The outputs' nodes are hooked, not the tensors: that survives in-place edits of an output. The
inputs pass through a view each, whose node runs after every other node of the module, since
autograd runs what was made last first. No tensor is copied.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tpkernels.zero.policies import Precision
from tpkernels.zero.unit import Unit

_DEPTH = 8  # of containers in which outputs are looked for
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_OPAQUE = (str, bytes, int, float, complex, type, torch.dtype, torch.device)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Call:
    """One forward of a unit under autograd; its backward may come once, several times or never."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.inputs = 0  # whose gradients end it
        self.left = 0
        self.is_open = False


class Events(Protocol):
    """What the hooks report."""

    precision: Precision

    def recover(self) -> None: ...
    def begin_forward(self, module: nn.Module) -> Unit | None: ...
    def end_forward(self, output: Any) -> None: ...
    def use(self, unit: Unit, record: bool) -> None: ...
    def release(self, unit: Unit) -> None: ...
    def begin_backward(self) -> None: ...
    def open_call(self, call: Call) -> None: ...
    def close_call(self, call: Call) -> None: ...
    def reset(self) -> None: ...


@dataclasses.dataclass
class _Frame:
    module: nn.Module
    outside: BaseException | None  # being handled when the forward began
    runs: FrameType  # the call itself, and its thread
    thread: int
    scoped: bool = False
    used: bool = False
    calls: list[Call] = dataclasses.field(default_factory=list)


class ModuleHooks:
    """Hooks on the modules of the units, and on those around them, which mark a whole forward."""

    def __init__(self, events: Events, root: nn.Module, units: list[Unit]) -> None:
        self._events = events
        self._frames: list[_Frame] = []
        self._depth = 0
        unit_of = {id(module): unit for unit in units for module in unit.modules}
        self.handles = []
        for module in root.modules():
            inside = any(id(each) in unit_of for each in module.modules())
            if not inside and module is not root:
                continue
            unit = unit_of.get(id(module))
            self.handles += [
                module.register_forward_pre_hook(
                    self._entering(unit), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(
                    self._exiting(unit), always_call=True, with_kwargs=True
                ),
            ]

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model runs."""
        return self._depth > 0

    @property
    def is_abandoned(self) -> bool:
        """Whether a forward was left without a hook being told, as by a KeyboardInterrupt."""
        if not self._frames or self._frames[0].thread != threading.get_ident():
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frames[0].runs:
            frame = frame.f_back
        return frame is None

    def forget(self) -> None:
        """After an error: no forward runs."""
        self._frames, self._depth = [], 0

    def _entering(self, unit: Unit | None) -> Any:
        @torch.compiler.disable
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._frames:
                self._events.recover()
            running = _module_call()
            frame = _Frame(module, sys.exc_info()[1], running, threading.get_ident())
            recomputing = in_backward()
            borrowed: Unit | None = None
            if not recomputing:
                if self._depth == 0:
                    try:
                        borrowed = self._events.begin_forward(module)
                    except BaseException:
                        self._events.reset()  # not entered, so no hook sees it leave
                        raise
                self._depth += 1
                frame.scoped = True
            self._frames.append(frame)
            outermost = frame.scoped and self._depth == 1
            if unit is not None:
                self._events.use(unit, not recomputing)
                frame.used = True
            if torch.is_grad_enabled():
                frame.calls = [Call(each) for each in (borrowed, unit) if each is not None]
            args, kwargs = self._cast_inputs(unit, outermost, args, kwargs)
            if frame.calls:
                args, kwargs = self._mark_inputs(frame.calls, args, kwargs)
            return args, kwargs

        return enter

    def _exiting(self, unit: Unit | None) -> Any:
        @torch.compiler.disable
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not self._frames or self._frames[-1].module is not module:
                return None  # it failed before it was entered
            frame = self._frames.pop()
            error = sys.exc_info()[1]
            failed = error is not None and error is not frame.outside
            if unit is not None and frame.used:
                self._events.release(unit)
            self._depth -= frame.scoped
            ended = frame.scoped and self._depth == 0
            if failed:
                if ended:
                    self._events.reset()
                return None
            if ended and (dtype := self._events.precision.output_dtype) is not None:
                output = _cast(output, dtype)
            if torch.is_grad_enabled() and (frame.calls or ended):
                left = [output, *_containers((*args, *kwargs.values())), *_attributes(module)]
                self._mark_outputs(frame.calls, left if frame.calls else output)
            if ended:
                self._events.end_forward(output)
            return output

        return leave

    def _cast_inputs(self, unit: Unit | None, outermost: bool, args: Any, kwargs: Any) -> Any:
        precision = self._events.precision
        wanted = precision.cast_root_inputs if outermost else precision.cast_forward_inputs
        if precision.param_dtype is None or not wanted or (unit is None and not outermost):
            return args, kwargs
        return _cast(args, precision.param_dtype), _cast(kwargs, precision.param_dtype)

    def _mark_inputs(self, calls: list[Call], args: Any, kwargs: Any) -> Any:
        """Pass each tensor through a view; lists and dicts stay the caller's own, unseen."""

        def mark(value: Any) -> Any:
            if isinstance(value, tuple):
                items = [mark(each) for each in value]
                if all(new is old for new, old in zip(items, value, strict=True)):
                    return value
                make = getattr(type(value), "_make", type(value))  # a namedtuple's own
                return make(items)
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                return value
            if not value.requires_grad:
                return value
            view = value.view_as(value)
            for call in calls:
                call.inputs += 1
            view.grad_fn.register_prehook(lambda _grads: self._input_done(calls))  # type: ignore[union-attr]
            return view

        return tuple(mark(each) for each in args), {k: mark(v) for k, v in kwargs.items()}

    def _mark_outputs(self, calls: list[Call], output: Any) -> None:
        def before(_grads: Any) -> None:
            self._events.begin_backward()
            for call in calls:
                if not call.is_open:
                    call.left = call.inputs
                self._events.open_call(call)

        for tensor in tensors_in(output):
            nodes = [tensor.grad_fn]
            if tensor._is_view() and tensor._base is not None:
                nodes.append(tensor._base.grad_fn)  # an in-place edit of a view goes through it
            for node in nodes:
                if node is not None:
                    node.register_prehook(before)

    def _input_done(self, calls: list[Call]) -> None:
        for call in calls:
            call.left -= 1
            if call.left == 0 and call.is_open:
                self._events.close_call(call)


def _module_call() -> FrameType:
    """The frame of ``Module.__call__`` that runs the hook, which lasts as long as the forward."""
    frame = found = sys._getframe(1)
    while frame.f_globals.get("__name__") != nn.Module.__module__:
        if frame.f_back is None:
            return found
        frame = frame.f_back
    return frame


def _containers(inputs: Iterable[Any]) -> Iterator[Any]:
    """The inputs that a module can put results in."""
    return (each for each in inputs if isinstance(each, (list, dict)))


def _attributes(module: nn.Module) -> Iterator[Any]:
    """What ``module`` and those in it keep of a forward as attributes: auxiliary losses."""
    for each in module.modules():
        for name, value in each.__dict__.items():
            if isinstance(value, (Tensor, list, tuple, dict)) and name not in _OF_EVERY_MODULE:
                yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in ``value``: in containers, dataclasses and the attributes of objects."""
    yield from _walk(value, _DEPTH, set())


def _walk(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or value is None or isinstance(value, (*_OPAQUE, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    else:
        names = [*getattr(value, "__dict__", ()), *_slots(value)]
        inner = [getattr(value, name, None) for name in names]
    for each in inner:
        yield from _walk(each, depth - 1, seen)


def _slots(value: Any) -> list[str]:
    names: list[str] = []
    for each in type(value).__mro__:
        slots = each.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; itself, if they all are."""
    leaves, tree = tree_flatten(value)
    cast = [
        leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    if all(new is old for new, old in zip(cast, leaves, strict=True)):
        return value
    return tree_unflatten(cast, tree)
