"""What the overlap benchmark's rows say, and the report made of them."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.benchmarks.overlap_samples import CHUNKED, made, timed
from tpkernels.benchmarks import overlap_report, overlap_rows, row_files
from tpkernels.benchmarks.overlap_block import BLOCK
from tpkernels.benchmarks.overlap_rows import OverlapRow, Result
from tpkernels.benchmarks.overlap_trace import Traced, traced_of
from tpkernels.benchmarks.overlap_variants import COMM, DTENSOR, NAMES, OFF, OURS, PARTS


def test_a_row_is_judged_by_its_parts():
    rows = {row.implementation: row for row in made()}
    assert list(rows) == [*PARTS, *NAMES, CHUNKED]
    ours, off, comm = rows[OURS], rows[OFF], rows[COMM]
    assert (ours.us, ours.gemm_us, ours.comm_us, ours.wire_us) == (120, 100, 70, 64)
    assert ours.limit_us == 100 and ours.percent_of_limit == pytest.approx(
        100 / 120 * 100, rel=1e-4
    )
    assert ours.effective_overlap == pytest.approx((100 + 70 - 120) / 70, rel=1e-4)
    assert off.effective_overlap == pytest.approx(-10 / 70, rel=1e-4)
    assert ours.comparable and ours.link == "1 Gbit/s" and ours.pinned
    assert ours.ratio_to_off == pytest.approx(2 / 3, rel=1e-4)
    assert (ours.ratio_to_off_low, ours.ratio_to_off_high) == (0.65, 0.7)  # 117 and 126 of 180
    assert ours.dtensor_ratio == 2 and rows[DTENSOR].dtensor_ratio is None
    assert off.ratio_to_off is None and comm.effective_overlap is None and comm.us == 80
    wrong = rows[CHUNKED]
    assert wrong.us is None and wrong.repetitions == 0 and wrong.error.startswith("wrong")


def test_on_one_host_the_limit_is_the_arithmetic():
    ours = next(row for row in made(gbits=None) if row.implementation == OURS)
    assert (ours.link, ours.wire_us, ours.limit_us, ours.comparable) == (
        "one host",
        None,
        100,
        False,
    )


def test_the_report_shows_each_figure_and_what_it_is_judged_by():
    rows = [*made(), *made(gbits=4.0)]
    text = overlap_report.text(rows)
    assert "### Overlap of row_forward, float32, 2 ranks, gloo, ours over lanes" in text
    cells = (
        "0.10 | 0.08 | 0.07 | 0.18 | 0.24 | 0.12 (0.12 to 0.12) | 0.10 | 83 | -14% | -100% | 71%"
    )
    assert f"| 10x40x200 | 1 Gbit/s | 0.64 * | {cells} | 0.667 (0.650 to 0.700) | 2.00 |" in text
    assert "| 10x40x200 | 4 Gbit/s | 0.16 |" in text
    assert (
        "- effective overlap where wire is 0.5 to 1 of compute, ours: median 71% over 1 sizes "
        "(10x40x200: 71%; 1 links)"
    ) in text
    assert "- ours / off is at most 0.667 (0.650 to 0.700): 10x40x200, 1 Gbit/s" in text
    assert "- plan: gemm_all_reduce: chunked x4 (measured over lanes)" in text
    assert "- chunks=2, 10x40x200, not timed: wrong: y: relative error 1.0e+00" in text


def test_the_figure_of_merit_is_the_median_of_each_sizes_median():
    def ours(m: int, ratio: float, us: float) -> list[OverlapRow]:
        times = [*(timed(name, *[100] * 6) for name in PARTS), timed(OURS, *[us] * 6)]
        results = {OURS: Result(OURS, None, 0.0, None, None)}
        shape = {"m": m, "k": 1, "n": 1}
        return made(shape=shape, wire_ratio=ratio, timed=times, results=results)

    rows = [*ours(1, 0.5, 110), *ours(1, 0.7, 130), *ours(1, 0.9, 150), *ours(2, 0.5, 190)]
    assert "ours: median 40% over 2 sizes (1x1x1: 70%, 2x1x1: 10%; 4 links)" in (
        overlap_report.text(rows)
    )
    slow = [replace(row, comparable=False) for row in rows]
    assert "nothing was measured there" in overlap_report.text(slow)


def test_what_a_trace_says_is_compared_with_the_clock():
    traced = {OFF: Traced(200.0, 100.0), OURS: Traced(150.0, 52.0)}
    text = overlap_report.text(made(traced=traced))
    assert (
        "- trace, 10x40x200, 1 Gbit/s: off waits 0.05 ms longer than ours and computes nothing; "
        "by the clock it takes 0.05 ms longer: 96%"
    ) in text
    alike = {OFF: Traced(200.0, 100.0), OURS: Traced(195.0, 97.0)}
    assert "longer, too little to compare" in overlap_report.text(made(traced=alike))


def test_of_a_summary_rank_0_is_read():
    def row(layer: str, ns: int | None) -> dict[str, object]:
        return {"layer": layer, "exposed_ns": {"median": ns, "total": 1}}

    def summary(*rows: dict[str, object]) -> dict[str, object]:
        return {"ranks": [{"rank": 1, "rows": []}, {"rank": 0, "rows": list(rows)}]}

    times = {OFF: [9.0, 5.0, 7.0], OURS: [3.0, 2.0, 4.0]}
    whole = summary(row(OFF, 4000), row(OURS, 1500), row("clock", None), row("other", 9))
    assert traced_of(whole, times) == {OFF: Traced(7.0, 4.0), OURS: Traced(3.0, 1.5)}
    assert traced_of(summary(row(OFF, 4000)), times) is None


def test_a_block_says_what_is_kept_for_its_backward_pass():
    results = {name: Result(name, None, 0.0, 3_000_000, None) for name in (DTENSOR, OURS)}
    results[OURS] = replace(results[OURS], saved_bytes=2_000_000)
    shape = {"m": 1024, "d": 512, "h": 2048}
    text = overlap_report.text(made(op=BLOCK, shape=shape, results=results))
    assert "backward pass, 1024 tokens, d=512, MB: dtensor 3.0, ours 2.0" in text


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("w") as stream:
        row_files.write(made(), stream)
    assert [asdict(row) for row in overlap_rows.read(path)] == [asdict(row) for row in made()]
