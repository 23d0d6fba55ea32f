"""A pytest plugin: takes its share of the tests, and notes each as it starts and as it ends.

``GPU_TESTS_NOTES``: the file, one JSON object a line. Tests in it are not run again.
``GPU_TESTS_SHARE``: ``i/n``, this process's part. A process that lost its CUDA context stops.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_NOTES = Path(os.environ["GPU_TESTS_NOTES"])


def _note(**what: Any) -> None:
    with _NOTES.open("a") as file:
        file.write(json.dumps(what) + "\n")


def _started() -> set[str]:
    lines = _NOTES.read_text().splitlines() if _NOTES.exists() else []
    return {note["start"] for note in map(json.loads, lines) if "start" in note}


@pytest.hookimpl(trylast=True)  # after those that are not marked gpu are gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = map(int, os.environ["GPU_TESTS_SHARE"].split("/"))
    started = _started()
    share = items[number::count]
    _note(collected=[item.nodeid for item in share])
    items[:] = [item for item in share if item.nodeid not in started]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note(name=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(start=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    _note(
        name=report.nodeid,
        outcome=report.outcome,
        seconds=report.duration,
        text=text[-20000:] if report.outcome != "passed" else "",
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:  # torch.AcceleratorError: the context is gone for good
        item.session.shouldstop = f"the CUDA context is lost: {error}"
        raise
