"""Rows that several ranks hold get the sum of their gradients; rows of one rank are not sent."""

from __future__ import annotations

import pytest
import torch

from tests.across_ranks import assert_gradients
from tests.overlap.samples import normals
from tpkernels.comm.group import resolve_group
from tpkernels.overlap.replicated import sum_replicated_gradient
from tpkernels.shard_spec import ShardSpec, layout_from_blocks, layout_from_sizes
from tpkernels.testing import count_collectives

# 2 key-value heads of 3 rows over 4 ranks; and a fused q (4 rows split) + kv (one head of 3, held
# by all) over 2.
SHARED_HEADS = layout_from_blocks([([(0, 3), (0, 3), (3, 3), (3, 3)], 6)])
FUSED = layout_from_blocks([([(0, 2), (2, 2)], 4), ([(0, 3), (0, 3)], 3), ([(0, 1), (1, 2)], 3)])
SPLIT = layout_from_sizes([2, 1])


def spec_for(group, layout, dim):
    rows = max(chunk.offset + chunk.size for held in layout for chunk in held)
    shape = (rows, 2) if dim == 0 else (2, rows)
    return ShardSpec(shape, dim, layout, group.rank())


def summed(group, layout, dim):
    """Gradient of this rank's weight for its own loss, and what was sent."""
    spec = spec_for(group, layout, dim)
    weight = torch.ones(spec.local_shape, requires_grad=True)
    own = torch.arange(weight.numel()).view(spec.local_shape) + 100.0 * group.rank()
    with count_collectives() as forward:
        out = sum_replicated_gradient(weight, spec, resolve_group(group).name)
    with count_collectives() as backward:
        (gradient,) = torch.autograd.grad(out, weight, own)
    assert forward.total.calls == 0 and torch.equal(out, weight)
    return gradient, own, backward.total.calls, backward.total.bytes


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("layout", "replicated_rows"),
    [(SHARED_HEADS, 6), (FUSED, 3), (SPLIT, 0)],
    ids=["heads", "fused", "split"],
)
def test_gradients_are_summed_over_the_holders(pool, layout, replicated_rows, dim):
    """TP-27: a head held twice is one head."""
    world = len(layout)
    results = pool.run(summed, layout, dim, world_size=world)
    total = torch.zeros_like(torch.empty(spec_for_rank(layout, dim, 0).global_shape))
    for rank, (_, own, _, _) in enumerate(results):
        spec = spec_for_rank(layout, dim, rank)
        placed = torch.zeros(spec.global_shape)
        spec.put(own, placed)
        total += placed
    for rank, (gradient, _, calls, sent) in enumerate(results):
        assert torch.equal(gradient, spec_for_rank(layout, dim, rank).take(total))
        assert (calls, sent) == ((1, replicated_rows * 2 * 4) if replicated_rows else (0, 0))


def spec_for_rank(layout, dim, rank):
    rows = max(chunk.offset + chunk.size for held in layout for chunk in held)
    return ShardSpec((rows, 2) if dim == 0 else (2, rows), dim, layout, rank)


def left_alone(group):
    spec = spec_for(group, FUSED, 0)
    name = resolve_group(group).name
    frozen, wanted = torch.ones(spec.local_shape), torch.ones(spec.local_shape, requires_grad=True)
    return (
        sum_replicated_gradient(frozen, spec, name) is frozen,
        sum_replicated_gradient(wanted, None, name) is wanted,
        sum_replicated_gradient(wanted, spec, "") is wanted,
        sum_replicated_gradient(wanted, spec_for(group, SPLIT, 0), name) is wanted,
    )


def test_nothing_is_done_where_nothing_is_shared(pool):
    assert pool.run(left_alone, world_size=2) == [(True,) * 4] * 2


def gradients_of(group):
    """One head held by all ranks: a parameter that all ranks share and use differently."""
    spec = ShardSpec((2, 2), 0, layout_from_blocks([([(0, 2)] * 3, 2)]), group.rank())
    name, scale = resolve_group(group).name, group.rank() + 1.0
    assert_gradients(
        group,
        lambda w: torch.sin(scale * sum_replicated_gradient(w, spec, name)),
        [normals(1, 2, 2)],
        shared=[True],
        replicated_output=False,
    )


def test_gradcheck_with_every_holder_perturbed(pool):
    pool.run(gradients_of, world_size=3)
