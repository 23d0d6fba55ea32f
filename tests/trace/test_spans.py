"""Sets of moments, against the same done with one moment at a time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tpkernels.trace.spans import common, length, union, without
from tpkernels.trace.timeline import rows_of

MOMENTS = range(60)
spans = st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(MOMENTS)), max_size=12)


def moments(found) -> set[int]:
    return {at for at in MOMENTS if any(begin <= at < end for begin, end in found)}


def assert_tidy(found) -> None:
    assert all(begin < end for begin, end in found)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@given(spans, spans)
def test_they_are_what_sets_of_moments_are(some, others):
    a, b = union(some), union(others)
    assert_tidy(a)
    assert moments(a) == moments(some) and length(a) == len(moments(some))
    assert moments(without(a, b)) == moments(a) - moments(b)
    assert length(without(a, b)) == len(moments(a) - moments(b))
    assert moments(common(a, b)) == moments(a) & moments(b)


@given(spans)
def test_rows_do_not_overlap_and_are_no_more_than_needed(some):
    some = [(begin, end) for begin, end in some if begin < end]
    rows = rows_of(some)
    for row in set(rows):
        members = sorted(span for span, its in zip(some, rows, strict=True) if its == row)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(members))
    most = max((sum(b <= at < e for b, e in some) for at in MOMENTS), default=0)
    assert len(set(rows)) == most
