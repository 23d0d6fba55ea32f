"""Chunks that a stream sends while the GEMM that makes them goes on: whole when waited for.

One GPU: the collective's place is taken by a copy on the communication stream.
"""

# M rows, K summed, N columns

from __future__ import annotations

import pytest
import torch

from tpkernels.kernels import available
from tpkernels.overlap import signaled
from tpkernels.overlap.plan import OverlapPlan

if available.triton_status().available:
    from tpkernels.kernels.gemm_act import gemm_signaled
    from tpkernels.kernels.tile_counters import TileCounters

pytestmark = pytest.mark.gpu
SPARE = signaled.COMMUNICATION_MULTIPROCESSORS


def integers(*shape):
    return torch.randint(-1, 2, shape, device="cuda").bfloat16()


@pytest.mark.parametrize("sizes", [(4096, 2048, 512), (1000, 1600, 256), (130, 72, 40)], ids=str)
@pytest.mark.parametrize("chunks", [1, 4, 7])
def test_a_chunk_is_whole_when_its_wait_ends(sizes, chunks):
    """TP-10, TP-48: call after call with other data, nothing reset in between."""
    m, n, k = sizes
    weight = integers(n, k)
    out, copy = (torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    counters = TileCounters(out.device)
    communication = torch.cuda.Stream(priority=-1)
    bounds = OverlapPlan("signaled", chunks, "test").rows(m)
    for _ in range(5):
        x = integers(m, k)
        out.fill_(torch.nan)
        communication.wait_stream(torch.cuda.current_stream())
        expected = gemm_signaled(x, weight, out, counters, bounds[0][1], spare_programs=SPARE)
        with torch.cuda.stream(communication):
            for index, (start, end) in enumerate(bounds):
                counters.wait(index, expected[index])
                copy[start:end].copy_(out[start:end])
        torch.cuda.current_stream().wait_stream(communication)
        assert torch.equal(copy, x @ weight.t())


class _Sent:
    """A collective of a group of one: doubles its rows, on the stream it was started on."""

    def __init__(self, rows, _):
        rows.mul_(2)
        self._event = torch.cuda.current_stream().record_event()

    def wait(self):
        torch.cuda.current_stream().wait_event(self._event)

    drain = wait


@pytest.fixture
def loopback(monkeypatch):
    """The strategy with a collective on this GPU alone; gives it as a function of (x, w, b)."""

    class Ranks:  # what the lanes are kept by
        pass

    ranks = Ranks()
    monkeypatch.setattr(signaled, "group_by_name", lambda _: ranks)
    monkeypatch.setattr(signaled, "all_reduce_async", _Sent)

    def run(x, weight, bias, out, chunks=4):
        plan = OverlapPlan("signaled", chunks, "test")
        signaled.gemm_all_reduce_signaled(x, weight, bias, out, plan, "loopback")
        return out

    return run


def inputs(m=1536, n=1024, k=512):
    return integers(m, k), integers(n, k), integers(n)


def expected_of(x, weight, bias):
    return (x @ weight.t()) * 2 + bias


def test_the_strategy_on_streams_of_its_own(loopback):
    for m in (1536, 100, 1536):
        x, weight, bias = inputs(m)
        out = torch.full((m, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(loopback(x, weight, bias, out), expected_of(x, weight, bias))


def test_calls_on_several_streams_do_not_take_each_other_s_counts(loopback):
    """TP-44, TP-49."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    calls = []
    torch.cuda.synchronize()
    for index in range(9):
        with torch.cuda.stream(streams[index % 3]):
            x, weight, bias = inputs()
            out = torch.full((1536, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
            calls.append((x, weight, bias, loopback(x, weight, bias, out)))
    torch.cuda.synchronize()
    for x, weight, bias, out in calls:
        assert torch.equal(out, expected_of(x, weight, bias))


def test_captured_and_replayed_with_other_inputs_TP_38(loopback):
    x, weight, bias = inputs()
    out = torch.empty(1536, 1024, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loopback(x, weight, bias, out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loopback(x, weight, bias, out)
    for _ in range(3):
        x.copy_(integers(*x.shape))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected_of(x, weight, bias))
        assert torch.equal(loopback(x, weight, bias, out), expected_of(x, weight, bias))


def test_an_error_between_chunks_leaves_no_counts(loopback, monkeypatch):
    x, weight, bias = inputs()
    out = torch.empty(1536, 1024, device="cuda", dtype=torch.bfloat16)
    sent = []

    def fails(rows, name):
        if sent:
            raise MemoryError("no room")
        sent.append(_Sent(rows, name))
        return sent[0]

    with monkeypatch.context() as patch:
        patch.setattr(signaled, "all_reduce_async", fails)
        with pytest.raises(MemoryError):
            loopback(x, weight, bias, out)
    assert torch.equal(loopback(x, weight, bias, out), expected_of(x, weight, bias))
