"""Random streams: one that all ranks share, and one of each rank's own, derived from it.

Dropout on replicated activations must draw the same mask on all ranks; on split heads or split
hidden units it must draw different ones. The rank's own stream is a function of the shared
stream's state and the rank, so there is nothing to save: whoever restores the ordinary generator
(a checkpoint, activation recomputation) restores both. A checkpoint that gives rank 0's
generator state to all ranks is therefore right here by construction (TP-35).

    with rank_stream(group, device):       # own stream
        ...
        rejoin_shared_stream()             # early: the activation is replicated again
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from tpkernels.comm.group import Group

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's increment


class _Region:
    """An open own-stream region: the shared generator's state to come back to."""

    def __init__(self, generator: torch.Generator, shared_state: torch.Tensor) -> None:
        self.generator, self.shared_state, self.open = generator, shared_state, True

    def close(self) -> None:
        if self.open:
            self.open = False
            self.generator.set_state(self.shared_state)


_current: ContextVar[_Region | None] = ContextVar("tpkernels_rng_region", default=None)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _own_seed(seed: int, rank: int) -> int:
    """splitmix64 of the shared draw and the rank: unrelated streams for neighbouring ranks."""
    z = (seed + (rank + 1) * _MIX) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) & (2**63 - 1)


@contextlib.contextmanager
def rank_stream(group: Group, device: torch.device) -> Iterator[None]:
    """Draw from this rank's own stream inside, from the shared one again after.

    The shared stream advances by one draw, by the same on every rank. Inside an open region and
    on a group of one it does nothing.
    """
    outer = _current.get()
    if group.size == 1 or (outer is not None and outer.open):
        yield
        return
    generator = _generator(device)
    draw = torch.randint(2**62, (), device=device, generator=generator)
    region = _Region(generator, generator.get_state())
    generator.manual_seed(_own_seed(int(draw), group.rank))
    token = _current.set(region)
    try:
        yield
    finally:
        region.close()
        _current.reset(token)


def rejoin_shared_stream() -> None:
    """Leave the own stream early: what is computed from here on is replicated over ranks."""
    region = _current.get()
    if region is not None:
        region.close()
