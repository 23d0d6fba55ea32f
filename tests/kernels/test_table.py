"""The measured table: buckets, files that come and go, and what is wrong with some of them."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import ConfigError, TPKernelsWarning
from tpkernels.kernels import table
from tpkernels.kernels.table import DeviceDescription, TableRow, bucket, epilogue_class

H200 = DeviceDescription("NVIDIA H200", (9, 0))
ROW = TableRow(
    "gemm_act", "bfloat16", "gelu", 2048, 4096, 1024, "triton", "128x256x64 g8 s3 w8 tma", 90, 100
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty user's cache and nothing shipped."""
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    table._warn.cache_clear()
    table.invalidate()
    yield tmp_path
    monkeypatch.undo()
    table.invalidate()


def find(row=ROW, device=H200, dtype=torch.bfloat16, act="gelu"):
    return table.lookup(row.op, device, dtype, act, row.m, row.n, row.k)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (1447, 1024), (1449, 2048)],
)
def test_a_bucket_is_the_nearest_power_of_two(size, expected):
    assert bucket(size) == expected


@given(st.integers(1, 1 << 40))
def test_a_bucket_is_nearest_in_log2(size):
    found = bucket(size)
    assert found & (found - 1) == 0
    distance = abs(math.log2(size) - math.log2(found))
    assert distance <= 0.5 + 1e-9
    assert bucket(found) == found


def test_epilogues_fall_into_classes():
    acts = ("none", "gelu", "gelu_tanh", "silu", "relu", "relu2")
    found = [epilogue_class(act) for act in acts]
    assert found == ["none", "gelu", "gelu_tanh", "other", "other", "other"]


def test_a_row_comes_back_and_only_for_its_bucket():
    path = table.record([ROW], H200)
    assert path == table.user_folder() / "NVIDIA_H200.json"
    found = find()
    assert found == replace(ROW, torch=torch.__version__, triton=table.triton_version())
    assert table.lookup("gemm_act", H200, torch.bfloat16, "gelu", 1500, 5000, 1000) == found
    assert table.lookup("gemm_act", H200, torch.bfloat16, "gelu", 1024, 4096, 1024) is None
    assert find(dtype=torch.float16) is None
    assert find(act="gelu_tanh") is None
    assert find(replace(ROW, op="gemm_act_aux")) is None
    assert find(device=DeviceDescription("NVIDIA A100", (8, 0))) is None


def test_the_file_is_as_documented():
    saved = json.loads(table.record([ROW], H200, commit="abc").read_text())
    rows = saved.pop("rows")
    assert saved.pop("date").count("-") == 2
    assert saved == {
        "format": 1,
        "device": "NVIDIA H200",
        "capability": [9, 0],
        "torch": torch.__version__,
        "triton": table.triton_version(),
        "commit": "abc",
    }
    assert rows == [
        {
            "op": "gemm_act",
            "dtype": "bfloat16",
            "epilogue": "gelu",
            "m": 2048,
            "n": 4096,
            "k": 1024,
            "implementation": "triton",
            "config": "128x256x64 g8 s3 w8 tma",
            "us": 90,
            "reference_us": 100,
        }
    ]


def test_rows_merge_and_a_bucket_is_replaced():
    other = replace(ROW, m=16, implementation="reference", config=None, us=5, reference_us=5)
    table.record([ROW], H200)
    table.record([other], H200)
    table.record([replace(ROW, us=80, config=None, implementation="cublaslt")], H200)
    assert len(table.table_of(H200).rows) == 2
    assert find().implementation == "cublaslt" and find().us == 80
    assert find(other).winner == "reference"


def test_a_row_keeps_the_versions_it_was_measured_with():
    old = replace(ROW, torch="2.11.0", triton="3.6.0")
    table.record([old], H200)
    path = table.record([replace(ROW, m=16)], H200)
    kept, new = sorted(table.table_of(H200).rows.values(), key=lambda row: -row.m)
    assert (kept.torch, kept.triton) == ("2.11.0", "3.6.0")
    assert new.torch == torch.__version__
    written = json.loads(path.read_text())["rows"]
    assert [row.get("torch") for row in written] == [None, "2.11.0"]


def test_what_was_slower_than_plain_pytorch_is_not_used():
    assert replace(ROW, us=100.1).winner == "reference"
    assert replace(ROW, us=100).winner == "triton"


def test_the_user_s_row_wins_over_the_shipped():
    target = table.SHIPPED / "NVIDIA_H200.json"
    table.record([ROW, replace(ROW, m=16)], H200, path=target)
    assert find().us == 90
    table.record([replace(ROW, us=70)], H200)
    assert find().us == 70
    assert find(replace(ROW, m=16)).us == 90  # row by row
    assert [file.path for file in table.table_of(H200).files] == [
        target,
        table.user_folder() / "NVIDIA_H200.json",
    ]


BROKEN = {
    "not JSON": lambda text: text[:-20],
    "empty": lambda _: "",
    "a list": lambda _: "[]",
    "another format": lambda text: text.replace('"format": 1', '"format": 2'),
    "another device": lambda text: text.replace("NVIDIA H200", "NVIDIA H100"),
    "another capability": lambda text: text.replace("[9, 0]", "[9, 1]"),
    "rows of another kind": lambda text: text.replace('"rows": [', '"rows": {"a": [')[:-2] + "}}",
    "a row without a field": lambda text: text.replace('"m": 2048, ', ""),
    "an unknown field": lambda text: text.replace('"m": 2048', '"m": 2048, "z": 1'),
    "no bucket": lambda text: text.replace("2048", "2047"),
    "an unknown implementation": lambda text: text.replace('"triton", "config"', '"x", "config"'),
    "no time": lambda text: text.replace('"us": 90', '"us": NaN'),
    "zero time": lambda text: text.replace('"us": 90', '"us": 0'),
    "true for a format": lambda text: text.replace('"format": 1', '"format": true'),
    "true for a size": lambda text: text.replace('"m": 2048', '"m": true'),
    "a size with a point": lambda text: text.replace('"m": 2048', '"m": 2048.0'),
    "a size beyond any": lambda text: text.replace('"m": 2048', f'"m": {1 << 4000}'),
    "true for a time": lambda text: text.replace('"us": 90', '"us": true'),
    "a time beyond any float": lambda text: text.replace('"us": 90', f'"us": {10**400}'),
    "an endless time": lambda text: text.replace('"us": 90', '"us": 1e999'),
    "more digits than Python reads": lambda text: text.replace('"us": 90', '"us": ' + "9" * 5000),
    "a version that no terminal shows": lambda text: re.sub(
        '"triton": "[^"]*"', r'"triton": "\\ud800"', text
    ),
    "a date of two lines": lambda text: text.replace('"date": "', r'"date": "\n'),
    "config of numbers": lambda text: re.sub('"config": "[^"]*"', '"config": [1]', text),
    "nested too deep": lambda text: text.replace(
        '"commit": ""', '"commit": ' + "[" * 200_000 + "]" * 200_000
    ),
    "not text": lambda _: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_wrong_file_is_one_warning_and_no_table(broken):
    path = table.record([ROW], H200)
    text = broken(path.read_text())
    assert text != path.read_text()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    table.invalidate()
    with pytest.warns(TPKernelsWarning, match=r"NVIDIA_H200\.json .*ignored.* Fix: ") as caught:
        assert find() is None
        table.invalidate()
        assert find() is None
    assert len(caught) == 1
    table.record([replace(ROW, m=16)], H200)  # and it is kept, out of the way
    assert find(replace(ROW, m=16)) is not None and find() is None
    assert path.with_name("NVIDIA_H200.json.unread").exists()


def test_a_folder_in_the_file_s_place_is_a_warning(cache):
    (table.user_folder() / "NVIDIA_H200.json").mkdir(parents=True)
    with pytest.warns(TPKernelsWarning, match="cannot be read"):
        assert find() is None


def test_a_cache_that_cannot_be_written_raises_with_the_fix(cache, monkeypatch):
    (cache / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"TPKERNELS_CACHE=.* is a file; .*Fix: "):
        table.record([ROW], H200)
    blocked = cache / "blocked"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*Fix: export TPKERNELS_CACHE"):
        table.record([ROW], H200, path=blocked / "NVIDIA_H200.json")


def test_a_write_that_fails_leaves_the_old_file_whole(monkeypatch):
    path = table.record([ROW], H200)
    before = path.read_text()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="no space left"):
        table.record([replace(ROW, m=16)], H200)
    monkeypatch.undo()
    assert path.read_text() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_row_that_is_not_one_is_not_recorded():
    with pytest.raises(ConfigError, match="m, n, k is not right"):
        table.record([replace(ROW, m=3)], H200)
    assert find() is None


def test_no_table_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find() is None
        assert table.table_of(H200).rows == {} and table.table_of(H200).files == ()


def test_tf32_rows_are_others(monkeypatch):
    row = replace(ROW, dtype="float32")
    table.record([row], H200)
    assert find(row, dtype=torch.float32) is not None
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert table.dtype_key(torch.float32) == "tf32"
        assert find(row, dtype=torch.float32) is None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_the_digest_is_of_what_would_be_chosen():
    def digest(*rows):
        return table.Table((), {row.key: row for row in rows}).digest()

    other = replace(ROW, m=16)
    assert digest(ROW, other) == digest(other, ROW)
    assert digest(ROW) == digest(replace(ROW, us=80, torch="2.12"))
    different = [digest(), digest(ROW), digest(other), digest(ROW, other)]
    different += [digest(replace(ROW, us=101)), digest(replace(ROW, config=None))]
    assert len(set(different)) == len(different)
    assert all(0 <= each < 2**63 for each in different)


def test_threads_read_one_table():
    table.record([ROW], H200)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(table.table_of(H200))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(each is found[0] for each in found)


def test_a_change_is_noticed_by_what_was_derived_from_the_table():
    before = table.generation
    table.record([ROW], H200)
    assert table.generation > before
