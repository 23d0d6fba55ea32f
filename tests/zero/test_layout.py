"""The flat layout: every element of every parameter is held by exactly one rank, in order."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tpkernels.zero.layout import ALIGNMENT, flat_layout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=SHAPES, itemsize=st.sampled_from([2, 4, 8]), world=st.integers(1, 7))
def test_each_element_is_held_once_and_in_place(shapes, itemsize, world):
    layout = flat_layout(shapes, itemsize, world)
    assert layout.numel == layout.shard_numel * world
    assert layout.shard_numel * itemsize % ALIGNMENT == 0
    flat = torch.full((layout.numel,), -1)
    wholes = []
    for index, shape in enumerate(shapes):
        numel, offset = math.prod(shape), layout.offsets[index]
        assert layout.numel_of(index) == numel and offset * itemsize % ALIGNMENT == 0
        wholes.append(torch.arange(numel) + 1000 * index)
        assert bool((flat[offset : offset + numel] == -1).all())  # none overlaps another
        flat[offset : offset + numel] = wholes[-1]
    for index, whole in enumerate(wholes):
        parts = []
        for rank in range(world):
            chunk, start = layout.chunk(index, rank), layout.shard_start(index, rank)
            shard = flat[rank * layout.shard_numel : (rank + 1) * layout.shard_numel]
            part = shard[start : start + chunk.size]
            assert torch.equal(part, whole[chunk.offset : chunk.offset + chunk.size])
            parts.append(part)
        assert torch.equal(torch.cat(parts), whole)


def test_padding_is_less_than_one_row_of_alignment_a_rank_and_parameter():
    layout = flat_layout([(512,), (8,), (3, 3)], 4, 3)
    assert layout.offsets == (0, 512, 520)
    assert layout.numel - (512 + 8 + 9) < (3 + 3) * ALIGNMENT // 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_elements_at_all(world):
    layout = flat_layout([(0, 3)], 4, world)
    assert layout.numel == 0 and layout.chunk(0, world - 1).size == 0
