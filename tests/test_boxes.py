"""Boxes: what all ranks hold tiles the whole, through every level of splitting."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_shard_spec import layouts, numbered
from tpkernels.boxes import Box, boxes_of_range
from tpkernels.shard_spec import Chunk, ShardSpec, copied_spec, layout_from_sizes

SHAPES = [(1,), (2,), (), (5, 7), (3, 4, 5), (2, 3, 1, 4), (0, 3), (3, 0)]


@given(shape=st.sampled_from(SHAPES), ends=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_a_range_is_at_most_a_few_boxes_in_order(shape, ends):
    start, stop = sorted(min(end, math.prod(shape)) for end in ends)
    whole = numbered(shape)
    places = boxes_of_range(shape, start, stop)
    held = [Box(*place, 0, None, ()).of(whole).flatten() for place in places]
    assert torch.cat([*held, torch.empty(0)]).tolist() == list(range(start, stop))
    assert len(places) <= max(2 * (len(shape) - 1) + 1, 1)
    assert all(math.prod(sizes) for _, sizes in places)


def test_the_boxes_of_the_docstring():
    assert boxes_of_range((4, 3), 2, 11) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    assert boxes_of_range((4, 3), 3, 9) == [((1, 0), (2, 3))]
    assert boxes_of_range((4, 3), 4, 5) == [((1, 1), (1, 1))]


@st.composite
def flat_cuts(draw, shape):
    """Any number of ranks, some of them with nothing; a range may be in two chunks."""
    numel = math.prod(shape)
    cuts = sorted(draw(st.lists(st.integers(0, numel), max_size=3)))
    ends = [0, *cuts, numel]
    layout = []
    for low, high in itertools.pairwise(ends):
        middle = draw(st.integers(low, high))
        if draw(st.booleans()) and low < middle < high:  # the latter half first
            layout.append(
                (Chunk(middle, high - middle, 0), Chunk(low, middle - low, high - middle))
            )
        else:
            layout.append((Chunk(low, high - low, 0),) if high > low else ())
    return tuple(layout)


@st.composite
def outer_specs(draw):
    """Every rank's spec of a first split, or of none (None)."""
    kind = draw(st.sampled_from(["none", "rows", "heads", "copies", "flat"]))
    shape = draw(st.sampled_from(SHAPES))
    if kind == "none":
        return shape, [None]
    if kind == "flat":
        layout = draw(flat_cuts(shape))
        return shape, [ShardSpec(shape, None, layout, r) for r in range(len(layout))]
    if kind == "copies" and shape:
        return shape, [copied_spec(shape, 2, r) for r in range(2)]
    layout, dim = draw(layouts()), draw(st.integers(0, 2))
    if kind == "rows":
        layout = layout_from_sizes(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    rows = max((c.offset + c.size for held in layout for c in held), default=0)
    shape = [draw(st.integers(1, 3)), draw(st.integers(0, 3))]
    shape.insert(dim, rows)
    return tuple(shape), [ShardSpec(tuple(shape), dim, layout, r) for r in range(len(layout))]


@given(data=st.data())
def test_the_boxes_of_all_ranks_tile_the_whole(data):
    shape, outers = data.draw(outer_specs())
    whole = numbered(shape)
    held, expected, written = (torch.zeros(shape) for _ in range(3))
    for outer in outers:
        part = whole if outer is None else outer.take(whole)
        inner_layout = data.draw(flat_cuts(tuple(part.shape)))
        spec = ShardSpec(tuple(part.shape), None, inner_layout, 0, "dp_shard", outer)
        assert spec.whole_shape == shape
        for rank in range(len(inner_layout)):
            local = replace(spec, rank=rank).take(part)
            loaded = torch.full_like(local, -1.0)
            for box in replace(spec, rank=rank).boxes():
                view = box.view(local)
                assert tuple(view.shape) == box.sizes and torch.equal(view, box.of(whole))
                assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                box.view(loaded).copy_(box.of(whole))
                box.of(held).add_(1)
                box.of(expected).fill_(box.replicas)
                box.of(written).add_(not box.written_elsewhere)
            assert torch.equal(loaded, local)
    assert torch.equal(held, expected) and bool((held >= 1).all())
    assert bool((written == 1).all())


@given(layout=layouts(), dim=st.integers(0, 1))
def test_a_split_into_heads_is_a_box_a_chunk(layout, dim):
    rows = max((c.offset + c.size for held in layout for c in held), default=0)
    shape = (rows, 2) if dim == 0 else (2, rows)
    whole = numbered(shape)
    for rank in range(len(layout)):
        spec = ShardSpec(shape, dim, layout, rank)
        boxes, local = spec.boxes(), spec.take(whole)
        assert len(boxes) == sum(chunk.size > 0 for chunk in spec.chunks)
        assert all(torch.equal(box.view(local), box.of(whole)) for box in boxes)
        assert [box.replicas for box in boxes] == [spec.replicas(c) for c in spec.chunks if c.size]


@pytest.mark.parametrize("outer_dim", [0, None], ids=["rows", "flat"])
def test_rows_of_a_flat_part(outer_dim):
    """A split along the only dimension of a part that is itself a range."""
    whole = numbered((3, 4)) if outer_dim is None else numbered((12,))
    outer = ShardSpec(tuple(whole.shape), outer_dim, layout_from_sizes([2, 9, 1]), 1)
    for rank in range(2):
        spec = ShardSpec((9,), 0, layout_from_sizes([4, 5]), rank, within=outer)
        local = spec.take(outer.take(whole))
        boxes = spec.boxes()
        assert sum(math.prod(box.sizes) for box in boxes) == local.numel()
        assert all(torch.equal(box.view(local), box.of(whole)) for box in boxes)
