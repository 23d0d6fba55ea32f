"""The GPU's side of ``signaled`` without a GPU: which waits, on which counts, for which targets.

Streams are lists of what was put on them; the counts are what the GEMMs of a real run would add.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.interpreted import needs_interpreter
from tpkernels.errors import ConfigError, TPKernelsError
from tpkernels.kernels import available, stream_wait
from tpkernels.overlap.signal_plan import by_rows, reached

if available.triton_status().available:
    from tpkernels.overlap import signaled_cuda

pytestmark = needs_interpreter
BOUNDS = [(0, 4), (4, 8), (8, 10)]
TILE = (2, 8)  # of 16 columns: 4, 4 and 2 tiles


class _Stream:
    def __init__(self, *_, **__):
        self.done = []
        self.cuda_stream = id(self) % 2**31

    def wait_stream(self, other):
        self.done.append(("after", other))

    def wait_event(self, event):
        self.done.append(("event", event))

    def record_event(self):
        return SimpleNamespace(of=self)


class _Counters:
    """In the place of ``TileCounters``: counts, and the waits that a stream was given."""

    def __init__(self, device, capacity):
        self.finished = torch.zeros(capacity, dtype=torch.int32)
        self.consumed = [0] * capacity
        self.loaded, self.waits = 0, []

    def load(self):
        self.loaded += 1

    def wait_until(self, chunk, target):
        self.waits.append(("until", chunk, target))

    def wait_for_more(self, chunk, expected):
        self.waits.append(("more", chunk, expected))


class _Machine:
    """What there is of CUDA: a current stream, whether it is captured, a driver that waits."""

    def __init__(self, patch, supported=True):
        self.current, self.capturing, self.driver_waits = _Stream(), False, []
        cuda = SimpleNamespace(
            Stream=_Stream,
            stream=lambda _: contextlib.nullcontext(),
            current_stream=lambda: self.current,
            is_current_stream_capturing=lambda: self.capturing,
        )
        patch.setattr(signaled_cuda, "torch", SimpleNamespace(cuda=cuda))
        patch.setattr(signaled_cuda, "TileCounters", _Counters)
        patch.setattr(stream_wait, "is_supported", lambda *_: supported)
        patch.setattr(
            stream_wait,
            "wait_until",
            lambda stream, counts, chunk, target: self.driver_waits.append((chunk, target)),
        )


@pytest.fixture
def machine(monkeypatch):
    return _Machine(monkeypatch)


def lane():
    return signaled_cuda.CudaLane("cuda", 8)


class _Sent:
    def __init__(self):
        self.drained = False

    def wait(self):
        pass

    def drain(self):
        self.drained = True


def call(one, bounds=BOUNDS, send=lambda _: _Sent()):
    """A GEMM that counts at once; the counters it was given, and what was sent."""
    plan, used = by_rows(bounds), []

    def gemm(counters):
        used.append(counters)
        for chunk, tiles in enumerate(plan.expected(16, TILE)):
            counters.finished[chunk] += tiles
        return TILE

    sent = one.run(plan, 16, gemm, send)
    return used[0], sent


def test_the_driver_waits_for_targets_that_grow_TP_10(machine):
    one = lane()
    call(one)
    call(one, bounds=[(0, 6)])
    call(one)
    assert machine.driver_waits == [
        *((0, 4), (1, 4), (2, 2)),
        (0, 10),  # 6 rows are 3 tiles down and 2 across
        *((0, 14), (1, 8), (2, 4)),
    ]


def test_without_the_driver_a_kernel_waits_for_the_same_targets(monkeypatch):
    machine = _Machine(monkeypatch, supported=False)
    one = lane()
    call(one)
    counters, _ = call(one)
    assert not machine.driver_waits
    assert counters.waits[3:] == [("until", 0, 8), ("until", 1, 8), ("until", 2, 4)]


def test_a_captured_call_has_counts_of_its_own_and_no_absolute_target_TP_38(machine):
    """Replays count without the host knowing: eager calls beside them must not see those counts."""
    one = lane()
    eager, _ = call(one)
    machine.capturing = True
    first, _ = call(one)
    second, _ = call(one)
    assert first is second is not eager
    assert first.waits == [("more", 0, 4), ("more", 1, 4), ("more", 2, 2)] * 2
    assert first.loaded == 1  # nothing is compiled while it is captured
    first.finished += 40  # replays
    machine.capturing = False
    machine.driver_waits.clear()
    again, _ = call(one)
    assert again is eager and machine.driver_waits == [(0, 8), (1, 8), (2, 4)]
    assert all(reached(int(again.finished[c]), target) for c, target in machine.driver_waits)


def test_the_first_call_inside_a_capture_names_the_fix_TP_37(machine):
    machine.capturing = True
    with pytest.raises(ConfigError, match=r"CUDA graph would own\. Fix: call the model once"):
        lane()


def test_more_rows_inside_a_capture_need_no_new_counters_TP_37(machine):
    one = lane()
    call(one, bounds=[(0, 4)])
    machine.capturing = True
    counters, sent = call(one, bounds=[(4 * i, 4 * i + 4) for i in range(8)])
    assert len(sent) == 8 and [wait[2] for wait in counters.waits] == [4] * 8


def test_another_stream_s_gemm_waits_until_the_last_one_has_counted_TP_49(machine):
    one = lane()
    first = machine.current
    call(one)
    machine.current = _Stream()
    call(one)
    (event,) = [what for kind, what in machine.current.done if kind == "event"]
    assert event.of is first
    assert ("after", machine.current) in one._stream.done  # it computes where it was called


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_after_an_error_between_chunks_the_next_targets_are_true(machine, failing, capturing):
    one, sent = lane(), []
    call(one)
    machine.capturing = capturing

    def send(chunk):
        if chunk == failing:
            raise MemoryError("no room")
        sent.append(_Sent())
        return sent[-1]

    with pytest.raises(MemoryError):
        call(one, send=send)
    assert len(sent) == failing and all(each.drained for each in sent)
    waits = one._captured.waits if capturing else machine.driver_waits[3:]
    assert len(waits) == 3  # a graph that is replayed all the same has waited for every chunk
    machine.driver_waits.clear()
    machine.capturing = False
    counters, _ = call(one)
    for chunk, target in machine.driver_waits:
        assert int(counters.finished[chunk]) == target


def test_a_gemm_that_is_not_launched_leaves_the_targets(machine):
    one = lane()

    def refuses(counters):
        raise ConfigError("no such tensors")

    with pytest.raises(ConfigError):
        one.run(by_rows(BOUNDS), 16, refuses, lambda _: _Sent())
    counters, _ = call(one)
    assert [int(counters.finished[c]) for c, _ in machine.driver_waits] == [4, 4, 2]
    assert machine.driver_waits == [(0, 4), (1, 4), (2, 2)]


# --- the driver's call ------------------------------------------------------------------------


def test_the_driver_is_asked_for_an_address_and_a_target_of_32_bits(monkeypatch):
    calls, counts, stream = [], torch.zeros(4, dtype=torch.int32), _Stream()

    def driver(*arguments):
        calls.append(arguments)
        return 0 if len(calls) < 3 else 801  # CUDA_ERROR_NOT_SUPPORTED

    monkeypatch.setattr(stream_wait, "_driver", lambda: driver)
    assert stream_wait.is_supported(stream, counts[:1])
    stream_wait.wait_until(stream, counts, 3, 2**32 + 5)
    address = counts.data_ptr()
    assert calls == [(stream.cuda_stream, address, 0, 0), (stream.cuda_stream, address + 12, 5, 0)]
    with pytest.raises(TPKernelsError, match=r"cuStreamWaitValue32 .* CUresult 801"):
        stream_wait.wait_until(stream, counts, 0, 1)
    assert not stream_wait.is_supported(stream, counts[:1])


def test_a_machine_without_the_driver_is_not_asked(monkeypatch):
    monkeypatch.setattr(stream_wait, "_driver", lambda: None)
    assert not stream_wait.is_supported(_Stream(), torch.zeros(1))
