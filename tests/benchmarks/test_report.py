"""JSONL to markdown and a chart."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.benchmarks.samples import EAGER, case, variant
from tpkernels.benchmarks import chart, report, rows
from tpkernels.benchmarks.command import main
from tpkernels.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    """A fixture file: two shapes of one op, and one MLP on another device."""
    found = case()
    found += case(replace(EAGER, tp=8, shape={"m": 2048, "n": 800, "k": 1600}, us=30.0), 25.0)
    mlp = replace(EAGER, op="mlp_forward", device="Other GPU", model="llama3-8b", act="silu")
    found += case(mlp, 150.0)
    path = tmp_path / "results.jsonl"
    with path.open("w") as stream:
        rows.write(found, stream)
    return path


def test_the_table(file, capsys):
    assert main(["report", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("### ") == 2
    assert "### gemm_gelu (gelu_tanh), bfloat16, Made-up GPU" in text
    assert "### mlp_forward, bfloat16, Other GPU" in text
    assert (
        "| gpt2-xl, 1 | 2048, 6400, 1600 | 120.0 | 110.0 (cublaslt) | 100.0 "
        "| triton 128x256x64 g8 s3 w8 tma | 1.20 | 1.23 | 60 |" in text
    )
    assert "torch 2.11.0, triton 3.6.0, cuda 13.0, tpkernels 0.1.0" in text
    assert "commit 0123456789ab; 2026-11-30. Limit: 790 TFLOP/s and 4300 GB/s" in text
    assert "- unfused / ours, all (2): median 1.20, least 1.20, most 1.20" in text
    assert "- unfused / ours, M >= 2048 and K <= 2048 (1): median 0.80" in text
    assert "- compile, not timed (2): cannot run: no compiler" in text


def test_the_flag_is_the_program(file, capsys):
    assert main(["--report", str(file)]) == 0
    flag = capsys.readouterr().out
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == flag


def test_details_have_a_line_an_implementation(file, capsys):
    assert main(["report", str(file), "--details", "--models", "llama3-8b"]) == 0
    text = capsys.readouterr().out
    assert "gemm_gelu" not in text
    for name in ("eager", "compile", "cublaslt", "ours = triton 128x256", "ours:reference"):
        assert f"| {name}" in text


def test_a_case_measured_again_replaces_the_earlier_one_whole():
    again = [replace(EAGER, us=60.0), variant("ours", 30.0, replace(EAGER, us=60.0))]
    (group,) = report.groups([*case(), *again])
    (found,) = group.cases
    assert set(found.by_name) == {"eager", "ours"}
    assert found.ours is not None and found.ours.ratio_to_eager == 2.0


def test_warm_and_cold_threads_and_dtypes_are_not_mixed():
    others = [
        replace(EAGER, cold=False),
        replace(EAGER, threads=2),
        replace(EAGER, dtype="float16"),
        replace(EAGER, act="gelu"),
        replace(EAGER, device="Other"),
    ]
    assert len(report.groups([EAGER, *others])) == 6


def test_a_wrong_result_has_no_time():
    wrong = replace(EAGER, implementation="ours", us=None, ratio_to_eager=None, error="wrong: y")
    text = report.text([EAGER, wrong])
    assert "| 120.0 | - | wrong | - | - | 1.23 |" in text
    assert "- ours, not timed (1): wrong: y" in text


def test_several_ops_are_named_without_their_tiles():
    served = "gemm_act_aux triton 128x256x64 g8 s3 w8 tma, gemm_dact_dbias reference"
    text = report.text([EAGER, variant("ours", 100.0, served_by=served)])
    assert "| gemm_act_aux triton, gemm_dact_dbias reference |" in text


def test_it_says_where_the_host_is_the_limit():
    text = report.text([EAGER, variant("ours", 100.0, host_us=140.0)])
    assert "- at 1 of 1 the host needs longer to enqueue ours" in text
    assert "the host needs longer" not in report.text(case())


def test_the_markdown_goes_to_a_file(file, tmp_path, capsys):
    target = tmp_path / "table.md"
    assert main(["report", str(file), "--out", str(target)]) == 0
    assert target.read_text().startswith("### gemm_gelu") and capsys.readouterr().out == ""


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_the_chart(file, tmp_path, capsys, suffix, begin):
    pytest.importorskip("matplotlib", reason="the chart needs matplotlib")
    target = tmp_path / f"chart{suffix}"
    assert main(["report", str(file), "--chart", str(target)]) == 0
    first = target.read_bytes()
    assert first.startswith(begin)
    assert main(["report", str(file), "--chart", str(target)]) == 0
    assert target.read_bytes() == first


def test_a_chart_of_too_many_cases_shows_one_number_of_tokens():
    found = [replace(EAGER, shape={"m": m, "n": n, "k": 64}) for m in (16, 2048) for n in range(20)]
    (group,) = report.groups(found)
    assert {each.any.shape["m"] for each in chart.shown(group)} == {2048}
    assert len(chart.shown(report.groups(found[:20])[0])) == 20


def test_a_chart_without_matplotlib_names_the_extra(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(file), "--chart", str(tmp_path / "chart.svg")]) == 2
    error = capsys.readouterr().err
    assert "pip install 'tpkernels[bench]'" in error and error.count("\n") == 1


def test_a_chart_of_nothing_is_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="the chart needs matplotlib")
    nothing = report.groups([replace(EAGER, us=None)])
    with pytest.raises(ConfigError, match="no row has a time"):
        chart.draw(nothing, tmp_path / "chart.svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no FILE was given"),
        (["FILE", "--m", "3"], "no row is of these --models and --m"),
        (["FILE", "--chart", "chart.jpg"], "allowed: .svg, .png"),
        (["FILE", "--out", "/absent/x.md"], "its directory is not there"),
        (["/absent.jsonl"], "cannot be read"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(file, capsys, options, message):
    assert main(["report", *(str(file) if o == "FILE" else o for o in options)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Fix: " in error
    assert error.count("\n") == 1
