"""``ShardSpec``: parts taken from a whole and put back are the whole, replicas and all."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import ConfigError
from tpkernels.shard_spec import (
    Chunk,
    ShardSpec,
    attach_spec,
    balanced_sizes,
    chunk_sizes,
    layout_from_blocks,
    layout_from_sizes,
    spec_of,
)


def specs(layout, dim, other=(2,)):
    rows = max((c.offset + c.size for held in layout for c in held), default=0)
    shape = [*other]
    shape.insert(dim, rows)
    return [ShardSpec(tuple(shape), dim, layout, rank) for rank in range(len(layout))]


def numbered(shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@st.composite
def layouts(draw):
    """Several blocks, each split unevenly or held by several ranks."""
    world = draw(st.integers(1, 5))
    blocks = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            sizes = draw(st.lists(st.integers(0, 4), min_size=world, max_size=world))
            starts = [sum(sizes[:rank]) for rank in range(world)]
            blocks.append((list(zip(starts, sizes, strict=True)), sum(sizes)))
        else:  # heads of h rows, each held by a run of ranks
            head = draw(st.integers(1, 3))
            cuts = sorted(draw(st.sets(st.integers(1, world - 1)))) if world > 1 else []
            owner = [sum(rank >= cut for cut in cuts) for rank in range(world)]
            blocks.append(([(o * head, head) for o in owner], (len(cuts) + 1) * head))
    return layout_from_blocks(blocks)


@given(
    layout=layouts(), dim=st.integers(0, 2), other=st.tuples(st.integers(0, 3), st.integers(1, 2))
)
def test_parts_put_back_are_the_whole(layout, dim, other):
    """TP-6: uneven parts restore the original size."""
    parts = specs(layout, dim, other)
    full = numbered(parts[0].global_shape)
    restored = torch.full_like(full, -1.0)
    for spec in parts:
        local = spec.take(full)
        assert tuple(local.shape) == spec.local_shape and local.is_contiguous()
        spec.put(local, restored)
    assert torch.equal(restored, full)
    again = torch.full_like(full, -1.0)
    for rank in range(len(parts)):  # one rank can place every rank's part
        parts[0].put(parts[rank].take(full), again, rank)
    assert torch.equal(again, full)


@given(layout=layouts())
def test_replicas_count_the_holders_of_every_row(layout):
    (first, *_) = parts = specs(layout, 0)
    held = torch.zeros(first.global_shape[0])
    for spec in parts:
        for chunk in spec.chunks:
            held[chunk.offset : chunk.offset + chunk.size] += 1
    assert first.is_replicated == bool((held > 1).any())
    for row in range(first.global_shape[0]):
        assert len(first.owners(row)) == held[row]
    for spec in parts:
        for chunk in spec.chunks:
            assert spec.replicas(chunk) == (held[chunk.offset] if chunk.size else 1)


@given(total=st.integers(0, 50), world=st.integers(1, 9))
def test_sizes(total, world):
    """As ``torch.chunk`` (and DTensor) split; and balanced to within one."""
    pieces = [len(piece) for piece in torch.arange(total).chunk(world)] if total else []
    assert chunk_sizes(total, world) == pieces + [0] * (world - len(pieces))
    balanced = balanced_sizes(total, world)
    assert sum(balanced) == total and max(balanced) - min(balanced) <= 1
    assert balanced == sorted(balanced, reverse=True)


def test_sizes_of_the_docstrings():
    assert chunk_sizes(5, 2) == [3, 2] and chunk_sizes(5, 4) == [2, 2, 1, 0]
    assert balanced_sizes(5, 4) == [2, 1, 1, 1]


def test_a_fused_projection_is_three_chunks_a_rank():
    halves = ([(0, 4), (4, 4)], 8), ([(0, 2), (2, 2)], 4), ([(0, 2), (2, 2)], 4)
    layout = layout_from_blocks(halves)
    assert layout[1] == (Chunk(4, 4, 0), Chunk(10, 2, 4), Chunk(14, 2, 6))
    assert layout_from_sizes([3, 0, 2])[2] == (Chunk(3, 2, 0),)


def test_a_part_is_a_copy():
    (spec,) = specs(layout_from_sizes([4]), 0)
    full = numbered((4, 2))
    spec.take(full).zero_()
    assert torch.equal(full, numbered((4, 2)))


def test_a_whole_of_another_shape_is_refused():
    (spec, _) = specs(layout_from_sizes([3, 2]), 0)
    with pytest.raises(
        ConfigError, match=r"expected a full tensor of shape \(5, 2\), got \(3, 2\)"
    ):
        spec.take(torch.ones(3, 2))


def test_a_spec_hangs_on_a_tensor_and_travels():
    (spec, _) = specs(layout_from_sizes([3, 2]), 0)
    tensor = torch.ones(3, 2)
    assert spec_of(tensor) is None
    attach_spec(tensor, spec)
    assert spec_of(tensor) is spec
    assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(
        pickle.loads(pickle.dumps(spec))
    )
