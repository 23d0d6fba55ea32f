"""Chunks that a stream sends while the GEMM that makes them goes on: whole when waited for.

One GPU: the collective's place is taken by a copy on the communication stream.
"""

# M rows, K summed, N columns

from __future__ import annotations

import pytest
import torch

from tpkernels.errors import ConfigError
from tpkernels.kernels import available, stream_wait
from tpkernels.overlap import signaled
from tpkernels.overlap.plan import OverlapPlan
from tpkernels.overlap.signal_plan import Targets, by_owners, by_rows

if available.triton_status().available:
    from tpkernels.kernels.gemm_act import gemm_signaled
    from tpkernels.kernels.tile_counters import TileCounters
    from tpkernels.overlap.signaled_cuda import COMMUNICATION_MULTIPROCESSORS as SPARE

pytestmark = pytest.mark.gpu
WAYS = ("driver", "kernel", "replayable")


def integers(*shape):
    return torch.randint(-1, 2, shape, device="cuda").bfloat16()


def plan_of(kind, chunks, m):
    if kind == "rows":
        return by_rows(OverlapPlan("signaled", chunks, "test").rows(m))
    rows, more = divmod(m, chunks)
    return by_owners([rows + (r < more) for r in range(chunks)], chunks // 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["rows", "owners"])
@pytest.mark.parametrize("sizes", [(4096, 2048, 512), (1000, 1600, 256), (130, 72, 40)], ids=str)
@pytest.mark.parametrize("chunks", [1, 4, 7])
def test_a_chunk_is_whole_when_its_wait_ends(sizes, chunks, kind, way):
    """TP-10, TP-48: call after call with other data, nothing reset in between."""
    m, n, k = sizes
    weight = integers(n, k)
    out, copy = (torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    counters, targets = TileCounters(out.device), Targets(64)
    communication = torch.cuda.Stream(priority=-1)
    plan = plan_of(kind, chunks, m)
    for _ in range(5):
        x = integers(m, k)
        out.fill_(torch.nan)
        communication.wait_stream(torch.cuda.current_stream())
        tile = gemm_signaled(
            x, weight, out, counters, plan.chunks, first_row=plan.first_row, spare_programs=SPARE
        )
        expected = plan.expected(n, tile)
        wanted = targets.advance(expected)
        with torch.cuda.stream(communication):
            for chunk in plan.order:
                if way == "driver":
                    stream_wait.wait_until(communication, counters.finished, chunk, wanted[chunk])
                elif way == "kernel":
                    counters.wait_until(chunk, wanted[chunk])
                else:
                    counters.wait_for_more(chunk, expected[chunk])
                start, end = plan.bounds[chunk]
                copy[start:end].copy_(out[start:end])
        torch.cuda.current_stream().wait_stream(communication)
        assert torch.equal(copy, x @ weight.t())


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_does_not_end_before_the_last_tile_TP_48(way):
    """Counted by hand: a stream that waits for one tile more is still waiting."""
    counters, side = TileCounters(torch.device("cuda")), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if way == "driver":
            stream_wait.wait_until(side, counters.finished, 2, 3)
        elif way == "kernel":
            counters.wait_until(2, 3)
        else:
            counters.wait_for_more(2, 3)
    for count in (1, 2, 3):
        assert not side.query()
        counters.finished[2] = count
        torch.cuda.current_stream().synchronize()
        if count < 3:
            torch.cuda._sleep(10_000_000)
            torch.cuda.current_stream().synchronize()
    side.synchronize()


def test_the_driver_s_comparison_wraps_around():
    counts = torch.full((2,), 2**31 - 3, dtype=torch.int32, device="cuda")
    counts[1] = -(2**31) + 1  # 4 counts on
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stream_wait.wait_until(side, counts, 1, 2**31 + 1)
    stream_wait.wait_until(side, counts, 1, 2**31 - 3)
    side.synchronize()
    stream_wait.wait_until(side, counts, 0, 2**31 + 1)
    assert not side.query()
    counts[0] = -(2**31) + 1
    side.synchronize()


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

    groups = {name: Ranks() for name in ("loopback", "another")}
    monkeypatch.setattr(signaled, "group_by_name", groups.get)
    monkeypatch.setattr(signaled, "all_reduce_async", _Sent)

    def run(x, weight, bias, out, chunks=4, group="loopback"):
        plan = OverlapPlan("signaled", chunks, "test")
        signaled.gemm_all_reduce_signaled(x, weight, bias, out, plan, group)
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


def test_two_groups_on_one_device_have_counts_of_their_own_TP_44(loopback):
    calls = []
    for index in range(6):
        x, weight, bias = inputs()
        out = torch.full((1536, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
        group = ("loopback", "another")[index % 2]
        calls.append((x, weight, bias, loopback(x, weight, bias, out, 2 + index, group)))
    lanes = [signaled._lanes_of(group) for group in ("loopback", "another")]
    assert lanes[0] is not lanes[1] and all(len(each) == 1 for each in lanes)
    for x, weight, bias, out in calls:
        assert torch.equal(out, expected_of(x, weight, bias))


class _Ring:
    """In the place of the messages of 3 ranks: what is sent to one comes from another."""

    size, rank = 3, 1

    def __init__(self, *_):
        pass

    def start(self, sends, receives, like, operation, whole=0):
        ((sent,),), ((come,),) = sends.values(), receives.values()
        come.copy_(sent)
        return _Sent(come.new_empty(0), "")

    def abandon(self, *_):
        pass


def test_a_reduce_scatter_on_streams_of_its_own_TP_10(loopback, monkeypatch):
    """Each rank's rows are whole as they are sent; own rows are the last."""
    monkeypatch.setattr(signaled, "messages_of", _Ring)
    for rows in (512, 67, 512):
        x, weight, bias = inputs(3 * rows)
        out = torch.full((rows, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
        signaled.gemm_reduce_scatter_signaled(x, weight, bias, out, [rows] * 3, "loopback")
        whole = x.float() @ weight.float().t()
        expected = sum(whole.split(rows)) + bias.float()
        assert torch.equal(out, expected.bfloat16())


# --- CUDA graphs ------------------------------------------------------------------------------


def static(m=1536):
    return (*inputs(m), torch.empty(m, 1024, device="cuda", dtype=torch.bfloat16))


def captured(loopback, x, weight, bias, out, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        loopback(x, weight, bias, out)
    return graph


def warmed_up(loopback, *tensors):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loopback(*tensors)
    torch.cuda.current_stream().wait_stream(side)


def replayed(loopback, graph, x, weight, bias, out):
    """With other inputs in place: the graph's result, and then an eager call's."""
    x.copy_(integers(*x.shape))
    for run in (graph.replay, lambda: loopback(x, weight, bias, out)):
        out.fill_(torch.nan)
        run()
        assert torch.equal(out, expected_of(x, weight, bias))


def test_captured_and_replayed_with_other_inputs_TP_38(loopback):
    tensors = static()
    warmed_up(loopback, *tensors)
    graph = captured(loopback, *tensors)
    for _ in range(3):
        replayed(loopback, graph, *tensors)


def test_two_graphs_replayed_in_turns_with_eager_calls_between_TP_38(loopback):
    first, second = static(), static(100)
    warmed_up(loopback, *first)
    warmed_up(loopback, *second)
    graphs = [(captured(loopback, *tensors), tensors) for tensors in (first, second)]
    for graph, tensors in (*graphs, graphs[0], *reversed(graphs)):
        replayed(loopback, graph, *tensors)


def test_a_graph_is_replayed_before_the_next_one_is_captured_TP_38(loopback):
    first, second = static(), static()
    warmed_up(loopback, *first)
    graph = captured(loopback, *first)
    replayed(loopback, graph, *first)
    other = captured(loopback, *second, pool=graph.pool())
    replayed(loopback, other, *second)
    replayed(loopback, graph, *first)


def test_more_rows_inside_a_capture_than_before_TP_37(loopback):
    """Counters are of one size for all: nothing grows while a graph is captured."""
    warmed_up(loopback, *static(256))
    tensors = static(3072)
    replayed(loopback, captured(loopback, *tensors), *tensors)


def test_the_first_call_inside_a_capture_is_refused_by_name_TP_37(loopback):
    tensors = static()
    torch.cuda.synchronize()
    with pytest.raises(ConfigError, match="Fix: call the model once before it is captured"):
        captured(loopback, *tensors)
    torch.cuda.synchronize()
    assert torch.equal(loopback(*tensors), expected_of(*tensors[:3]))


def test_a_warm_up_gives_what_the_graph_gives_TP_39(loopback):
    """The same op in warm-up, capture and replay: no shortcut that a compiler could rely on."""
    tensors = static()
    warmed_up(loopback, *tensors)
    expected = tensors[3].clone()
    graph = captured(loopback, *tensors)
    tensors[3].fill_(torch.nan)
    graph.replay()
    assert torch.equal(tensors[3], expected)


def test_inputs_that_are_late_on_a_side_stream_are_waited_for_TP_49(loopback):
    x, weight, bias, out = static()
    loopback(x, weight, bias, out)
    fresh = integers(*x.shape)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        x.copy_(fresh)
        loopback(x, weight, bias, out)
    side.synchronize()
    assert torch.equal(out, expected_of(fresh, weight, bias))


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
