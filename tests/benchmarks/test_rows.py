"""Rows are written as the schema says, and what is not one is refused with file and line."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
import torch

from tests.benchmarks.samples import EAGER, case
from tpkernels.benchmarks import rows
from tpkernels.errors import ConfigError


def test_a_round_trip(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("a") as stream:
        rows.write(case(), stream)
        rows.write(case(), stream)
    assert rows.read([path]) == case() * 2
    assert rows.read([path, path]) == case() * 4
    for line in path.read_text().splitlines():
        assert rows.violations(json.loads(line)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": "fast"}, "us is 'fast'"),
        ({"us": True}, "us is True"),
        ({"m": 3}, "m is unknown"),
        ({"shape": {"m": 1, "n": 2}}, "shape is"),
        ({"shape": {"m": 1, "n": 2, "k": 0.5}}, "shape is"),
        ({"versions": {"torch": None}}, "versions is"),
        ({"tp": 1.5}, "tp is 1.5"),
        ({"cold": 1}, "cold is 1"),
        ({"device": None}, "device is None"),
    ],
    ids=str,
)
def test_a_row_of_wrong_fields_is_refused(change, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(EAGER)) + "\n" + json.dumps({**asdict(EAGER), **change}))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{message}.*Fix: "):
        rows.read([path])


def test_a_missing_field_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    given = asdict(EAGER)
    del given["dtype"]
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match="line 1: dtype is missing"):
        rows.read([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("\n \n", "has no rows"),
        ("{nope\n", "line 1: not JSON"),
        ("\n[1, 2]\n", "line 2: not a benchmark's row: its schema is None"),
        ('{"op": "all_reduce"}\n', "line 1: not a benchmark's row"),
        ('{"schema": "tpkernels-bench-0"}\n', "its schema is 'tpkernels-bench-0', allowed: "),
        ("NaN\n", "line 1: not a benchmark's row"),
    ],
    ids=repr,
)
def test_foreign_files_are_refused(text, message, tmp_path):
    path = tmp_path / "foreign.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"foreign.jsonl.*{message}.*Fix: "):
        rows.read([path])


def test_a_row_that_was_cut_off_is_left_out_with_a_warning(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    whole = json.dumps(asdict(EAGER))
    path.write_text(f"{whole}\n{whole[:90]}")
    assert rows.read([path]) == [EAGER]
    said = capsys.readouterr().err
    assert said == f"tpkernels bench: warning: {path}, line 2 was cut off, left out\n"
    with rows.appending(path) as stream:
        rows.write([EAGER], stream)
    assert path.read_text().splitlines() == [whole, whole[:90], whole]
    assert rows.read([path]) == [EAGER] * 2
    assert "line 2 was cut off" in capsys.readouterr().err
    path.write_text(whole)  # whole, but for its newline
    with rows.appending(path) as stream:
        rows.write([EAGER], stream)
    assert rows.read([path]) == [EAGER] * 2 and capsys.readouterr().err == ""
    path.write_text(whole[:90])
    with pytest.raises(ConfigError, match="has no rows"):
        rows.read([path])


@pytest.mark.parametrize("length", range(1, len(json.dumps(asdict(EAGER))), 7))
def test_wherever_a_row_is_cut_it_is_known(length, tmp_path):
    path, whole = tmp_path / "rows.jsonl", json.dumps(asdict(EAGER))
    path.write_text(f"{whole}\n{whole[:length]}\n{whole}\n")
    assert rows.read([path]) == [EAGER] * 2


def test_a_wrong_line_that_is_not_cut_off_is_refused(tmp_path):
    path, whole = tmp_path / "rows.jsonl", json.dumps(asdict(EAGER))
    path.write_text(f"{whole}\n{whole.replace(':', '=', 2)}\n{whole}\n")
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        rows.read([path])


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read"):
        rows.read([tmp_path / "absent.jsonl"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary cannot be read"):
        rows.read([tmp_path / "binary"])


def test_what_json_has_not_is_none():
    assert [rows.digits(value) for value in (None, float("nan"), float("inf"))] == [None] * 3
    assert rows.digits(123456.789) == 123460.0
    with pytest.raises(ValueError):
        rows.write([EAGER, replace(EAGER, us=float("nan"))], io.StringIO())


def test_the_origin_names_what_a_result_depends_on():
    found = rows.origin(torch.device("cpu"))
    assert found.device == found.host_cpu != ""
    assert found.versions["torch"] == torch.__version__
    assert set(found.versions) == {"torch", "triton", "cuda", "tpkernels", "python"}
    assert found.threads == torch.get_num_threads()
    assert rows.origin(torch.device("cpu"), "abc").commit == "abc"
