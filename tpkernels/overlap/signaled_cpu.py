"""``signaled`` on CPU tensors: the calling thread computes and counts, another one sends.

    caller:  [tile 0][tile 1][tile 2][tile 3] [waits for what was sent]
    courier:         [sends chunk 0 ][sends chunk 1]

The twin of what a GPU does, by the same plan: counts that only grow, targets that the host keeps.
It is there to be tested and looked at; ``chunked`` needs no second thread.
"""

# M rows, N columns

from __future__ import annotations

import queue
import threading
import weakref

import torch

from tpkernels.overlap.signal_plan import SignalPlan, Targets, reached
from tpkernels.overlap.signaled_send import Send, Sent, Tile

TILE_ROWS = 64  # of the caller's tiles, which are whole rows: small beside a chunk


class Counts:
    """Finished tiles of each chunk, modulo 2^32, which the courier waits for."""

    def __init__(self, capacity: int) -> None:
        self._values = [0] * capacity
        self._over = False
        self._changed = threading.Condition()

    def add(self, chunks: range) -> None:
        """A tile that touches ``chunks`` is finished."""
        with self._changed:
            for chunk in chunks:
                self._values[chunk] = (self._values[chunk] + 1) % 2**32
            self._changed.notify()

    def end(self) -> None:
        """No more tiles of this call come: who waits for one is told."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def raise_to(self, targets: list[int]) -> None:
        """Make up for tiles that never came, so that the targets of the next call are true."""
        with self._changed:
            self._values[: len(targets)] = targets
            self._over = False

    def wait(self, chunk: int, target: int) -> bool:
        """Until the count of ``chunk`` is at ``target``; False if it will not be."""

        def here() -> bool:
            return reached(self._values[chunk], target)

        with self._changed:
            self._changed.wait_for(lambda: here() or self._over)
            return here()


class _Delivery:
    """The chunks of one call, on their way through the courier."""

    def __init__(self, plan: SignalPlan, counts: Counts, targets: list[int], send: Send) -> None:
        self._plan, self._counts, self._targets, self._send = plan, counts, targets, send
        self._inference = torch.is_inference_mode_enabled()
        self._over = threading.Event()
        self.sent: list[Sent] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        """In the courier's thread: send every chunk as its rows are there."""
        try:
            with torch.inference_mode(self._inference):
                for chunk in self._plan.order:
                    # RAW: the collective reads these rows, which the caller may be still writing.
                    if not self._counts.wait(chunk, self._targets[chunk]):
                        break
                    self.sent.append(self._send(chunk))
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        """Until the courier has nothing more to do with it."""
        self._over.wait()


def _deliver(deliveries: queue.SimpleQueue[_Delivery | None]) -> None:
    while (delivery := deliveries.get()) is not None:
        delivery.run()
        del delivery  # its tensors are the caller's


class CpuLane:
    """A group's counts and courier; one call at a time."""

    def __init__(self, capacity: int) -> None:
        self._counts, self._targets = Counts(capacity), Targets(capacity)
        self._deliveries: queue.SimpleQueue[_Delivery | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()
        weakref.finalize(self, self._deliveries.put, None)

    def run(self, plan: SignalPlan, columns: int, tile: Tile, send: Send) -> list[Sent]:
        """Compute ``plan.rows`` rows by ``tile`` and ``send`` their chunks; what is under way.

        An error of either leaves nothing pending here, and is raised.
        """
        with self._turn:
            self._start()
            expected = plan.expected(columns, (TILE_ROWS, columns))
            targets = self._targets.advance(expected)
            delivery = _Delivery(plan, self._counts, targets, send)
            self._deliveries.put(delivery)
            try:
                self._compute(plan, delivery, tile)
                delivery.wait()
                if delivery.error is not None:
                    raise delivery.error
            except BaseException:
                # What is whole is sent: where all ranks fail at one tile, all have sent the same.
                self._counts.end()
                delivery.wait()
                self._counts.raise_to(targets)
                for each in delivery.sent:
                    each.drain()
                raise
            return delivery.sent

    def _compute(self, plan: SignalPlan, delivery: _Delivery, tile: Tile) -> None:
        for start, end in plan.tiles(TILE_ROWS):
            if delivery.error is not None:
                return
            tile(start, end)
            self._counts.add(plan.touched(start, end))

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # or this is a forked child
            self._thread = threading.Thread(
                target=_deliver, args=(self._deliveries,), name="tpkernels-signaled", daemon=True
            )
            self._thread.start()
