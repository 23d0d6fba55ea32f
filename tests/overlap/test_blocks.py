"""Cuts of a sharded dimension: every row once, contiguous, in order, whoever asks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.overlap.blocks import FEW_ROWS, Blocks, spread, together
from tpkernels.overlap.plan import even_cut, falling_cut, rising_cut

SHAPES = st.tuples(
    st.lists(st.integers(0, 3), min_size=0, max_size=2),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=0, max_size=1),
    st.integers(0, 3),
)


def laid(before, sizes, between, width):
    """A tensor of distinct numbers, where its ranks' parts lie, and its dimension."""
    shape = (*before, sum(sizes), *between, width)
    numel = torch.Size(shape).numel()
    return torch.arange(float(numel)).view(shape), len(before)


@given(SHAPES, st.integers(1, 8), st.sampled_from((even_cut, falling_cut, rising_cut)))
def test_every_row_is_in_one_cut_of_its_owner(shape, count, how):
    sizes, width = shape[1], shape[3]
    whole, dim = laid(*shape)
    blocks = Blocks(whole.shape, dim, sizes)
    for owner, part in enumerate(whole.split(sizes, dim)):
        cuts = blocks.cuts(owner, count, how)
        assert len(cuts) <= count
        assert sum(cut.size for cut in cuts) == blocks.rows_of(owner)
        assert all(cut.owner == owner and cut.size > 0 for cut in cuts)
        expected = part.reshape(blocks.rows_of(owner), width)
        for views in (
            [v for cut in cuts for v in blocks.views(whole, cut)],
            [v for cut in cuts for v in blocks.part_views(part.contiguous(), cut)],
        ):
            assert all(view.is_contiguous() and view.dim() == 2 for view in views)
            rows = torch.cat([*views, whole.new_empty(0, width)])
            assert torch.equal(rows, expected)


@given(SHAPES, st.integers(1, 8))
def test_views_are_of_the_tensor_itself(shape, count):
    whole, dim = laid(*shape)
    blocks = Blocks(whole.shape, dim, shape[1])
    for owner in range(len(shape[1])):
        for cut in blocks.cuts(owner, count):
            sizes = [view.shape[0] for view in blocks.views(whole, cut)]
            assert sum(sizes) == cut.size
            for view in blocks.views(whole, cut):
                view.fill_(-1)
    assert bool((whole == -1).all())


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 5))
def test_another_width_is_cut_at_the_same_rows(count, size, other):
    """The output of a GEMM lies as its input does."""
    x, y = torch.zeros(3, size + other, 2, 4), torch.zeros(3, size + other, 2, 7)
    blocks = Blocks(x.shape, 1, [size, other])
    for owner in (0, 1):
        for cut in blocks.cuts(owner, count):
            pairs = zip(blocks.views(x, cut), blocks.views(y, cut), strict=True)
            assert all(a.shape[0] == b.shape[0] for a, b in pairs)


def test_short_pieces_are_put_together_and_spread_again():
    short = [torch.full((n, 2), float(n)) for n in (1, 3, FEW_ROWS - 1)]
    (rows,) = together(short)
    assert torch.equal(rows, torch.cat(short))
    places = [torch.zeros_like(each) for each in short]
    spread(rows, places)
    assert all(torch.equal(place, each) for place, each in zip(places, short, strict=True))
    long = [*short, torch.zeros(FEW_ROWS, 2)]
    assert together(long) is long
    assert together(short[:1])[0] is short[0]
