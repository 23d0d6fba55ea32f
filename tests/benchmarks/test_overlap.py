"""`tpkernels bench overlap`: a real run, what it orders from the ranks, errors and interrupts."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.benchmarks.overlap_samples import CHUNKED, Network, Started, made
from tpkernels.benchmarks import overlap, overlap_rows
from tpkernels.benchmarks.collectives_backends import absent
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.overlap_block import BLOCK, BLOCKS
from tpkernels.benchmarks.overlap_layers import COLUMN, LAYERS, ROW
from tpkernels.benchmarks.overlap_variants import NAMES, OFF, OURS, PARTS
from tpkernels.benchmarks.overlap_worker import Case, Link
from tpkernels.benchmarks.shaped_hosts import Host, cannot_shape
from tpkernels.testing.rank_errors import RankFailure, rank_error

BENCH = Path(__file__).parents[2] / "bench"


def test_a_quick_run_on_one_machine_and_over_a_link(tmp_path, capfd):
    out, markdown, pages = (tmp_path / name for name in ("rows.jsonl", "table.md", "pages"))
    arguments = ["--quick", "--rounds", "3", "--rates", "none", "--wire-ratio", "0.7"]
    arguments += ["--trace", str(pages)]
    cases = ["--cases", ROW, "--chunks", "2", "--commit", "abc"]
    assert (
        main(["overlap", *arguments, *cases, "--out", str(out), "--markdown", str(markdown)]) == 0
    )
    found = overlap_rows.read(out)
    places = {(row.link == overlap_rows.ONE_HOST, row.backend, row.carrier) for row in found}
    expected = {(True, "gloo", "gloo")}
    expected |= {(True, "tpshm", "tpshm")} if absent("tpshm", "cpu") is None else set()
    expected |= {(False, "gloo", "lanes")} if cannot_shape() is None else set()
    assert places == expected
    for row in found:
        assert row.error is None and row.repetitions == 3 and row.p20_us <= row.us <= row.p80_us
        assert (row.world, row.commit, row.dtype) == (2, "abc", "float32")
        assert (row.gbits is None) == (row.link == overlap_rows.ONE_HOST) == (row.wire_us is None)
        if row.gbits is not None:
            assert row.wire_ratio == 0.7
            assert row.wire_us == pytest.approx(row.wire_bytes * 8e-3 / row.gbits, rel=1e-3)
        assert row.limit_us == pytest.approx(max(row.gemm_us, row.wire_us or 0), rel=1e-3)
        traced = row.implementation in (OFF, OURS)
        assert traced == (row.traced_us is not None) == (row.exposed_us is not None)
        assert not traced or 0 <= row.exposed_us < row.traced_us
    assert {row.implementation for row in found} == {*PARTS, *NAMES, CHUNKED}
    printed = capfd.readouterr()
    assert markdown.read_text() in printed.out and f"{len(found)} rows appended" in printed.out
    assert "row_forward 64x128x64 fp32, one host" in printed.err  # progress
    if cannot_shape() is None:
        assert "fp32, wire 0.7 of compute" in printed.err
    assert len(list(pages.glob("row_forward_64x128x64_float32_*.html"))) == len(places)


@pytest.fixture
def ranks(monkeypatch):
    found = Started()
    monkeypatch.setattr(overlap, "run_ranks", found.run)
    monkeypatch.setattr(overlap, "ShapedNetwork", Network)
    monkeypatch.setattr(Network, "reason", None)
    return found


def test_by_default_all_is_measured_on_links_and_then_on_one_machine(ranks):
    ranks.rows = [row for row in ranks.rows if row.error is None]
    assert main(["overlap"]) == 0
    shaped, alone = ranks.orders
    assert shaped.links == [*(Link(ratio=r) for r in (0.55, 0.75, 0.95)), *map(Link, (0.5, 1, 4))]
    assert alone.links == [Link()] and alone.backends[-1] == "gloo"
    assert [len(hosts) for hosts in ranks.hosts] == [2, 2] and ranks.hosts[1] == [Host()] * 2
    assert shaped.backends == ["gloo"] and shaped.variants == list(NAMES)
    ops = list(dict.fromkeys(case.op for case in shaped.cases))
    assert ops == [*LAYERS, *BLOCKS] and len(shaped.cases) == 3 * len(LAYERS) + 2 * len(BLOCKS)
    assert {case.size for case in shaped.cases if case.op in BLOCKS} == {(1024, 512), (1024, 1024)}


def test_the_options_make_the_order(ranks):
    ranks.rows = [row for row in ranks.rows if row.error is None]
    sizes = ["--shapes", "30,20,10", "6,4,2", "--widths", "192", "--nproc", "3"]
    chosen = ["--cases", BLOCK, COLUMN, "--variants", OURS, OFF, "--chunks", "1", "8"]
    turns = ["--rounds", "5", "--seconds", "4", "--dtype", "bf16", "fp32", "--commit", "abc"]
    with pytest.raises(SystemExit):
        main(["overlap", *sizes, *chosen, *turns, "--rates", "0"])
    assert main(["overlap", *sizes, "--cases", COLUMN, *chosen[3:], *turns, "--rates", "2"]) == 0
    (order,) = ranks.orders
    assert order.cases == [
        Case(COLUMN, size, dtype)
        for dtype in ("bf16", "fp32")
        for size in ((30, 20, 10), (6, 4, 2))
    ]
    assert order.links == [Link(gbits=2.0)] and len(ranks.hosts[0]) == 3
    assert order.variants == [OFF, OURS, "chunks=1", "chunks=8"]
    assert order.turns == (4, 5, 5) and order.commit == "abc"


def test_where_links_cannot_be_shaped_this_machine_is_measured(ranks, monkeypatch, capsys):
    monkeypatch.setattr(Network, "reason", "no such luck")
    ranks.rows = [row for row in ranks.rows if row.error is None]
    assert main(["overlap", "--rates", "1", "none"]) == 0
    assert [order.links for order in ranks.orders] == [[Link()]]
    assert "left out all links: no such luck" in capsys.readouterr().err
    assert main(["overlap", "--rates", "1"]) == 2
    message = "--rates, --wire-ratio: no such luck. Fix: run as root with iproute2, or --rates none"
    assert message in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(ranks, tmp_path, capsys):
    ranks.error, out = KeyboardInterrupt(), tmp_path / "rows.jsonl"
    ranks.cut = '{"op": "row_for'  # a row that was being written
    assert main(["overlap", "--out", str(out)]) == 130
    assert len(overlap_rows.read(out)) == len(made()) and len(ranks.orders) == 1
    captured = capsys.readouterr()
    assert "### Overlap of row_forward" in captured.out and "interrupted" in captured.err


def test_an_interrupt_before_any_row_shows_none(ranks, capsys):
    ranks.error, ranks.rows = KeyboardInterrupt(), []
    assert main(["overlap"]) == 130
    assert capsys.readouterr().out == ""


def test_a_rank_that_fails_is_told_and_a_wrong_result_is_an_exit_status(ranks, capsys):
    assert main(["overlap", "--rates", "none"]) == 1  # chunks=2 is wrong
    ranks.error = rank_error([RankFailure(1, "died", "died: it was killed")], 2)
    assert main(["overlap", "--rates", "none"]) == 1
    captured = capsys.readouterr()
    assert "tpkernels bench overlap: rank 1 died" in captured.err
    assert "### Overlap of row_forward" in captured.out


def test_rows_can_be_shown_again(ranks, tmp_path, capsys):
    out, markdown = tmp_path / "rows.jsonl", tmp_path / "table.md"
    assert main(["overlap", "--rates", "none", "--out", str(out)]) == 1
    first = capsys.readouterr().out
    assert main(["overlap", "--read", str(out), "--markdown", str(markdown)]) == 1
    assert markdown.read_text() in first and len(ranks.orders) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "fast"], "'fast' is not a rate; allowed: Gbit/s from 0.001 to 100; none"),
        (["--rates", "nan"], "'nan' is not a rate"),
        (["--wire-ratio", "0"], "'0' is not a ratio of wire time to compute time"),
        (["--shapes", "1,2"], "'1,2' is not a shape; allowed: M,K,N"),
        (
            ["--shapes", "3,2,2"],
            "3 tokens cannot be shared evenly by 2 ranks. Fix: a multiple of 2",
        ),
        (["--widths", "192"], "--widths 192: 2 ranks cannot share 1024 tokens and heads of 64"),
        (["--cases", "all"], "invalid choice: 'all'"),
        (["--nproc", "1"], "--nproc 1: nothing to exchange"),
        (["--trace", "/proc/absent"], "--trace /proc/absent: it cannot be made"),
        (["--tune", "--cases", ROW], "--tune and --cases exclude each other"),
        (["--tune", "--wire-ratio", "1"], "--tune and --wire-ratio exclude each other"),
        (["--out", "/absent/rows.jsonl"], "--out /absent/rows.jsonl: its directory is not there"),
        (["--read", "/absent/rows.jsonl"], "/absent/rows.jsonl cannot be read"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_bad_values_are_one_line_and_exit_2(arguments, message, ranks, capsys):
    try:
        status = main(["overlap", *arguments])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1
    assert not ranks.orders


def test_under_a_launcher_it_says_what_it_does(ranks, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["overlap"]) == 2
    assert "Fix: call it without torchrun" in capsys.readouterr().err


def test_the_script_is_the_command(ranks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_overlap.py", "--rates", "none", "--cases", ROW])
    monkeypatch.syspath_prepend(str(BENCH))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / "bench_overlap.py"), run_name="__main__")
    assert ended.value.code == 1 and "### Overlap of row_forward" in capsys.readouterr().out
