"""Which part of the sequence each rank holds, as the modules of a block see it.

Between its tensor-parallel regions an activation [..., S, K] lies in shards [..., s_r, K]: a
column-parallel layer gathers them, a row-parallel one reduce-scatters (arXiv:2205.05198).
"""

# S tokens of the sequence, s_r of them on rank r, R ranks

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError, ConfigError

SEQUENCE = -2  # the dimension that is sharded, of [S, K] and [B, S, K]
_SHAPE = "shape of the shard"


class SequenceShards:
    """How the sequence is cut, for the modules that share this object.

    Args:
        sizes: tokens s_r of every rank, the same list on all ranks; None: all hold as many. It
            may be set anew before a forward: ``shards.sizes = tpkernels.overlap.sequence_sizes(
            length, ranks)``.

    Attributes:
        active: whether activations are sharded; False: modules run on whole sequences.
    """

    def __init__(self, sizes: Sequence[int] | None = None) -> None:
        self.sizes = None if sizes is None else list(sizes)
        self.active = True

    @contextmanager
    def using(self, sizes: list[int] | None) -> Iterator[None]:
        """Inside, activations are sharded so; None: they are whole."""
        before = self.sizes, self.active
        self.sizes, self.active = sizes, sizes is not None
        try:
            yield
        finally:
            self.sizes, self.active = before

    def of_part(self, x: Tensor, rank: int) -> list[int] | None:
        """The rows of every rank where rank ``rank`` holds ``x``.

        Those of several sequences laid one after another, [B s_r, K], are B times as many: a
        layer that works row by row may be given such.
        """
        return None if self.sizes is None else _times(self.sizes, x, self.sizes[rank])

    def of_whole(self, x: Tensor) -> list[int] | None:
        """The same where ``x`` has the rows of all ranks."""
        return None if self.sizes is None else _times(self.sizes, x, sum(self.sizes))

    def check(self, x: Tensor, check: InputCheck, group: Group, what: str) -> None:
        """Compare, in the first calls, the shards' shapes where all ranks should hold as many.

        Raises:
            AgreementError: on every rank, saying what to do.
        """
        if self.sizes is not None or not check.enabled or torch.compiler.is_compiling():
            return
        try:
            check({_SHAPE: torch.tensor(x.shape, device="cpu")}, group, what)
        except AgreementError as error:
            if _SHAPE not in str(error):
                raise
            raise AgreementError(
                f"{what}: with sequence_parallel=True every rank gives its shard of the sequence, "
                f"and all as many tokens; this is rank {group.rank} with {tuple(x.shape)}, and "
                "another differs. Fix: pad the sequence to a multiple of the ranks, or pass "
                "sequence_parallel=SequenceShards(sizes) with the tokens of every rank"
            ) from error


def _times(sizes: list[int], x: Tensor, rows: int) -> list[int]:
    """``sizes``, times as many sequences as the rows of a 2-D ``x`` are."""
    if x.dim() != 2 or rows < 1 or x.shape[0] % rows:
        return sizes  # does it not fit, then the op says so
    return [size * (x.shape[0] // rows) for size in sizes]


def shards_of(sequence_parallel: bool | SequenceShards) -> SequenceShards | None:
    """What modules keep of their argument ``sequence_parallel``; None: not sharded."""
    if isinstance(sequence_parallel, SequenceShards):
        return sequence_parallel
    if not isinstance(sequence_parallel, bool):
        raise ConfigError(
            f"sequence_parallel={sequence_parallel!r} is not known; allowed: False, True, "
            "SequenceShards(sizes)"
        )
    return SequenceShards() if sequence_parallel else None


def active(shards: SequenceShards | None) -> SequenceShards | None:
    """``shards`` if activations are sharded now."""
    return shards if shards is not None and shards.active else None
