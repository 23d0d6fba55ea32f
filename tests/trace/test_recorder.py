"""The recorder: nesting by thread, ends anywhere, devices' events, and graphs left alone."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tpkernels import instrument
from tpkernels.trace import recorder as recorder_module
from tpkernels.trace.device_time import DeviceTime
from tpkernels.trace.recorder import IntervalRecorder

X = torch.ones(4)


@pytest.fixture
def recorder():
    """One that records, on a clock that ticks at each reading."""
    made = IntervalRecorder(itertools.count(100).__next__)
    instrument.record_to(made)
    yield made
    instrument.record_to(None)


def test_intervals_belong_to_the_operation_that_is_open(recorder):
    with instrument.operation("outer", "layer.0", "g", X) as op:
        op.plan, op.implementation = "off", "cpu"
        with instrument.computing("gemm", X):
            pass
        with instrument.operation("inner", "", "g", X), instrument.exchanging("sum", "g", X):
            pass
    with instrument.waiting("sum", X):
        pass
    found = recorder.intervals()
    assert [(each.kind, each.name, each.operation) for each in found] == [
        ("operation", "outer", -1),
        ("compute", "gemm", 0),
        ("operation", "inner", 0),
        ("communication", "sum", 2),
        ("exposed", "sum", 2),
        ("exposed", "sum", -1),
    ]
    assert found[0].details == {
        "layer": "layer.0",
        "group": "g",
        "plan": "off",
        "implementation": "cpu",
    }
    assert found[3].details == {"group": "g", "bytes": 16, "sent_bytes": -1}
    assert [(each.begin, each.end) for each in found[:2]] == [(101, 110), (102, 103)]


def test_an_error_is_noted_and_propagates(recorder):
    with pytest.raises(KeyError), instrument.operation("x", "", "g", X):
        raise KeyError("a")
    (found,) = recorder.intervals()
    assert found.details["error"] == "KeyError"


def test_threads_have_operations_of_their_own(recorder):
    sent = []

    def other():
        with instrument.operation("other", "", "g", X):
            sent.append(instrument.communication("sum", "g", X))

    with instrument.operation("mine", "", "g", X):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        instrument.arrived(sent[0])  # begun there, ended here
        instrument.arrived(sent[0])
        with instrument.computing("gemm", X):
            pass
    names = {each.name: each for each in recorder.intervals()}
    assert names["sum"].operation == 1 and names["gemm"].operation == 0
    assert names["mine"].lane != names["other"].lane
    assert "open" not in names["sum"].details


def test_many_threads_lose_nothing(recorder):
    def work():
        for _ in range(500):
            with instrument.operation("x", "", "g", X), instrument.computing("gemm", X):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = recorder.intervals()
    assert len(found) == 4000
    for each in found:
        if each.kind == "compute":
            owner = found[each.operation]
            assert owner.lane == each.lane and owner.begin < each.begin < each.end < owner.end


def test_what_never_ended_ends_with_the_recording(recorder):
    instrument.communication("sum", "g", X)
    (found,) = recorder.intervals()
    assert found.details["open"] is True and found.end > found.begin


def test_after_recording_has_ended_ends_are_harmless(recorder):
    with instrument.computing("gemm", X):
        instrument.record_to(None)
    assert "open" not in recorder.intervals()[0].details


def test_ends_go_to_the_recorder_that_was_told_of_the_begin(recorder):
    later = IntervalRecorder(itertools.count().__next__)
    with instrument.operation("x", "", "g", X), instrument.computing("gemm", X):
        sent = instrument.communication("sum", "g", X)
        instrument.record_to(later)
        instrument.communication("later", "g", X)
    instrument.arrived(sent)
    assert [each.details.get("open") for each in recorder.intervals()] == [None] * 3
    assert [each.details.get("open") for each in later.intervals()] == [True]


def test_beyond_the_most_intervals_are_only_counted(recorder, monkeypatch):
    monkeypatch.setattr(recorder_module, "MOST_INTERVALS", 2)
    monkeypatch.setattr(recorder_module, "_BLOCK", [None])
    for _ in range(5):
        with instrument.computing("gemm", X):
            pass
    assert len(recorder.intervals()) == 2 and recorder.left_out == 3


def test_traced_tensors_are_not_recorded(recorder):
    with FakeTensorMode():
        traced = torch.ones(4)
    with instrument.operation("x", "", "g", traced), instrument.computing("gemm", traced):
        pass
    assert recorder.intervals() == []


class FakeCuda:
    """A device whose clock stands at 5 s when the host's shows `now`, and streams by number."""

    def __init__(self) -> None:
        self.ms, self.stream, self.capturing, self.synchronized = 5000.0, 1, False, 0
        self.reached = float("inf")
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.ms = fake.ms

            def synchronize(self) -> None:
                pass

            def query(self) -> bool:
                return self.ms <= fake.reached

            def elapsed_time(self, other: Event) -> float:
                return other.ms - self.ms

        self.Event = Event

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: object) -> object:
        return type("Stream", (), {"cuda_stream": self.stream})

    def synchronize(self, device: object) -> None:
        self.synchronized += 1


def test_marks_of_a_device_are_on_the_hosts_clock():
    cuda = FakeCuda()
    times = DeviceTime(lambda: 1_000_000, cuda)
    first = times.mark(torch.device("cuda", 0))
    cuda.ms, cuda.stream = 5002.5, 2
    second = times.mark(torch.device("cuda", 0))
    cuda.capturing = True
    assert times.mark(torch.device("cuda", 0)) is None
    assert cuda.synchronized == 1
    times.resolve(wait=True)
    assert (first.ns, second.ns) == (1_000_000, 3_500_000)
    assert first.lane != second.lane
    assert cuda.synchronized == 2


def test_marks_that_a_device_has_not_reached_are_left_out_in_an_emergency():
    cuda = FakeCuda()
    times = DeviceTime(lambda: 0, cuda)
    first = times.mark(torch.device("cuda", 0))
    cuda.ms, cuda.reached = 5001.0, 5000.5
    second = times.mark(torch.device("cuda", 0))
    times.resolve(wait=False)
    assert (first.ns, second.ns, cuda.synchronized) == (0, None, 1)


@pytest.mark.gpu
def test_intervals_on_a_gpu_last_as_long_as_its_work():
    x = torch.ones(1024, 1024, device="cuda")
    torch.mm(x, x)
    recorder = IntervalRecorder()
    instrument.record_to(recorder)
    try:
        with instrument.computing("sleep", x):
            torch.cuda._sleep(50_000_000)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), instrument.computing("captured", x):
            y = torch.mm(x, x)
    finally:
        instrument.record_to(None)
    graph.replay()
    (found,) = recorder.intervals()
    assert found.name == "sleep" and found.end - found.begin > 5_000_000
    assert y.shape == x.shape
