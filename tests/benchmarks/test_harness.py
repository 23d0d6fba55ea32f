"""The harness: in turns, gated, on rotating inputs, as often as the time allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager

import numpy
import pytest
import torch
import torch.nn.functional as F

from tpkernels.benchmarks import gate
from tpkernels.benchmarks.ceilings import Work
from tpkernels.benchmarks.gate import Truth
from tpkernels.benchmarks.harness import (
    WARM_UP,
    Case,
    Measurement,
    Rotation,
    Settings,
    Variant,
    measure,
    repetitions,
    run_case,
)
from tpkernels.benchmarks.timers import CpuTimer, CudaTimer, Sample, percentile

M, N, K = 48, 40, 32


class FakeTimer:
    """Calls, and says that each took what `us` says."""

    def __init__(self, us: Callable[[], float] = lambda: 100.0, host_us: float | None = None):
        self.us, self.host_us, self.waits = us, host_us, []

    def __call__(self, run, host_us=0.0):
        self.waits.append(host_us)
        run()
        return Sample(self.us(), self.host_us)

    def synchronize(self):
        pass


def make_inputs():
    torch.manual_seed(0)
    return torch.randn(M, K), torch.randn(N, K) / K**0.5


def eager(inputs):
    return (F.gelu(F.linear(*inputs)),)


def truths(inputs):
    x, weight = (tensor.double() for tensor in inputs)
    return [Truth("y", lambda y: y[:8], F.gelu(F.linear(x[:8], weight)))]


def case(*variants: Variant) -> Case:
    every = [Variant("eager", eager), *variants]
    return Case("op", "title", make_inputs, every, truths, Work(((M, N, K),), 2 * M * N))


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_percentiles_are_those_of_numpy(count):
    values = torch.randn(count).tolist()
    for percent in (0, 20, 50, 80, 100):
        expected = numpy.percentile(values, percent)
        assert percentile(values, percent) == pytest.approx(float(expected))


def test_variants_take_turns_and_each_begins_a_turn():
    order = []
    measurements = [
        Measurement(Variant(name, lambda inputs, name=name: order.append(name)))  # type: ignore[arg-type]
        for name in "abc"
    ]
    measure(measurements, Rotation(make_inputs(), 0), FakeTimer(), Settings(1, 6, 6))
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert turns == ["abc"] * WARM_UP + ["abc", "bca", "cab"] * 2
    assert [len(each.samples) for each in measurements] == [6, 6, 6]


def test_a_variant_is_entered_around_its_calls_and_outside_of_their_time():
    log = []

    @contextmanager
    def within():
        log.append("in")
        yield
        log.append("out")

    class Logging(FakeTimer):
        def __call__(self, run, host_us=0.0):
            log.append("clock")
            return super().__call__(run, host_us)

    variant = Variant("a", lambda inputs: log.append("run"), within)  # type: ignore[arg-type]
    measure([Measurement(variant)], Rotation(make_inputs(), 0), Logging(), Settings(1, 1, 1))
    assert log == ["in", "clock", "run", "out"] * (WARM_UP + 1)


def test_a_gpu_waits_for_as_long_as_the_host_needed_last_time():
    timer = FakeTimer(host_us=70.0)
    measure(
        [Measurement(Variant("a", eager))], Rotation(make_inputs(), 0), timer, Settings(1, 2, 2)
    )
    assert timer.waits == [0.0] + [70.0] * (WARM_UP + 1)


@pytest.mark.parametrize(
    ("seconds_a_turn", "expected"), [(10.0, 3), (0.1, 10), (1e-6, 40), (0.0, 40)]
)
def test_repetitions_follow_from_a_first_measurement(seconds_a_turn, expected):
    assert repetitions(seconds_a_turn, Settings(seconds=1.0, least=3, most=40)) == expected


def test_the_number_of_samples_is_what_the_first_measurement_allows():
    case_ = case(Variant("same", eager))
    settings = Settings(seconds=0.01, least=3, most=40)
    found = run_case(case_, FakeTimer(lambda: 500.0), settings)  # a turn takes 1 ms
    assert [len(each.samples) for each in found] == [10, 10]


def test_inputs_rotate_through_copies_that_exceed_the_cache():
    inputs = make_inputs()
    size = sum(4 * tensor.numel() for tensor in inputs)
    rotation = Rotation(inputs, 3 * size)
    assert len(rotation) == 4
    turns = [next(rotation) for _ in range(8)]
    assert len({each[0].data_ptr() for each in turns}) == 4
    assert all(torch.equal(each[0], inputs[0]) for each in turns)
    assert [each[0].data_ptr() for each in turns[:4]] == [each[0].data_ptr() for each in turns[4:]]
    assert len(Rotation(inputs, 0)) == 1


def test_copies_require_gradients_where_the_inputs_do():
    x, weight = make_inputs()
    rotation = Rotation((x, weight.requires_grad_()), 1 << 16)
    for copy in (next(rotation) for _ in range(len(rotation))):
        assert [(t.requires_grad, t.is_leaf) for t in copy] == [(False, True), (True, True)]


def test_percentiles_of_real_times_are_in_order():
    (found,) = run_case(case(), CpuTimer(), Settings(0.05, 5, 20))
    p20, p50, p80 = found.us
    assert 0 < p20 <= p50 <= p80
    assert found.error is None and found.host_us is None
    assert 0 < (found.relative_error or 0) < 1e-6


def off_by_one_percent(inputs):
    return (eager(inputs)[0] * 1.01,)


def one_wrong_element_beyond_the_truth(inputs):
    (y,) = eager(inputs)
    y[-1, -1] += 10
    return (y,)


def a_nan(inputs):
    (y,) = eager(inputs)
    y[20, 3] = float("nan")
    return (y,)


def other_dtype(inputs):
    return (eager(inputs)[0].double(),)


def other_shape(inputs):
    return (eager(inputs)[0][:-1],)


def nothing(inputs):
    return ()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (off_by_one_percent, r"y: relative error 1\.\d+e-02 is above"),
        (one_wrong_element_beyond_the_truth, "elements 0 to 1919 differ from eager's"),
        (a_nan, "elements 0 to 1919 differ from eager's by nan"),
        (other_dtype, r"torch.float64 instead of .* torch.float32"),
        (other_shape, r"\(47, 40\) .* instead of \(48, 40\)"),
        (nothing, "0 outputs instead of 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_variant_is_reported_and_never_timed(run, message):
    calls = []

    def counted(inputs):
        calls.append(1)
        return run(inputs)

    right, wrong, other = run_case(
        case(Variant("bad", counted), Variant("good", eager)), FakeTimer(), Settings(1, 2, 2)
    )
    assert (wrong.error or "").startswith("wrong: ")
    assert re.search(message, wrong.error or "")
    assert wrong.samples == [] and len(calls) == 1
    assert len(right.samples) == len(other.samples) == 2


def test_one_wrong_tile_of_a_large_result_shows():
    eager_y = torch.randn(2048, 1024).bfloat16()
    ours = eager_y.clone()
    ours[1500:1628, 500:628] = torch.randn(128, 128)
    truth = Truth("y", lambda y: y[:4], eager_y[:4].double())
    assert gate.check([eager_y], [eager_y], [truth]) == (0.0, None)
    distance, wrong = gate.check([ours], [eager_y], [truth])
    assert distance > 0.1 and "differ from eager's" in (wrong or "")


def test_what_raises_is_reported_and_the_others_are_timed():
    def broken(inputs):
        raise RuntimeError("no such kernel\nand a long explanation")

    found = run_case(
        case(Variant("broken", broken), Variant("absent", eager, cannot="needs CUDA")),
        FakeTimer(),
        Settings(1, 2, 2),
    )
    assert [each.error for each in found] == [
        None,
        "cannot run: RuntimeError: no such kernel",
        "cannot run: needs CUDA",
    ]
    assert [len(each.samples) for each in found] == [2, 0, 0]


def test_what_raises_only_later_is_no_longer_timed():
    calls = []

    def breaks(inputs):
        calls.append(1)
        if len(calls) == 5:  # the gate's, the warm-up's, the first sample's, and then
            raise RuntimeError("lost")
        return eager(inputs)

    right, broken = run_case(case(Variant("breaks", breaks)), FakeTimer(), Settings(1, 6, 6))
    assert broken.error == "cannot run: RuntimeError: lost" and broken.samples == []
    assert len(right.samples) == 6 and len(calls) == 5


def test_without_eager_nothing_is_timed():
    def broken(inputs):
        raise RuntimeError("out of order")

    every = [Variant("eager", broken), Variant("ours", eager)]
    found = run_case(
        Case("op", "t", make_inputs, every, truths, Work((), 0)), FakeTimer(), Settings()
    )
    assert [each.error for each in found] == [
        "cannot run: RuntimeError: out of order",
        "not measured: eager failed",
    ]
    assert not any(each.samples for each in found)


@pytest.mark.parametrize(("size", "most"), [(0, 4), (3, 4), (4, 4), (5, 4), (1000, 7)])
def test_sampled_indices_have_the_first_and_the_last(size, most):
    picked = gate.sample(size, most, torch.device("cpu")).tolist()
    assert len(picked) == len(set(picked)) == min(size, most)
    assert picked[:1] == ([0] if size else []) and picked[-1:] == ([size - 1] if size else [])


def test_the_gpu_timer_spins_first_so_that_the_host_is_ahead(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end):
            return 0.25  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(f"spin {cycles}"))
    found = CudaTimer(torch.device("cuda", 0))(lambda: log.append("run"), 100.0)
    assert log == ["spin 510000", "record", "run", "record", "synchronize"]
    assert found.us == 250.0 and found.host_us is not None and found.host_us > 0
