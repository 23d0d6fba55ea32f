"""The measured table of chunks: looked up by size, the user's own first; bad files are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.errors import ConfigError
from tpkernels.overlap import table
from tpkernels.overlap.table import BACKENDS, SHIPPED, Entry, Table, read, table_of, write

ENTRIES = (Entry(256, 1024, 2), Entry(1024, 1024, 4), Entry(1024, 4096, 8), Entry(4096, 512, 16))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's own folder of tables, with nothing in it and nothing shipped."""
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    table._load.cache_clear()
    yield table.user_folder()
    table._load.cache_clear()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "chunks"),
    [
        (255, 9999, 1),  # fewer rows than were measured
        (256, 1023, 1),  # narrower than was measured
        (256, 1024, 2),
        (1023, 9999, 2),
        (1024, 1024, 4),
        (1024, 4095, 4),
        (1024, 4096, 8),
        (4095, 4096, 8),
        (4096, 511, 1),
        (4096, 4096, 16),  # rows first
        (10**9, 10**9, 16),
    ],
)
def test_the_largest_entry_within_the_size(rows, row_bytes, chunks):
    assert Table("lanes", ENTRIES).chunks(rows, row_bytes) == chunks
    assert Table("lanes", ENTRIES[::-1]).chunks(rows, row_bytes) == chunks


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_nothing_measured_nothing_cut(rows, row_bytes):
    assert Table("gloo").chunks(rows, row_bytes) == 1


def test_digests_differ_where_entries_do():
    other = [*ENTRIES[:-1], Entry(4096, 512, 15)]
    tables = [Table("lanes"), Table("lanes", ENTRIES), Table("lanes", tuple(other))]
    assert len({each.digest() for each in tables}) == 3
    again = Table("lanes", tuple(ENTRIES), {"date": "another"}, "elsewhere")
    assert again.digest() == tables[1].digest()


def test_written_tables_are_read_back_and_win_as_a_whole(folder):
    assert table_of("lanes") == Table("lanes")
    write(Table("lanes", ENTRIES, {"date": "2026-11-30"}), table.SHIPPED / "lanes.json")
    assert table_of("lanes").entries == ENTRIES
    assert table_of("lanes").measured == {"date": "2026-11-30"}
    assert table_of("lanes").source == str(table.SHIPPED / "lanes.json")
    assert table_of("gloo") == Table("gloo")
    write(Table("lanes", ENTRIES[:1]), folder / "lanes.json")
    assert table_of("lanes").entries == ENTRIES[:1]
    assert table_of("lanes").source == str(folder / "lanes.json")


def test_what_was_written_is_read_at_once_and_kept(folder):
    write(Table("gloo", ENTRIES[:1]), folder / "gloo.json")
    assert table_of("gloo") is table_of("gloo")
    write(Table("gloo", ENTRIES), folder / "gloo.json")
    assert table_of("gloo").entries == ENTRIES


GOOD = {"format": 1, "backend": "lanes", "chunks": [vars(ENTRIES[0])]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not an overlap table (JSONDecodeError"),
        ("[]", "is not an overlap table (TypeError"),
        ({}, "is not an overlap table (KeyError('format')"),
        ({**GOOD, "format": 2}, "format 2, and this version reads 1"),
        ({**GOOD, "chunks": [{"rows": 1}]}, "is not an overlap table (KeyError('row_bytes')"),
        ({**GOOD, "chunks": [{"rows": 1, "row_bytes": 1, "chunks": "x"}]}, "(ValueError("),
        ({**GOOD, "chunks": [{"rows": 1, "row_bytes": 1, "chunks": 0}]}, "must be at least 1"),
        ({**GOOD, "backend": "gloo"}, "is of 'gloo'"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_a_fix(folder, content, said):
    path = folder / "lanes.json"
    path.parent.mkdir(parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        table_of("lanes")
    assert said in str(caught.value)
    assert str(path) in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_shipped_can_be_read_and_says_how_it_was_measured(path):
    shipped = read(path)
    assert shipped.backend == path.stem in BACKENDS
    assert {"device", "torch", "date", "how"} <= shipped.measured.keys()
    assert len({(e.rows, e.row_bytes) for e in shipped.entries}) == len(shipped.entries)
