"""The rows of a sharded dimension as contiguous blocks of memory, for GEMMs and messages.

whole [P, S, Q, K]       P dimensions before the sharded one, Q between it and the features
cut of rank q            (p, row) from index lo to hi, row fastest, of its P * s_q
its views                for each p: whole[p, first_q + a : first_q + b], contiguous, [n, K]
"""

# R ranks, S the length of the sharded dimension, s_q what rank q holds of it, K features

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tpkernels.overlap.plan import even_cut

# GEMMs of fewer rows than this are put together. ASSUMPTION: a copy of them costs less than what
# the library loses on a GEMM of so few rows.
FEW_ROWS = 64


Cutting = Callable[[int, int], list[tuple[int, int]]]
"""From a total and a count to [start, end) of each part."""


@dataclass(frozen=True)
class Cut:
    """Part of rank ``owner``'s rows: indices [lo, hi) of its P * s; ``size`` rows of memory."""

    owner: int
    lo: int
    hi: int
    size: int


class Blocks:
    """How a tensor [..., S, ..., K] lies in memory where S is sharded into ``sizes``."""

    def __init__(self, shape: Sequence[int], dim: int, sizes: list[int]) -> None:
        dim %= len(shape)
        self.before, self.between = prod(shape[:dim]), prod(shape[dim + 1 : -1])
        self.sizes = sizes
        self._firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def rows_of(self, owner: int) -> int:
        """Rows of memory that are ``owner``'s."""
        return self.before * self.sizes[owner] * self.between

    def cuts(self, owner: int, count: int, cut: Cutting = even_cut) -> list[Cut]:
        """``owner``'s rows in at most ``count`` parts, none empty, in order, as ``cut`` says."""
        size = self.sizes[owner]
        if not self.rows_of(owner):
            return []
        if self.before >= count:  # whole rows of the dimension: fewer, longer views
            bounds = [(lo * size, hi * size) for lo, hi in cut(self.before, count)]
        else:
            bounds = cut(self.before * size, count)
        return [Cut(owner, lo, hi, (hi - lo) * self.between) for lo, hi in bounds]

    def views(self, whole: Tensor, cut: Cut) -> list[Tensor]:
        """The rows of ``cut`` in ``whole`` [..., S, ..., C], contiguous: [n, C] each, in order."""
        width = whole.shape[-1]
        laid = whole.view(self.before, sum(self.sizes), self.between, width)
        return self._views(laid, cut, self._firsts[cut.owner])

    def part_views(self, part: Tensor, cut: Cut) -> list[Tensor]:
        """The rows of ``cut`` in its owner's own tensor [..., s, ..., C], contiguous."""
        laid = part.view(self.before, self.sizes[cut.owner], self.between, part.shape[-1])
        return self._views(laid, cut, 0)

    def _views(self, laid: Tensor, cut: Cut, first: int) -> list[Tensor]:
        size, width = self.sizes[cut.owner], laid.shape[-1]
        views = []
        for p in range(cut.lo // size, -(-cut.hi // size)):
            a, b = max(cut.lo - p * size, 0), min(cut.hi - p * size, size)
            views.append(laid[p, first + a : first + b].view((b - a) * self.between, width))
        return views


def together(views: list[Tensor]) -> list[Tensor]:
    """The same rows in fewer tensors, where they are so short that a GEMM would suffer."""
    if len(views) > 1 and max(view.shape[0] for view in views) < FEW_ROWS:
        return [torch.cat(views)]
    return views


def spread(rows: Tensor, views: list[Tensor]) -> None:
    """Write ``rows`` [n, C] into views that have n rows together."""
    sizes = [view.shape[0] for view in views]
    for view, part in zip(views, rows.split(sizes), strict=True):
        view.copy_(part)
