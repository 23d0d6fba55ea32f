"""Sets of moments, as lists of [begin, end) spans in nanoseconds that are sorted and disjoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """All moments that are in any of ``spans``, which may overlap and come in any order."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def without(spans: list[Span], removed: list[Span]) -> list[Span]:
    """The moments of ``spans`` that are not in ``removed``."""
    left: list[Span] = []
    for begin, end in spans:
        at = max(0, bisect_right(removed, (begin, begin)) - 1)
        while at < len(removed) and removed[at][0] < end:
            if removed[at][1] > begin:
                if removed[at][0] > begin:
                    left.append((begin, removed[at][0]))
                begin = removed[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def common(spans: list[Span], others: list[Span]) -> list[Span]:
    """The moments that are in both."""
    return without(spans, without(spans, others))


def length(spans: list[Span]) -> int:
    """Nanoseconds in all."""
    return sum(end - begin for begin, end in spans)
