"""What overlap is judged by: bytes on the wire, limits, effective overlap, medians of ratios."""

from __future__ import annotations

import pytest

from tpkernels.benchmarks import overlap_limits
from tpkernels.benchmarks.overlap_block import BLOCKS
from tpkernels.benchmarks.overlap_layers import LAYERS
from tpkernels.benchmarks.overlap_limits import comparable, effective_overlap, limit_us


def test_bytes_of_two_and_of_four_ranks_by_hand():
    """10 rows of 6 in fp32 are 240 bytes."""
    half = dict.fromkeys(("gather_forward", "scatter_forward", "scatter_backward"), 120)
    whole = dict.fromkeys(("row_forward", "column_backward", "gather_backward"), 240)
    # Two all-reduces each way; gathered and scattered twice each way, and gathered again twice.
    expected = {**half, **whole, "block": 4 * 240, "block_sequence": 10 * 120}
    assert set(expected) == {*LAYERS, *BLOCKS}
    for op, size in expected.items():
        assert overlap_limits.wire_bytes(op, 10, 6, 4, 2) == size
        assert overlap_limits.wire_bytes(op, 10, 6, 4, 4) == size * 3 // 2  # (R - 1) / R
        assert overlap_limits.wire_bytes(op, 10, 6, 2, 2) == size // 2


def test_the_rate_gives_the_ratio_it_was_chosen_for():
    assert overlap_limits.wire_us(1000, 1.0) == 8.0
    rate = overlap_limits.rate_of(5_000_000, 0.75, 20_000.0)
    assert rate == pytest.approx(40e6 / 15e-3 / 1e9)
    assert overlap_limits.wire_us(5_000_000, rate) == pytest.approx(0.75 * 20_000)


def test_the_limit_is_the_longer_part():
    assert limit_us(10.0, 4.0) == 10 and limit_us(4.0, 10.0) == 10 and limit_us(4.0, None) == 4


def test_effective_overlap_is_one_where_the_shorter_part_is_hidden():
    assert effective_overlap(10, 4, 10) == 1
    assert effective_overlap(4, 10, 10) == 1
    assert effective_overlap(10, 4, 14) == 0
    assert effective_overlap(10, 4, 16) == -0.5


@pytest.mark.parametrize(
    ("wire", "judged"), [(None, False), (4.9, False), (5.0, True), (10.0, True), (10.1, False)]
)
def test_overlap_is_judged_where_wire_is_half_to_all_of_compute(wire, judged):
    assert comparable(10.0, wire) is judged


def test_the_interval_of_a_median_is_between_two_of_the_ratios():
    """With 6 turns all but 2 of 64 outcomes lie between the least and the largest; with 9, all but
    20 of 512 between the second and the last but one."""
    ones = [1.0] * 9
    assert overlap_limits.median_ratio([1, 2, 3, 4, 5], ones[:5]) == (3, None, None)
    assert overlap_limits.median_ratio([6, 1, 3, 4, 2, 5], ones[:6]) == (3.5, 1, 6)
    assert overlap_limits.median_ratio([9, 8, 7, 6, 5, 4, 3, 2, 1], ones) == (5, 2, 8)
    assert overlap_limits.median_ratio([2, 4, 6], [1, 4, 3])[0] == 2  # turn by turn
