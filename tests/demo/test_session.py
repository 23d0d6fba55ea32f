"""Checks and their limits, and the timing tables."""

from __future__ import annotations

import math

import pytest
import torch

from tpkernels.demo.session import Check, Outcome, counted, error_check
from tpkernels.demo.timing import Variant, table


def variant(name, seconds, megabytes=1.0):
    made = Variant(name, lambda: None, True, 1, int(megabytes * 1e6))
    made.seconds = seconds
    return made


def test_a_check_passes_up_to_its_limit():
    assert Check("error", 1e-5, 1e-5).passed
    assert not Check("error", 1.1e-5, 1e-5).passed
    assert not Check("error", math.nan, 1e-5).passed
    assert str(Check("error", 3.14e-7, 1e-5)) == "error: 3.1e-07  (limit 1.0e-05)  OK"
    assert str(Check("tokens", 2, 0)) == "tokens: 2  (must be 0)  FAILED"


def test_an_outcome_passes_if_all_its_checks_do():
    outcome = Outcome("m", [Check("a", 0, 0), Check("b", 1, 0)], {"tokens": [1]})
    assert not outcome.passed
    assert outcome.as_dict()["passed"] is False
    assert outcome.as_dict()["checks"][1] == {"name": "b", "value": 1, "limit": 0, "passed": False}


def test_float32_is_compared_with_the_dense_run():
    dense = torch.tensor([1.0, -4.0])
    check = error_check(torch.tensor([1.0, -4.5]), dense, dense, 1e-5)
    assert (check.value, check.limit) == (0.125, 1e-5)


def test_low_precision_may_be_twice_as_far_off_as_the_dense_run():
    exact = torch.tensor([1.0, 4.0])
    dense = torch.tensor([1.0, 4.25], dtype=torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    ours = torch.tensor([1.0, 4.5], dtype=torch.bfloat16)
    check = error_check(ours, dense, exact, 1e-5)
    assert (check.value, check.limit) == (0.125, 2 * 0.0625 + eps)
    assert check.passed
    assert not error_check(ours + 0.125, dense, exact, 1e-5).passed


def test_percentiles():
    assert variant("v", [0.25]).percentiles == (0.25, 0.25, 0.25)
    p20, p50, p80 = variant("v", [float(i) for i in range(11)]).percentiles
    assert (p20, p50, p80) == pytest.approx((2.0, 5.0, 8.0))


def test_the_table_compares_with_the_first_row():
    shown = table("work", [variant("dense", [0.010] * 3, 90.9), variant("tp", [0.005] * 3, 45.4)])
    title, _, dense, parallel = shown.splitlines()
    assert title.startswith("work (3 runs)")
    assert dense.split() == ["dense", "10.0", "10.0", "10.0", "1.00", "90.9"]
    assert parallel.split() == ["tp", "5.0", "5.0", "5.0", "0.50", "45.4"]


def test_counted():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
