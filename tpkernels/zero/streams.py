"""``StreamTransfers``: units travel on side streams of a GPU while the current stream computes.

    current   [compute 0        ] | wait g1 | [compute 1        ] | wait g2 | ...   allocates, frees
    gathers   [gather 1]            [gather 2]                                      high priority
    reduces                                    [reduce 1] [reduce 0]                high priority

Every wait guards one hazard; nothing else orders the streams, and no host waits but where the host
itself reads or writes (offload):

    gather    waits for   the current stream      RAW   the optimizer wrote the shards there
                                                  WAR   what read this memory last, whatever it was
    use       waits for   the gather              RAW   once for each stream that computes
    free      home waits for those that used it   WAR   the allocator gives memory out in the order
                                                        of the stream it came from, home
    write     waits for   the writer before       WAW   gradients of one unit on several streams
    reduce    waits for   the current stream      RAW   gradients; WAR the memory of the result
    result    waits for   the reduction           RAW   and WAR: the gradients' memory is free then
    finish    home waits for the current stream   WAR   the result was read there
    host      waits for   the reduction           RAW   offload: copied from the GPU (Z-52)
    settle    waits for   the last gather's copy  WAR   offload: the host steps the shards it read

Memory is allocated on the current stream and returned to that one's allocator, so nothing is told
to it (``record_stream``) and nothing piles up. NCCL runs on our streams, not on one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpkernels.comm.collectives import (
    all_gather_in_place,
    all_reduce_in_place,
    reduce_scatter_into,
)
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError
from tpkernels.instrument import waiting
from tpkernels.zero.buffer_pool import BufferPool
from tpkernels.zero.flat_buffer import FlatBuffer
from tpkernels.zero.transfers import Wait

_HIGH = -1  # priority: a collective's few blocks are not to queue behind a GEMM's many


@dataclass
class _Whole:
    """The whole of a flat buffer while it has memory."""

    home: Any  # the stream whose allocator it came from
    users: list[Any] = field(default_factory=list)  # streams ordered after the gather, that read it
    gathered: Any = None  # event


@dataclass
class _Gradients:
    """The whole gradients of a flat buffer while they have memory."""

    home: Any
    writer: Any  # the stream that wrote last, ordered after all that was done to them before
    results: list[tuple[Tensor, Any]] = field(default_factory=list)  # and their homes


class StreamTransfers:
    """Transfers of units on a GPU, in the order of the streams that are current at each call.

    Any stream may be current, another one at each call: a unit that several streams use is waited
    for by each. Values that streams exchange through activations are the caller's to order, as
    everywhere in PyTorch; so is an optimizer's step on a stream of its own.

    Args:
        group: the ranks that share the parameters.
        replicas: further ranks that hold the same shards, or None.
        device: the GPU.
        reduce_group: of the ranks of ``group``, with a communicator of its own, or None.
        offloads: whether shards, and so their gradients, are on the CPU.
        pin_memory: whether those are page-locked, so that copies run beside compute.
        cuda: ``torch.cuda``, or what stands in for it.

    Raises:
        ConfigError: later, when a gather or reduction would be captured in a CUDA graph: a replay
            would use memory that is another unit's by then.
    """

    def __init__(
        self,
        group: Group,
        replicas: Group | None,
        device: torch.device,
        *,
        reduce_group: Group | None = None,
        offloads: bool = False,
        pin_memory: bool = True,
        cuda: Any = torch.cuda,
    ) -> None:
        self._group, self._replicas, self._device = group, replicas, device
        self._reduce_group = reduce_group or group
        self._offloads, self._pin_memory, self._cuda = offloads, pin_memory, cuda
        self._gathers = cuda.Stream(device=device, priority=_HIGH)
        self._reduces = cuda.Stream(device=device, priority=_HIGH)
        self._wholes: dict[FlatBuffer, _Whole] = {}
        self._gradients: dict[int, _Gradients] = {}  # by id of the tensor, until `finish`
        self._loaded: Any = None  # event: the last copy from shards on the CPU
        self.pool = BufferPool.of(device)

    # --- whole parameters ---

    def allocate(self, buffer: FlatBuffer) -> None:
        """Memory of the current stream, unless there is some."""
        self._refuse_capture("gathers")
        if not buffer.is_allocated:
            home = self._current()
            buffer.allocate(self.pool, home)
            self._wholes[buffer] = _Whole(home)

    def gather(self, buffer: FlatBuffer) -> Wait:
        """Cast the shard into its place, then all-gather in place, on the gather stream."""
        current = self._current()
        whole = self._wholes[buffer]
        self._gathers.wait_stream(current)  # RAW: shards; WAR: what this memory was before
        with torch.no_grad(), self._cuda.stream(self._gathers):
            self._load_own(buffer)
            all_gather_in_place(buffer.whole.data, self._group.name)
            whole.gathered, whole.users = self._gathers.record_event(), []

        def wait() -> Tensor:
            self.use(buffer)
            return buffer.whole

        return wait

    def _load_own(self, buffer: FlatBuffer) -> None:
        if not self._offloads:
            buffer.own.copy_(buffer.master)
            return
        # Allocated and freed in the order of the gather stream, which alone touches it.
        staged = buffer.own
        if buffer.master.dtype != buffer.own.dtype:
            staged = torch.empty_like(buffer.own, dtype=buffer.master.dtype)
        staged.copy_(buffer.master, non_blocking=True)
        self._loaded = self._gathers.record_event()
        if staged.dtype != buffer.own.dtype:
            buffer.own.copy_(staged)

    def use(self, buffer: FlatBuffer) -> None:
        """The current stream may read the whole from here on."""
        whole, current = self._wholes.get(buffer), self._current()
        if whole is not None and whole.gathered is not None and current not in whole.users:
            with waiting("all_gather", buffer.whole):
                current.wait_event(whole.gathered)  # RAW
            whole.users.append(current)

    def free(self, buffer: FlatBuffer) -> None:
        """Return the memory to the stream it came from."""
        whole = self._wholes.pop(buffer, None)
        if whole is not None and buffer.is_allocated:
            for stream in whole.users:
                if stream != whole.home:
                    whole.home.wait_stream(stream)  # WAR
        buffer.free(self.pool, None if whole is None else whole.home)

    # --- gradients ---

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for whole gradients, of the current stream; ends with :meth:`finish`."""
        home = self._current()
        tensor = self.pool.new(numel, dtype, self._device, home)
        self._gradients[id(tensor)] = _Gradients(home, home)
        return tensor

    def write(self, tensor: Tensor) -> None:
        """The current stream may write to ``tensor``, of :meth:`empty`, from here on."""
        gradients, current = self._gradients[id(tensor)], self._current()
        if current != gradients.writer:
            current.wait_stream(gradients.writer)  # WAW
            gradients.writer = current

    def reduce(self, whole: Tensor) -> Wait:
        """Reduce-scatter, then all-reduce over replicas in fp32: [1, S]."""
        self._refuse_capture("reduces")
        gradients, current = self._gradients[id(whole)], self._current()
        group, replicas = self._reduce_group, self._replicas
        result, is_shared = whole, group.process_group is not None
        if is_shared:
            result = self._result(gradients, whole.numel() // group.size, whole.dtype, current)
        wide = result
        if replicas is not None and replicas.size > 1:
            dtype = torch.promote_types(whole.dtype, torch.float32)
            if dtype != whole.dtype:
                wide = self._result(gradients, result.numel(), dtype, current)
        self._reduces.wait_stream(current)  # RAW: gradients; WAR: what the results' memory was
        with torch.no_grad(), self._cuda.stream(self._reduces):
            if is_shared:
                reduce_scatter_into(result, whole, group.name)
            if wide is not result:
                wide.copy_(result)
            if replicas is not None and replicas.size > 1:
                all_reduce_in_place(wide, replicas.name)
            parts = self._to_host(wide) if self._offloads else wide
            reduced = self._reduces.record_event()

        def wait() -> Tensor:
            now = self._current()
            with waiting("reduce_scatter", whole):
                now.wait_event(reduced)  # RAW
            gradients.writer = now
            if self._offloads:
                reduced.synchronize()  # RAW: the host adds it up, and shows it to hooks
            return parts.view(1, -1)

        return wait

    def _result(self, gradients: _Gradients, numel: int, dtype: torch.dtype, home: Any) -> Tensor:
        tensor = self.pool.new(numel, dtype, self._device, home)
        gradients.results.append((tensor, home))
        return tensor

    def _to_host(self, tensor: Tensor) -> Tensor:
        pinned = self._pin_memory and tensor.is_cuda
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)

    def finish(self, whole: Tensor, *, keep: bool = False) -> None:
        """The gradients are with the shards, or given up: free the results, and ``whole`` too.

        ``keep``: but ``whole``, which is written again.
        """
        gradients, now = self._gradients[id(whole)], self._current()
        self.write(whole)
        freed, gradients.results = gradients.results, []
        if not keep:
            freed.append((whole, gradients.home))
            del self._gradients[id(whole)]
        for tensor, home in freed:
            if home != now:
                home.wait_stream(now)  # WAR: they were read here
            self.pool.give(tensor, home)

    # --- the host ---

    def settle(self) -> None:
        """The host may write to shards from here on."""
        if self._loaded is not None:
            self._loaded.synchronize()  # WAR
            self._loaded = None

    def lose(self, buffer: FlatBuffer) -> None:
        """Nothing: no gather follows."""

    def restart(self) -> bool:
        """No: what one rank has enqueued waits for the others for ever."""
        return False

    def _current(self) -> Any:
        return self._cuda.current_stream(self._device)

    def _refuse_capture(self, does: str) -> None:
        if self._cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a model sharded by zero() {does} its parameters anew at each call and cannot be "
                "captured in a CUDA graph. Fix: run it eagerly, or torch.compile without "
                "mode='reduce-overhead'"
            )
