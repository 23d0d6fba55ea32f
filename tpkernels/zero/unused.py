"""Which parameters a backward will bring gradients for, read off the graph of the outputs."""

from __future__ import annotations

from typing import Any

from tpkernels.zero.hooks import tensors_in
from tpkernels.zero.unit import Unit


def expect_reachable(units: list[Unit], output: Any) -> None:
    """Set each unit's expected gradients to those that a backward of ``output`` reaches.

    Adds to what an earlier forward of the same backward expects. A reentrant checkpoint hides its
    part of the graph: what is expected then comes at the end of backward.
    """
    reached = _reachable_leaves(output)
    for unit in units:
        found = {
            (which, index) for which, index, slot in unit.trained() if id(slot.whole) in reached
        }
        unit.expected = found | (unit.expected or set())


def _reachable_leaves(output: Any) -> set[int]:
    """ids of the leaves whose gradients the graph of ``output`` accumulates."""
    pending = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    seen, leaves = set(pending), set()
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves
