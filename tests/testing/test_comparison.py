"""The two-times rule and the measures under it."""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels.testing import assert_two_times, max_relative_error, relative_error


def test_relative_error_is_a_ratio_of_norms():
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == 1 / 5
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))


def test_max_relative_error_is_a_ratio_of_peaks():
    assert max_relative_error(torch.tensor([1.0, -7.0]), torch.tensor([1.0, -8.0])) == 1 / 8
    assert max_relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert math.isnan(max_relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2)))


def test_half_precision_is_compared_in_double():
    a = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    assert relative_error(a, a) == 0.0
    assert max_relative_error(a.double() + 6, a) == 6 / 60000


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\(2,\) and \(1, 2\)"):
        relative_error(torch.ones(2), torch.ones(1, 2))


def test_two_times_takes_eagers_error_twice_and_one_rounding_unit():
    truth = torch.ones(100, dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    eager = (truth * (1 + 100 * eps)).float()
    assert_two_times((truth * (1 + 200 * eps)).float(), eager, truth)
    assert_two_times(truth.float() * (1 + eps), truth.float(), truth)
    with pytest.raises(AssertionError, match="y: relative error"):
        assert_two_times((truth * (1 + 204 * eps)).float(), eager, truth, name="y")


def test_two_times_names_the_element_that_is_furthest_off():
    truth = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    wrong = truth.float()
    wrong[1, 2] = 7.0
    with pytest.raises(AssertionError, match=r"furthest off at \(1, 2\): 7, eager 6, truth 6"):
        assert_two_times(wrong, truth.float(), truth)


def test_two_times_fails_on_nan():
    truth = torch.ones(3, dtype=torch.float64)
    wrong = torch.tensor([1.0, math.nan, 1.0])
    with pytest.raises(AssertionError, match=r"furthest off at \(1,\)"):
        assert_two_times(wrong, truth.float(), truth)


def test_two_times_allows_the_rounding_of_the_dtype_given():
    truth = torch.full((8,), 1.001, dtype=torch.float64)
    ours = torch.ones(8)
    with pytest.raises(AssertionError):
        assert_two_times(ours, truth.float(), truth)
    assert_two_times(ours, truth.float(), truth, torch.bfloat16)


def test_truth_must_be_double():
    with pytest.raises(ValueError, match="truth must be float64"):
        assert_two_times(torch.ones(1), torch.ones(1), torch.ones(1))
