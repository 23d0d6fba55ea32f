"""Ranks whose measured tables differ are told so, on every rank; simulated, without a GPU."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch

from tpkernels.comm.group import resolve_group
from tpkernels.errors import TPKernelsWarning
from tpkernels.kernels import table
from tpkernels.ops import choice
from tpkernels.parallelize import _compare_tables, _implementation

CUDA = torch.device("cuda", 0)
H200 = table.DeviceDescription("NVIDIA H200", (9, 0))
ROW = table.TableRow(
    "gemm_act", "bfloat16", "gelu", 16, 4096, 1024, "triton", "128x256x64 g8 s3 w8", 90, 100
)


def compare_task(group, differ):
    group = resolve_group(group)
    rows = {ROW.key: ROW} if group.rank == 0 or not differ else {}
    with (
        patch.object(table, "describe", lambda _: H200),
        patch.dict(table._tables, {H200.slug: table.Table((), rows)}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        _compare_tables(CUDA, group)
        _compare_tables(torch.device("cpu"), group)
        here = choice.summary(CUDA)
    found = [str(each.message) for each in caught if each.category is TPKernelsWarning]
    assert len(found) == differ
    if differ:
        assert f"(rank {group.rank}: {here})" in found[0]
        assert "Fix: give every rank the same" in found[0]


@pytest.mark.parametrize("differ", [False, True])
def test_tables_are_compared(pool, differ):
    pool.run(compare_task, differ, world_size=2)


def test_the_report_names_the_table(monkeypatch):
    monkeypatch.setattr(table, "describe", lambda _: H200)
    monkeypatch.setattr(choice.available, "status", lambda: choice.available.Availability(True, ""))
    monkeypatch.setitem(table._tables, H200.slug, table.Table((), {ROW.key: ROW}))
    monkeypatch.delenv("TPKERNELS_GEMM", raising=False)
    assert (
        _implementation(CUDA, torch.bfloat16, resolve_group(None))
        == "auto: table NVIDIA_H200 (1 row)"
    )
    monkeypatch.setitem(table._tables, H200.slug, table.Table((), {}))
    not_tuned = "reference (not tuned: tpkernels bench --tune)"
    assert _implementation(CUDA, torch.bfloat16, resolve_group(None)) == not_tuned
