"""The correctness gate: what fails it is reported with its error, and is never timed.

The truth is float64 on a slice of each output, so that the gate is cheap whatever the shape; there
a variant's error may be at most twice eager PyTorch's plus one rounding unit. All of an output is
then compared with eager's, block by block, so that one wrong tile shows: two results that are
within `2 e + eps` and `e` of the truth are within `3 e + eps` of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.testing import assert_two_times, relative_error

# Elements compared as one: a wrong 128 x 128 tile among them is 25% of their norm, and so many
# average the rounding errors out.
_BLOCK = 1 << 18
_AT_ONCE = 128 * _BLOCK  # so that the wide copies stay small


@dataclass(frozen=True)
class Truth:
    """A slice of one output in float64.

    Attributes:
        name: what the output is.
        pick: the same slice of that output as a variant returns it.
        value: float64.
    """

    name: str
    pick: Callable[[Tensor], Tensor]
    value: Tensor


def sample(size: int, most: int, device: torch.device) -> Tensor:
    """At most `most` indices below `size`: the first, the last, and some between."""
    if size <= most:
        return torch.arange(size, device=device)
    return torch.linspace(0, size - 1, most, dtype=torch.float64).round().long().to(device)


def check(
    outputs: Sequence[Tensor], eager: Sequence[Tensor], truths: Sequence[Truth]
) -> tuple[float, str | None]:
    """(largest relative error, what is wrong or None) of a variant's `outputs`.

    One of `truths` an output, in order.
    """
    if len(outputs) != len(truths):
        return float("nan"), f"{len(outputs)} outputs instead of {len(truths)}"
    largest = 0.0
    for ours, theirs, truth in zip(outputs, eager, truths, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("nan"), (
                f"{truth.name} is {tuple(ours.shape)} {ours.dtype} instead of "
                f"{tuple(theirs.shape)} {theirs.dtype}"
            )
        picked, picked_eager = truth.pick(ours), truth.pick(theirs)
        error = relative_error(picked, truth.value)
        largest = max(largest, error) if error == error else error
        try:
            assert_two_times(picked, picked_eager, truth.value, name=truth.name)
        except AssertionError as failed:
            return error, str(failed)
        eps = torch.finfo(ours.dtype).eps
        bound = 3 * relative_error(picked_eager, truth.value) + eps
        distance, where = _furthest_block(ours, theirs)
        if not distance <= bound:  # also a NaN
            return distance, (
                f"{truth.name}: elements {where * _BLOCK} to "
                f"{min((where + 1) * _BLOCK, ours.numel()) - 1} differ from eager's by "
                f"{distance:.3e}, above {bound:.3e} = 3 x its error + eps"
            )
        if largest != largest:
            return largest, f"{truth.name}: NaN"
    return largest, None


def _furthest_block(ours: Tensor, eager: Tensor) -> tuple[float, int]:
    """The largest relative distance of a block of elements, and which block it is."""
    mine, theirs = ours.reshape(-1), eager.reshape(-1)
    whole = mine.numel() // _BLOCK * _BLOCK
    distances = []
    for start in range(0, whole, _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, whole))
        distances.append(_distances(mine[part].view(-1, _BLOCK), theirs[part].view(-1, _BLOCK)))
    if whole < mine.numel():
        distances.append(_distances(mine[whole:][None], theirs[whole:][None]))
    if not distances:
        return 0.0, 0
    every = torch.cat(distances)
    where = int(every.nan_to_num(nan=float("inf")).argmax())
    return float(every[where]), where


def _distances(mine: Tensor, theirs: Tensor) -> Tensor:
    """Row by row, the norm of the difference over the norm of `theirs`."""
    wide = torch.float64 if mine.dtype in (torch.float32, torch.float64) else torch.float32
    far = torch.linalg.vector_norm(mine.to(wide) - theirs.to(wide), dim=1)
    norm = torch.linalg.vector_norm(theirs, dim=1, dtype=wide)
    # 0 / 0 is no distance; the rest keeps NaN and infinity
    return torch.where(far == 0, torch.zeros_like(far), far / norm)
