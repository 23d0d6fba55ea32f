"""`tpkernels bench overlap --tune`: which count of chunks is kept, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.overlap_samples import CHUNKED, Network, Started, made
from tpkernels.benchmarks import overlap, overlap_tune
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.overlap_rows import OverlapRow
from tpkernels.benchmarks.overlap_variants import OFF, chunked
from tpkernels.benchmarks.overlap_worker import Link
from tpkernels.overlap import table
from tpkernels.overlap.table import Entry


def rows(ratios: dict[int, float], link: str = "1 Gbit/s", m: int = 1024) -> list[OverlapRow]:
    """Of one link: the layer whole, and in chunks that take so much of its time."""
    off = next(row for row in made() if row.implementation == OFF)
    off = replace(off, link=link, shape={"m": m, "k": 1024, "n": 512})
    parts = [
        replace(off, implementation=chunked(count), ratio_to_off=ratio)
        for count, ratio in ratios.items()
    ]
    return [off, *parts]


@pytest.mark.parametrize(
    ("links", "chunks"),
    [
        ([{2: 0.9, 4: 0.8, 8: 0.85}], 4),
        ([{2: 0.9, 4: 0.6}, {2: 1.02, 4: 1.04}], 2),  # 4 loses over the second
        ([{2: 0.9, 4: 0.7}, {2: 0.8, 4: 0.99}], 4),  # in the geometric mean
        ([{2: 1.1, 4: 1.2}], 1),
        ([{2: 0.99}], 1),  # too little to be sure of
        ([{2: 0.9, 4: 0.5}, {2: 0.9}], 2),  # 4 was wrong over the second
        ([{}], 1),
    ],
    ids=["fastest", "never-slower", "mean", "none-pays", "noise", "wrong", "nothing"],
)
def test_the_count_that_is_kept(links, chunks):
    found = [row for i, each in enumerate(links) for row in rows(each, f"{i} Gbit/s")]
    assert overlap_tune.entries(found) == {"lanes": [Entry(1024, 2048, chunks)]}


def test_each_carrier_has_a_table_of_its_own():
    found = [*rows({4: 0.8}), *rows({2: 0.9}, m=256)]
    found += [replace(row, carrier="tpshm") for row in rows({4: 1.5})]
    assert overlap_tune.entries(found) == {
        "lanes": [Entry(1024, 2048, 4), Entry(256, 2048, 2)],
        "tpshm": [Entry(1024, 2048, 1)],
    }


def test_tuning_writes_the_users_table(tmp_path, monkeypatch, capsys):
    started = Started()
    started.rows = rows({2: 0.9, 4: 0.7})
    monkeypatch.setattr(overlap, "run_ranks", started.run)
    monkeypatch.setattr(overlap, "ShapedNetwork", Network)
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    assert main(["overlap", "--tune", "--rates", "1", "4", "--rounds", "9"]) == 0
    (order,) = started.orders
    assert {case.op for case in order.cases} == {"row_forward"}
    assert order.links == [Link(1.0), Link(4.0)]
    assert order.variants == [OFF, CHUNKED, chunked(4), chunked(8), chunked(16)]
    path = tmp_path / "overlap" / "lanes.json"
    assert f"wrote {path}: 1 sizes, chunks pay at 1 of them" in capsys.readouterr().out
    kept = table.table_of("lanes")
    assert kept.source == str(path) and kept.chunks(1024, 2048) == 4 and kept.chunks(512, 4096) == 1
    assert kept.measured["how"] == "tpkernels bench overlap --tune --rates 1 4 --rounds 9"
    assert kept.measured["links"] == ["1 Gbit/s"]


def test_an_interrupt_leaves_the_table_as_it_was(tmp_path, monkeypatch):
    started = Started()
    started.error = KeyboardInterrupt()
    monkeypatch.setattr(overlap, "run_ranks", started.run)
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    assert main(["overlap", "--tune", "--rates", "none"]) == 130
    assert not (tmp_path / "overlap").exists()
