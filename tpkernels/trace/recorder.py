"""What records on one rank: one list that all threads append to, and a stack of operations each.

On CPU an interval is two readings of a clock; on CUDA two events on the current stream, which are
resolved when recording ends (``device_time``). Nothing is synchronised in between.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tpkernels.trace.device_time import DeviceTime
from tpkernels.trace.recording import Interval

# An interval takes about 0.5 kB of memory: this many, half a GB. Later ones are counted only.
MOST_INTERVALS = 1_000_000

_PLAIN = (Tensor, nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)  # nothing runs: a graph is made

# A token is a tuple of atoms, which the garbage collector soon need not look at; its end and its
# details are beside it. What begins and ends an interval takes about a microsecond in all.
_Token = tuple[int, str, str, Any, int, int]  # number, kind, name, begin, thread, parent
_BLOCK: list[Any] = [None] * 65536  # ends that are made at once


class IntervalRecorder:
    """Implements :class:`tpkernels.instrument.Recorder`.

    Args:
        clock: nanoseconds on this rank; another one only in tests.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._numbers = itertools.count()  # the next one is taken at once, whatever threads do
        self._tokens: list[_Token] = []
        self._ends: list[Any] = []  # by number, as all below
        self._details: dict[int, dict[str, Any]] = {}
        self._open: dict[int, list[int]] = {}  # operations, by thread
        self._device = DeviceTime(clock)
        self.left_out = 0
        self.begun = clock()

    def begin(self, kind: str, name: str, tensor: Tensor, details: dict[str, Any]) -> Any:
        """A token, or None where nothing is recorded: while a graph is captured or traced."""
        if type(tensor) not in _PLAIN and isinstance(tensor, _TRACED):
            return None
        mark = self._device.mark(tensor.device) if tensor.is_cuda else 0
        if mark is None:
            return None
        number = next(self._numbers)
        if number >= len(self._ends):
            if number >= MOST_INTERVALS:
                self.left_out += 1
                return None
            self._ends.extend(_BLOCK)
        thread = threading.get_ident()
        stack = self._open.get(thread)
        if stack is None:
            stack = self._open[thread] = []
        parent = stack[-1] if stack else -1
        if kind == "operation":
            stack.append(number)
        if details:
            self._details[number] = details
        token = (number, kind, name, mark or self._clock(), thread, parent)
        self._tokens.append(token)
        return token

    def end(self, token: Any, details: dict[str, Any]) -> None:
        """It ends now, in any thread; a second end counts for nothing."""
        if token is None:
            return
        number, kind, _, begin, thread, _ = token
        if self._ends[number] is not None:
            return
        # A mark that cannot be made, since a graph is being captured: then it never ended.
        now = self._clock() if type(begin) is int else self._device.mark(begin.device)
        self._ends[number] = now
        if details:
            self._details.setdefault(number, {}).update(details)
        if kind == "operation":
            stack = self._open[thread]
            if number in stack:  # those above it never ended
                del stack[stack.index(number) :]

    def now(self) -> int:
        """On the clock that records."""
        return self._clock()

    def intervals(self, wait: bool = True) -> list[Interval]:
        """All of them, in the order in which they began; what is still open ends now.

        ``wait``: for the devices; else what they have not reached yet is left out.
        """
        ended = self._clock()
        tokens = list(self._tokens)  # other threads may still append
        self._device.resolve(wait)
        places: dict[int, int] = {}
        lanes: dict[Any, int] = {}
        found: list[Interval] = []
        for number, kind, name, begin, thread, parent in tokens:
            end, lane = self._ends[number], (thread, "")
            if type(begin) is not int:
                lane = (thread, begin.lane)
                begin, end = begin.ns, None if end is None else end.ns
            if begin is None:
                continue
            noted = dict(self._details.get(number, {}))
            if end is None:
                end, noted["open"] = ended, True
            places[number] = len(found)
            line = lanes.setdefault(lane, len(lanes))
            of = places.get(parent, -1)
            found.append(Interval(kind, name, begin, max(begin, end), line, of, noted))
        return found
