"""``gradcheck`` across ranks: numerical gradients of a collective function, one rank at a time.

A rank's gradient is that of its own loss. Where the output is replicated, every rank computes the
same loss and that is the loss; where ranks hold different outputs, the loss is the sum over ranks.
An input that all ranks must share is perturbed on all of them, any other on one rank at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

STEP = 1e-6


def assert_gradients(
    group: dist.ProcessGroup,
    function: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    *,
    shared: Sequence[bool],
    replicated_output: bool,
) -> None:
    """Assert that backward of ``function(*inputs)`` agrees with central differences in fp64.

    Args:
        inputs: this rank's tensors; sizes may differ between ranks where they are not shared.
        shared: for each input, whether all ranks hold the same one.
        replicated_output: whether all ranks get the same output.

    Collective over the group: call it on all ranks.
    """
    points = [t.detach().double().requires_grad_() for t in inputs]
    outputs = _tuple(function(*points))
    seed = 1 if replicated_output else 2 + dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    analytical = torch.autograd.grad(outputs, points, cotangents, materialize_grads=True)

    def loss(values: Sequence[Tensor]) -> float:
        with torch.no_grad():
            results = _tuple(function(*values))
        total = sum((y * c).sum() for y, c in zip(results, cotangents, strict=True))
        if not replicated_output:
            dist.all_reduce(total, group=group)
        return float(total)

    for position, is_shared in enumerate(shared):
        expected = analytical[position]
        for owner in [None] if is_shared else range(group.size()):
            mine = owner is None or owner == dist.get_rank(group)
            sizes: list[int] = [0] * group.size()
            dist.all_gather_object(sizes, points[position].numel(), group=group)
            for element in range(sizes[owner or 0]):
                ends = []
                for step in (STEP, -STEP):
                    moved = [t.detach().clone(memory_format=torch.preserve_format) for t in points]
                    if mine:
                        index = torch.unravel_index(torch.tensor(element), moved[position].shape)
                        moved[position][index] += step
                    ends.append(loss(moved))
                numerical = (ends[0] - ends[1]) / (2 * STEP)
                if mine:
                    ours = expected.flatten()[element].item()
                    assert abs(ours - numerical) < 1e-6 * max(1, abs(numerical)), (
                        f"input {position} element {element}: backward gives {ours}, "
                        f"differences {numerical}"
                    )


def _tuple(result: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
