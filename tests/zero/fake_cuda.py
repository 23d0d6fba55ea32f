"""A GPU's streams without a GPU: what runs is run at once on the CPU, what is not ordered is found.

Each stream, and the host, has a vector clock. Operations of PyTorch are seen by their storages:
two of them, one of which writes, must be ordered by waits, by being launched after the host knew,
or by being on one stream. That memory is given out and taken back counts as a write in the order of
the stream to which it belongs, as the caching allocator of CUDA has it.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.zero import buffer_pool, streams

_NO_ACCESS = ("empty_like", "new_empty", "zeros_like", "new_zeros", "ones_like", "full_like")


class Timeline:
    """A stream, or the host."""

    def __init__(self, cuda, name):
        self._cuda, self.name = cuda, name
        self.clock = {self: 0}

    def join(self, clock):
        for timeline, tick in clock.items():
            self.clock[timeline] = max(self.clock.get(timeline, 0), tick)

    def step(self):
        self.clock[self] += 1
        return self, self.clock[self]

    def record_event(self):
        self.join(self._cuda.host.clock)
        return Event(self._cuda, dict(self.clock))

    def wait_event(self, event):
        if self._cuda.performs_wait():
            self.join(event.clock)

    def wait_stream(self, other):
        if self._cuda.performs_wait():
            self.join(other.clock)

    def __repr__(self):
        return self.name


class Event:
    def __init__(self, cuda, clock):
        self._cuda, self.clock = cuda, clock

    def synchronize(self):
        if self._cuda.performs_wait():
            self._cuda.host.join(self.clock)


class Memory:
    """Who touched one storage last."""

    def __init__(self, name, on_host):
        self.name, self.on_host = name, on_host
        self.write = None  # (timeline, tick)
        self.reads = {}


class FakeCuda(TorchDispatchMode):
    """``torch.cuda`` as :class:`StreamTransfers` needs it; as a context, watches what runs.

    Args:
        dropped: a wait, as in ``waits``, that is left out.
    """

    def __init__(self, dropped=None):
        super().__init__()
        self.host = Timeline(self, "the host")
        self.current = self.default = Timeline(self, "default stream")
        self.side = []
        self.dropped, self.waits, self.races = dropped, set(), []
        self.capturing = False
        self.alive = []  # so that a storage of the same address is the same one
        self._memory = {}

    # --- torch.cuda ---

    def Stream(self, device=None, priority=0):
        stream = Timeline(self, f"stream {len(self.side)}")
        self.side.append(stream)
        return stream

    def current_stream(self, device=None):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self):
        return self.capturing

    def performs_wait(self):
        """Whether the wait that the caller's caller asks for is performed; those of ours count."""
        code = sys._getframe(2).f_code
        if code.co_filename != streams.__file__:
            return True
        site = f"{code.co_name}:{sys._getframe(2).f_lineno - code.co_firstlineno}"
        self.waits.add(site)
        return site != self.dropped

    # --- memory ---

    def watch(self, tensor, name, on_host=False):
        """Look at every access to the storage of ``tensor`` from here on."""
        return self._memory.setdefault(_key(tensor), Memory(name, on_host))

    def allocated(self, tensor, owner, name):
        """The storage of ``tensor`` is memory that is free in the order of ``owner``."""
        self._memory.pop(_key(tensor), None)
        owner.join(self.host.clock)
        self.watch(tensor, name).write = (*owner.step(), "allocation")

    def freed(self, tensor, owner):
        """It is free again, in that order: whatever was done to it must come before."""
        memory = self._memory.pop(_key(tensor), None)
        if memory is not None:
            owner.join(self.host.clock)
            self._check(memory, owner, "free", writes=True)

    def _check(self, memory, timeline, what, writes):
        before = [memory.write] if memory.write else []
        before += [(each, *rest) for each, rest in memory.reads.items()] if writes else []
        for other, tick, did in before:
            if timeline.clock.get(other, 0) < tick:
                self.races.append(
                    f"{what} on {timeline} after {did} on {other}: {memory.name} is not ordered"
                )

    def access(self, memory, timeline, what, writes):
        self._check(memory, timeline, what, writes)
        timeline, tick = timeline.step()
        if writes:
            memory.write, memory.reads = (timeline, tick, what), {}
        else:
            memory.reads[timeline] = (tick, what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if is_view or schema.name.split("::")[1] in _NO_ACCESS:
            return result
        found = []
        given = [*zip(schema.arguments, args, strict=False)]
        named = {argument.name: argument for argument in schema.arguments}
        given += [(named[name], value) for name, value in (kwargs or {}).items()]
        for place, (argument, value) in enumerate(given):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            writes |= func.namespace == "c10d" and place == 0  # its schemas do not say
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and _key(leaf) in self._memory:
                    found.append((self._memory[_key(leaf)], writes))
        if found:
            self._run(func.name(), found)
        return result

    def _run(self, what, found):
        only_host = all(memory.on_host for memory, _ in found)
        # A copy between the host's memory and the GPU's is enqueued on a side stream.
        timeline = self.host if only_host and self.current not in self.side[:2] else self.current
        timeline.join(self.host.clock)
        merged = {}
        for memory, writes in found:
            merged[memory] = merged.get(memory, False) or writes
        for memory, writes in merged.items():
            self.access(memory, timeline, what, writes)


def _key(tensor):
    if isinstance(tensor, ChunkedTensor):
        tensor = tensor.plain()
    return tensor.untyped_storage()._cdata


class WatchedPool(buffer_pool.BufferPool):
    """Tells what memory is given out and taken back."""

    cuda = None

    def fill(self, tensor, nbytes, owner=None):
        super().fill(tensor, nbytes, owner)
        self.cuda.allocated(tensor, owner, "whole parameters")

    def empty(self, tensor, owner=None):
        self.cuda.freed(tensor, owner)
        super().empty(tensor, owner)

    def new(self, numel, dtype, device, owner=None):
        tensor = super().new(numel, dtype, device, owner)
        self.cuda.allocated(tensor, owner, "gradients")
        return tensor

    def give(self, tensor, owner=None):
        self.cuda.freed(tensor, owner)
        super().give(tensor, owner)


class WatchedTransfers(streams.StreamTransfers):
    """Over fake streams, with a pool that tells."""

    def __init__(self, *args, cuda, **kwargs):
        super().__init__(*args, cuda=cuda, **kwargs)
        self.pool = WatchedPool()
        self.pool.cuda = cuda

    def _to_host(self, tensor):
        host = super()._to_host(tensor)
        self._cuda.alive.append(host)
        memory = self._cuda.watch(host, "gradients on the host", on_host=True)
        self._cuda.current.step()
        memory.write = (self._cuda.current, self._cuda.current.clock[self._cuda.current], "copy")
        return host
