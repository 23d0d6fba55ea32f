"""A budget ends a run between cases, and what was left out is said."""

from __future__ import annotations

import io

from tpkernels.benchmarks.budget import Budget, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_budget_counts_down_to_zero():
    clock = Clock()
    budget = Budget(10, clock)
    assert (budget.spent(), budget.left()) == (0, 10)
    clock.now += 4
    assert (budget.spent(), budget.left()) == (4, 6)
    clock.now += 60
    assert budget.left() == 0
    assert Budget(None, clock).left() == float("inf")


def test_progress_is_one_line_a_case_in_a_file():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(3, Budget(10, clock), stream)
    progress.step("first")
    clock.now += 11
    progress.skip("second", "no time left of 10 s")
    progress.skip("third", "no time left of 10 s")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "[1/3] 0 of 10 s  first",
        "left out 2 cases, no time left of 10 s: second; third",
    ]


def test_progress_rewrites_its_line_on_a_terminal_and_clears_it():
    stream = Terminal()
    progress = Progress(2, Budget(), stream)
    progress.step("a long title of the first case")
    progress.step("short")
    progress.close()
    assert stream.getvalue().count("\n") == 0
    assert stream.getvalue().endswith("\r")
