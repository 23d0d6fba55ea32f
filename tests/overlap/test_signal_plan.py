"""Chunks, tiles, order and targets of ``signaled``: every tile counts once for what it touches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tpkernels.overlap import OverlapPlan, sequence_sizes
from tpkernels.overlap.signal_plan import (
    Targets,
    by_owners,
    by_rows,
    owners_refusal,
    reached,
)

rows = st.integers(0, 700)
tiles = st.tuples(st.integers(1, 130), st.integers(1, 130))


@st.composite
def plans(draw):
    """By rows, or by owners: even, as even as can be, and of any two sizes."""
    if draw(st.booleans()):
        cut = OverlapPlan("signaled", draw(st.integers(1, 12)), "test")
        return by_rows(cut.rows(draw(rows)))
    world = draw(st.integers(2, 8))
    if draw(st.booleans()):
        sizes = sequence_sizes(draw(rows), world)
    else:
        longs = draw(st.integers(0, world))
        small = st.integers(0, 90)
        sizes = [draw(small)] * longs + [draw(small)] * (world - longs)
    return by_owners(sizes, draw(st.integers(0, world - 1)))


@given(plans())
def test_chunks_are_contiguous_and_cover_the_rows(plan):
    covered = [row for start, end in plan.bounds for row in range(start, end)]
    assert covered == list(range(plan.rows))
    assert sorted(plan.order) == list(range(len(plan.bounds)))


@given(plans())
def test_the_two_divisions_find_the_chunk_of_every_row(plan):
    for chunk, (start, end) in enumerate(plan.bounds):
        assert all(plan.chunks.of_row(row) == chunk for row in range(start, end))
    boundary, length, count, rest = plan.chunks.arguments()
    assert length > 0 and rest > 0  # divisors
    for row in range(plan.rows):
        found = row // length if row < boundary else count + (row - boundary) // rest
        assert found == plan.chunks.of_row(row)


@given(plans(), tiles, st.integers(0, 400))
def test_every_tile_counts_once_for_every_chunk_it_touches(plan, tile, columns):
    counted = [0] * len(plan.bounds)
    seen = []
    for start, end in plan.tiles(tile[0]):
        seen.append((start, end))
        touched = {
            chunk for chunk, (first, last) in enumerate(plan.bounds) if start < last and end > first
        }
        touched = {c for c in touched if plan.bounds[c][0] < plan.bounds[c][1]}
        assert set(plan.touched(start, end)) == touched
        for _ in range(0, columns, tile[1]):
            for chunk in plan.touched(start, end):
                counted[chunk] += 1
    assert counted == plan.expected(columns, tile)
    assert sum(counted) == sum(plan.expected(columns, tile))
    assert [row for s, e in sorted(seen) for row in range(s, e)] == list(range(plan.rows))


@given(st.integers(2, 8), st.integers(1, 60), st.integers(1, 16), st.data())
def test_own_rows_are_last_and_no_rank_is_sent_to_by_two(world, each, tile_rows, data):
    """Ring order; a chunk is whole in the order in which it is sent, tiles of two chunks aside."""
    plans = [by_owners([each] * world, rank) for rank in range(world)]
    for rank, plan in enumerate(plans):
        assert plan.order[0] == (rank + 1) % world and plan.order[-1] == rank
    for step in range(world):
        assert len({plan.order[step] for plan in plans}) == world
    plan = plans[data.draw(st.integers(0, world - 1))]
    if each % tile_rows:  # the tile that two chunks share comes with the first of them
        return
    done = [chunk for start, end in plan.tiles(tile_rows) for chunk in plan.touched(start, end)]
    assert tuple(dict.fromkeys(done)) == plan.order


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_sizes_that_two_divisions_cannot_find_are_refused(sizes):
    changes = sum(a != b for a, b in pairwise(sizes))
    assert (owners_refusal(sizes) is not None) == (changes > 1)
    assume(changes > 1)
    with pytest.raises(ValueError, match="are not of one size"):
        by_owners(sizes, 0)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.lists(st.integers(0, 2**20), min_size=3, max_size=3), max_size=6),
)
def test_targets_grow_through_the_end_of_32_bits(start, calls):
    """TP-10: nothing is reset; a count is short of its target until its last tile is counted."""
    targets, counts = Targets(3), [start] * 3
    targets.advance([start] * 3)
    for expected in calls:
        wanted = targets.advance(expected)
        for chunk, count in enumerate(expected):
            if count:
                assert not reached(counts[chunk], wanted[chunk])
                assert not reached((counts[chunk] + count - 1) % 2**32, wanted[chunk])
            counts[chunk] = (counts[chunk] + count) % 2**32
            assert reached(counts[chunk], wanted[chunk])


def test_a_call_of_fewer_chunks_leaves_the_other_targets():
    targets = Targets(3)
    assert targets.advance([5, 5, 5]) == [5, 5, 5]
    assert targets.advance([2]) == [7]
    assert targets.advance([0, 0, 1]) == [7, 5, 6]
