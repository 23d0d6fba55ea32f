"""``signaled`` on a GPU: a stream of its own waits for the counts of one whole GEMM.

    current: [gemm: tiles in order of rows                     ][bias]
    lane:    [wait 0....][collective 0][wait 1][collective 1]...

The driver waits (``cuStreamWaitValue32``) for targets that the host keeps, and a spinning kernel
does where the driver cannot. A captured CUDA graph has counts of its own, and always the kernel,
which adds what it waits for to a count on the device: a replay counts without the host knowing, and
a target that was true at capture would be reached before the second replay has begun.
"""

# M rows, N columns

from __future__ import annotations

from collections.abc import Callable

import torch

from tpkernels.errors import ConfigError
from tpkernels.kernels import stream_wait
from tpkernels.kernels.tile_counters import TileCounters
from tpkernels.overlap.signal_plan import SignalPlan, Targets
from tpkernels.overlap.signaled_send import Send, Sent

# Multiprocessors that the GEMM leaves to NCCL, whose blocks could else not start before the
# persistent GEMM ends, and to the waiting kernel. ASSUMPTION: 16 suffice; not measured.
COMMUNICATION_MULTIPROCESSORS = 16
_STREAM_PRIORITY = -1  # what waits and the collectives start before other work

CountedGemm = Callable[[TileCounters], tuple[int, int]]
"""Launch the GEMM on the current stream; (rows, columns) of its tiles."""


class CudaLane:
    """A group's counts and communication stream on one device.

    One GEMM counts at a time: on another stream it waits until the last one has ended. Replays of
    graphs are in the hands of who replays them: like the collectives in them, those of one group
    must not run at the same time.

    Raises:
        ConfigError: it is made while a CUDA graph is captured.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "the first call of TPKERNELS_OVERLAP=signaled makes its counters, which a CUDA "
                "graph would own. Fix: call the model once before it is captured"
            )
        self._eager = TileCounters(device, capacity)
        self._captured = TileCounters(device, capacity)
        self._targets = Targets(capacity)
        self._counted: torch.cuda.Event | None = None
        self._stream = torch.cuda.Stream(device, priority=_STREAM_PRIORITY)
        self._stream.wait_stream(torch.cuda.current_stream())  # RAW: the counts are 0
        with torch.cuda.stream(self._stream):
            self._captured.load()
        self._by_driver = stream_wait.is_supported(self._stream, self._eager.finished[:1])

    def run(self, plan: SignalPlan, columns: int, gemm: CountedGemm, send: Send) -> list[Sent]:
        """Launch ``gemm`` and ``send`` its chunks as they are counted; what is under way.

        Every chunk's rows are ready for the current stream when this returns. An error leaves
        nothing pending.
        """
        current, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        if self._counted is not None and not capturing:
            current.wait_event(self._counted)  # WAR: another stream's GEMM has counted its tiles
        # Nobody waits while the GEMM waits for its inputs; and a capture takes this stream in.
        self._stream.wait_stream(current)
        tile = gemm(self._captured if capturing else self._eager)
        amounts = expected = plan.expected(columns, tile)
        if not capturing:
            amounts = self._targets.advance(expected)
            self._counted = current.record_event()
        sent: list[Sent] = []
        left = list(plan.order)
        try:
            with torch.cuda.stream(self._stream):
                while left:
                    # RAW: the collective reads these rows, which the GEMM may be still writing.
                    chunk = left.pop(0)
                    self._wait(chunk, amounts[chunk], capturing)
                    sent.append(send(chunk))
        except BaseException:
            for each in sent:
                each.drain()
            with torch.cuda.stream(self._stream):
                for chunk in left:  # a graph that is replayed all the same has waited for all
                    self._wait(chunk, amounts[chunk], capturing)
            current.wait_stream(self._stream)
            raise
        current.wait_stream(self._stream)
        return sent

    def _wait(self, chunk: int, amount: int, capturing: bool) -> None:
        """The lane's stream waits for a chunk: for its target, or for so many more tiles."""
        if capturing:
            self._captured.wait_for_more(chunk, amount)
        elif self._by_driver:
            stream_wait.wait_until(self._stream, self._eager.finished, chunk, amount)
        else:
            self._eager.wait_until(chunk, amount)
