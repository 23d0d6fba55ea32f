"""Moments on CUDA streams as nanoseconds of the host's clock.

    host     [synchronise, base event]                       [synchronise, read all]
    stream            base ......... event ......... event

An event's time is the base's on the host plus what the device measured in between. The base is
known to half the time that its recording and synchronising took, some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Mark:
    """A moment on a stream; ``ns`` is set by :meth:`DeviceTime.resolve`, None: not reached."""

    __slots__ = ("device", "event", "lane", "ns")

    def __init__(self, device: torch.device, lane: str, event: Any) -> None:
        self.device, self.lane, self.event = device, lane, event
        self.ns: int | None = None


class DeviceTime:
    """Events of all devices of this process, against one base event for each.

    Args:
        clock: nanoseconds on the host.
        cuda: ``torch.cuda``, or what stands for it in tests.
    """

    def __init__(self, clock: Callable[[], int], cuda: Any = torch.cuda) -> None:
        self._clock, self._cuda = clock, cuda
        self._bases: dict[torch.device, tuple[Any, int]] = {}
        self._marks: list[Mark] = []

    def mark(self, device: torch.device) -> Mark | None:
        """An event on the current stream; None while it is captured: a graph cannot hold it."""
        if self._cuda.is_current_stream_capturing():
            return None
        if device not in self._bases:
            self._bases[device] = self._base(device)
        stream = self._cuda.current_stream(device)
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        mark = Mark(device, f"{device} stream {stream.cuda_stream:#x}", event)
        self._marks.append(mark)
        return mark

    def _base(self, device: torch.device) -> tuple[Any, int]:
        self._cuda.synchronize(device)
        event = self._cuda.Event(enable_timing=True)
        before = self._clock()
        event.record(self._cuda.current_stream(device))
        event.synchronize()
        return event, (before + self._clock()) // 2

    def resolve(self, wait: bool) -> None:
        """Give each mark its time.

        ``wait``: for every device that was used; else only marks that were reached get theirs,
        since a device may wait for ever for a rank that has gone.
        """
        marks, self._marks = self._marks, []
        for device in self._bases if wait else ():
            self._cuda.synchronize(device)
        for mark in marks:
            base, base_ns = self._bases[mark.device]
            if wait or mark.event.query():
                mark.ns = base_ns + round(base.elapsed_time(mark.event) * 1e6)  # from ms
            mark.event = None
