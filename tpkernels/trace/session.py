"""``record``: what runs inside is recorded, on all ranks, and written at the end.

every rank   compare clocks | the block | compare clocks | send to rank 0 | wait for it
rank 0                                                   | merge, write   |
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tpkernels import instrument
from tpkernels.comm.group import GroupLike, resolve_group
from tpkernels.errors import CommunicationError, ConfigError
from tpkernels.trace.channel import Channel
from tpkernels.trace.clock import SyncPoint, compare
from tpkernels.trace.outputs import Outputs, write_all
from tpkernels.trace.recorder import IntervalRecorder
from tpkernels.trace.recording import Recording

one_at_a_time = threading.Lock()  # recording is of the whole process


class record:
    """Record every op of ours on this rank, and write what all ranks recorded.

        with tpk.trace.record("step.html") as trace:
            model(x).square().mean().backward()
        print(trace.paths)

    Args:
        path: of the page. ``step.html`` and ``step`` both give ``step.html``,
            ``step.perfetto.json`` and ``step.summary.json``; all written by rank 0.
        group: the ranks that record together: a ``ProcessGroup``, a 1-D ``DeviceMesh``, or None
            for all ranks (without a process group: this process alone).
        clock: nanoseconds on this rank; another one only in tests.

    Collective over the group: begins and ends on all its ranks. Works in any thread, with autograd
    and ``torch.inference_mode``; ops inside a CUDA graph or traced by ``torch.compile`` are not
    recorded, the graphs are unchanged. On CUDA it synchronises the device at its start and end.

    Where the block raises, or a rank does not come to its end within ``TPKERNELS_TIMEOUT``, each
    rank that is left writes what it has to ``step.rank<r>.json``, and the error propagates;
    ``tpkernels trace --merge step.rank*.json`` makes a page of these.

    Raises:
        ConfigError: something records already, or the directory is not there.
        CommunicationError: a rank did not come; names it.
        OSError: on rank 0, the files cannot be written; CommunicationError on the others.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        group: GroupLike = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._outputs = Outputs(path)
        self._group, self._clock = group, clock

    @property
    def paths(self) -> list[Path]:
        """Of the page, the Perfetto trace and the summary."""
        return self._outputs.paths

    def __enter__(self) -> Self:
        self._outputs.check()
        if not one_at_a_time.acquire(blocking=False):
            raise ConfigError(
                f"trace.record({str(self._outputs.page)!r}): this process records already. "
                "Fix: end the other recording first; one may hold all that is of interest"
            )
        try:
            group = resolve_group(self._group)
            self._channel = Channel.of(group) if group.size > 1 else None
            self._rank, self._world_size = group.rank, group.size
            self._points = compared(self._channel, "start", self._clock)
        except BaseException:
            one_at_a_time.release()
            raise
        self._recorder = IntervalRecorder(self._clock)
        instrument.record_to(self._recorder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        instrument.record_to(None)
        try:
            # After an error a device may wait for a rank that has gone.
            recording = taken(
                self._recorder, self._rank, self._world_size, self._points, wait=error is None
            )
            if error is not None:
                self._leave(recording, error)
                return
            try:
                finish(recording, self._channel, self._clock, self._outputs)
            except (CommunicationError, OSError) as failed:
                self._leave(recording, failed)
                raise
        finally:
            one_at_a_time.release()

    def _leave(self, recording: Recording, error: BaseException) -> None:
        """This rank's own file, whatever becomes of the others."""
        recording.error = described(error)
        if self._channel is not None:
            self._channel.fail(recording.error)
        path = self._outputs.of_rank(self._rank)
        try:
            recording.write(path)
        except OSError as failed:
            error.add_note(f"trace: {path} could not be written: {failed}")
            return
        error.add_note(f"trace: what rank {self._rank} recorded is in {path}")


def compared(channel: Channel | None, label: str, clock: Callable[[], int]) -> list[SyncPoint]:
    """Where this rank's clock is on rank 0's; nothing where it is alone."""
    return compare(channel, label, clock) if channel is not None else []


def finish(
    recording: Recording, channel: Channel | None, clock: Callable[[], int], outputs: Outputs
) -> None:
    """Compare clocks once more and hand all recordings to rank 0, which writes. Collective.

    Raises:
        CommunicationError: a rank does not come.
        OSError: on rank 0, the files cannot be written; the others then get a CommunicationError.
    """
    if channel is None:
        write_all([recording], 1, outputs)
        return
    recording.clock += compared(channel, "end", clock)
    if channel.rank != 0:
        channel.send("recording", recording.to_json())
        channel.wait("written", 0)
        return
    others = [
        Recording.from_json(channel.receive("recording", rank), f"rank {rank}")
        for rank in range(1, channel.world_size)
    ]
    try:
        write_all([recording, *others], channel.world_size, outputs)
    except OSError as failed:
        channel.fail(described(failed))
        raise
    channel.set("written", "")


def taken(
    recorder: IntervalRecorder,
    rank: int,
    world_size: int,
    points: list[SyncPoint],
    wait: bool = True,
) -> Recording:
    """What ``recorder`` has so far; ``wait``: for the devices to get there."""
    intervals = recorder.intervals(wait)
    return Recording(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        device=_device(),
        begun=recorder.begun,
        ended=recorder.now(),
        intervals=intervals,
        clock=list(points),
        left_out=recorder.left_out,
        command=list(sys.argv),
    )


def described(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _device() -> str:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_name()
    return "cpu"
