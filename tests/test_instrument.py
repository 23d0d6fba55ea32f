"""What ops tell: nothing while nobody records, at a bounded price; errors name the layer."""

from __future__ import annotations

import time

import pytest
import torch

from tpkernels import instrument
from tpkernels.errors import CommunicationError

X = torch.ones(4)


def test_off_costs_less_than_the_quickest_op():
    """CPU time, so that other programs do not count; it measures 0.9 us, the bound is generous."""

    def one_op() -> None:
        with instrument.operation("x", "layer", "g", X), instrument.computing("gemm", X):
            pass
        with instrument.waiting("x", X):
            pass
        instrument.arrived(instrument.communication("x", "g", X))

    best = float("inf")
    for _ in range(20):
        began = time.thread_time_ns()
        for _ in range(500):
            one_op()
        best = min(best, (time.thread_time_ns() - began) / 500)
    assert best < 5_000, f"{best:.0f} ns"


def test_nobody_records_by_default():
    assert not instrument.recording()
    assert instrument.communication("x", "g", X) is None


@pytest.mark.parametrize(("layer", "where"), [("mlp.up", "layer mlp.up, x: "), ("", "x: ")])
def test_an_error_of_communication_says_where_once(layer, where):
    with (
        pytest.raises(CommunicationError, match=f"^{where}rank 1 is gone$"),
        instrument.operation("outer", "outer", "g", X),
        instrument.operation("x", layer, "g", X),
    ):
        raise CommunicationError("rank 1 is gone")


def test_other_errors_are_left_as_they_are():
    with pytest.raises(KeyError), instrument.operation("x", "mlp", "g", X):
        raise KeyError("a")
