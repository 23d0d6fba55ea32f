"""What is counted, on recordings made by hand: exact."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.recordings import (
    compute,
    exposed,
    operation,
    recording,
    sent,
    training_step,
)
from tpkernels.trace.clock import SyncPoint
from tpkernels.trace.summary import calls_of, definitions, phase_of, schema, summarize
from tpkernels.trace.timeline import aligned


def summary_of(*recordings, world_size=None):
    found = summarize(aligned(list(recordings)), world_size or len(recordings))
    jsonschema.validate(found, schema())
    return found


def only_call(*intervals):
    (timeline,) = aligned([recording(list(intervals))])
    (call,) = calls_of(timeline)
    return call


def test_two_chunks_of_which_one_is_hidden():
    """compute [0,100)[100,200), comm [100,180) and [200,260), waits [200,260), ends at 270."""
    call = only_call(
        operation("gemm_all_reduce", 0, 270, layer="mlp.down", plan="chunked x2"),
        compute(0, 100, 0),
        sent(100, 180, 0),
        compute(100, 200, 0),
        sent(200, 260, 0, size=40),
        exposed(200, 260, 0),
    )
    assert (call.layer, call.phase, call.plan) == ("mlp.down", "forward", "chunked x2")
    assert (call.wall, call.compute, call.communication, call.exposed) == (270, 200, 140, 60)
    assert call.bytes == 140
    assert call.overlap == (200 + 140 - 270) / 140


@pytest.mark.parametrize(
    ("end", "overlap"), [(150, 0.0), (100, 1.0), (200, -1.0)], ids=["none", "whole", "worse"]
)
def test_overlap_is_the_share_of_the_shorter_that_is_hidden(end, overlap):
    call = only_call(operation("x", 0, end), compute(0, 100, 0), sent(0, 50, 0))
    assert call.overlap == overlap


def test_what_has_no_overlap_says_so():
    assert only_call(operation("x", 0, 9), compute(0, 9, 0)).overlap is None
    failed = operation("x", 0, 9, error="ValueError")
    assert only_call(failed, compute(0, 5, 0), sent(0, 5, 0)).overlap is None


def test_overlapping_communications_count_once_and_bytes_twice():
    call = only_call(operation("x", 0, 99), sent(10, 50, 0, 7), sent(30, 70, 0, 7, sent_bytes=3))
    assert call.communication == 60
    assert call.bytes == 10  # what is known to be sent, else the tensor


def test_communication_after_the_end_of_its_operation_is_its_own():
    assert only_call(operation("zero.gather", 0, 10), sent(5, 400, 0)).communication == 395


def test_a_wait_inside_a_gemm_is_no_compute_and_a_gemm_inside_a_wait_no_wait():
    """compute [0,100) with a wait [40,70) in it; wait [100,200) with compute [120,150) in it."""
    call = only_call(
        operation("x", 0, 200),
        compute(0, 100, 0),
        exposed(40, 70, 0),
        exposed(100, 200, 0),
        compute(120, 150, 0),
    )
    assert call.compute == 70 + 30
    assert call.exposed == 30 + 70


def test_a_wait_while_another_thread_computes_is_not_exposed():
    (timeline,) = aligned(
        [recording([operation("x", 0, 100), exposed(0, 100, 0), compute(30, 90, lane=1)])]
    )
    call = calls_of(timeline)[0]
    assert call.exposed == 40
    rank = summary_of(timeline.recording)["ranks"][0]
    assert (rank["exposed_ns"], rank["compute_ns"]) == (40, 60)


def test_an_operation_inside_another_is_part_of_it():
    call = only_call(
        operation("mlp.backward", 0, 100, layer="mlp"),
        compute(0, 20, 0),
        operation("column_backward", 20, 100, of=0, plan="chunked x4"),
        compute(20, 60, 2),
        sent(60, 100, 2),
    )
    assert (call.operation, call.phase, call.plan) == ("mlp.backward", "backward", "chunked x4")
    assert (call.compute, call.communication) == (60, 40)


def test_what_runs_outside_of_any_operation_is_a_row_of_its_name():
    found = summary_of(recording([sent(0, 10), exposed(0, 10), sent(20, 25), exposed(20, 25)]))
    (row,) = found["rows"]
    assert (row["layer"], row["phase"], row["calls"]) == ("all_reduce", "other", 2)
    assert row["communication_ns"] == {"median": None, "total": 15}
    assert row["exposed_ns"]["total"] == 15 and row["overlap"]["median"] is None


def test_rows_are_medians_and_totals_over_calls_and_ranks():
    def rank(number, *lengths):
        found = []
        for length in lengths:
            at = 1000 * len(found)
            found += [
                operation("mlp", at, at + length, layer="mlp"),
                compute(at, at + length, len(found)),
            ]
        return recording(found, number, 2, clock=[SyncPoint(0, 0, 1)] * number)

    found = summary_of(rank(0, 10, 20), rank(1, 60))
    assert found["rows"][0]["calls"] == 3
    assert found["rows"][0]["wall_ns"] == {"median": 20, "total": 90}
    assert [each["rows"][0]["wall_ns"]["total"] for each in found["ranks"]] == [30, 60]
    assert found["ranks"][1]["clock"] == {"offset_ns": 0, "drift_ppm": 0.0, "bound_ns": 1}


def test_hidden_is_communication_beside_compute():
    (rank,) = summary_of(recording([compute(0, 50), sent(20, 80), exposed(50, 80)]))["ranks"]
    assert (rank["hidden_ns"], rank["exposed_ns"], rank["communication_ns"]) == (30, 30, 60)


def test_a_missing_rank_and_one_that_failed_are_told():
    found = summary_of(
        recording([], rank=1, world_size=3, error="ValueError: x", left_out=2), world_size=3
    )
    assert found["missing_ranks"] == [0, 2]
    assert found["ranks"][0]["error"] == "ValueError: x"
    assert found["ranks"][0]["clock"]["bound_ns"] is None


def test_unended_intervals_count_as_errors():
    (row,) = summary_of(recording([operation("x", 0, 5, open=True)]))["rows"]
    assert row["errors"] == 1


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_summaries_of_steps_keep_to_the_schema(world_size):
    found = summary_of(*[training_step(rank, world_size, 5) for rank in range(world_size)])
    for rank in found["ranks"]:
        assert rank["exposed_ns"] + rank["compute_ns"] <= rank["wall_ns"]
        assert rank["hidden_ns"] + rank["exposed_ns"] == rank["communication_ns"]
        assert sum(row["exposed_ns"]["total"] for row in rank["rows"]) == rank["exposed_ns"]


def test_the_schema_is_a_schema_and_says_what_numbers_mean():
    jsonschema.Draft202012Validator.check_schema(schema())
    said = definitions()
    assert {"row.overlap", "row.exposed", "rank.exposed", "row.communication"} <= set(said)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "tpkernels.trace.summary/1"}, schema())


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("mlp", "forward"),
        ("mlp.backward", "backward"),
        ("column_backward", "backward"),
        ("zero.gather", "other"),
    ],
)
def test_phases(name, phase):
    assert phase_of(name) == phase


times = st.integers(0, 40)
intervals = st.lists(
    st.tuples(st.sampled_from(["compute", "exposed"]), times, times, st.integers(0, 1)), max_size=8
)


@given(intervals)
def test_exposed_and_compute_are_what_each_moment_says(found):
    """In each moment a lane does what the innermost of its intervals says, if they nest."""
    made = []
    for kind, a, b, lane in found:
        begin, end = min(a, b), max(a, b)
        inside = [each for each in made if each.lane == lane]
        nests = all(
            end <= each.begin
            or each.end <= begin
            or (each.begin < begin and end < each.end)
            or (begin < each.begin and each.end < end)
            for each in inside
        )
        if nests and begin < end:
            made.append((compute if kind == "compute" else exposed)(begin, end, lane=lane))
    made.sort(key=lambda each: each.begin)
    computed, waited = 0, 0
    for at in range(40):
        does = set()
        for lane in (0, 1):
            open_ = [each for each in made if each.lane == lane and each.begin <= at < each.end]
            if open_:
                does.add(min(open_, key=lambda each: each.end - each.begin).kind)
        computed += "compute" in does
        waited += does == {"exposed"}
    (rank,) = summarize(aligned([recording(made, ended=40)]), 1)["ranks"]
    assert (rank["compute_ns"], rank["exposed_ns"]) == (computed, waited)
