"""`tpk.trace.record` around real layers on real ranks, and what becomes of it when ranks fail."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import tpkernels as tpk
from tpkernels import instrument
from tpkernels.errors import ConfigError
from tpkernels.testing import RankError
from tpkernels.trace.recording import read
from tpkernels.trace.summary import schema


def layer(group) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
    if group is not None:
        tpk.parallelize(model, group)
    return model


def ticking_ahead() -> int:
    """An hour ahead and, since the machine started, 300 millionths too fast."""
    now = time.perf_counter_ns()
    return now + 3600 * 10**9 + now * 3 // 10_000


def step_of(group, path: str, shifted: bool):
    model, x = layer(group), torch.randn(2, 8, 32)
    plain = model(x)
    more = {"clock": ticking_ahead} if shifted and group.rank() == 1 else {}
    with tpk.trace.record(path, group=group, **more) as trace:
        recorded = model(x)
        recorded.sum().backward()
        with torch.inference_mode():
            model(x)
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    assert not instrument.recording()
    assert torch.equal(recorded, plain)
    return [str(each) for each in trace.paths]


def calls_by_operation(summary) -> Counter[str]:
    """Of rank 0, all layers together."""
    calls: Counter[str] = Counter()
    for row in summary["ranks"][0]["rows"]:
        calls[row["operation"]] += row["calls"]
    return calls


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_training_step_on_ranks(pool, tmp_path, world_size):
    """Rank 1's clock is an hour ahead and drifts: its operations are beside those of rank 0."""
    paths = pool.run(step_of, str(tmp_path / "step"), world_size > 1, world_size=world_size)
    page, perfetto, summary_path = map(Path, paths[0])
    assert page.read_text().startswith("<!DOCTYPE html>")
    summary = json.loads(summary_path.read_text())
    jsonschema.validate(summary, schema())
    assert summary["world_size"] == world_size and summary["missing_ranks"] == []
    if world_size == 1:
        assert summary["ranks"][0]["communication_ns"] == 0
        return
    calls = calls_by_operation(summary)
    assert calls["gemm_all_reduce"] == 6 and calls["column_backward"] == 2
    for rank in summary["ranks"]:
        assert rank["exposed_ns"] > 0 and 0 < rank["communication_ns"] < rank["wall_ns"]
        assert rank["clock"]["bound_ns"] < 10**9
    assert abs(summary["ranks"][1]["clock"]["offset_ns"] + 3600 * 10**9) < 3600 * 10**9 // 100
    events = [e for e in json.loads(perfetto.read_text())["traceEvents"] if e["ph"] == "X"]
    sums = [
        [e["ts"] for e in events if e["pid"] == r and e["name"] == "gemm_all_reduce"]
        for r in range(2)
    ]
    slack = summary["ranks"][1]["clock"]["bound_ns"] / 1e3 + 2e6
    assert all(abs(a - b) < slack for a, b in zip(*sums, strict=True))


def synchronous(group, path: str):
    """What blocks is communication and exposed at once."""
    from tpkernels.comm import collectives
    from tpkernels.comm.direct import all_reduce_

    x, name = torch.ones(4, 3), group.group_name
    with tpk.trace.record(path, group=group):
        collectives.all_gather(x, [4, 4], 0, name)
        collectives.reduce_scatter(x, [2, 2], 0, name)
        collectives.all_reduce(x, name)
        collectives.all_reduce_max(x, name)
        all_reduce_(x, group)


def test_collectives_are_recorded(pool, tmp_path):
    pool.run(synchronous, str(tmp_path / "step"), world_size=2)
    summary = json.loads((tmp_path / "step.summary.json").read_text())
    rows = {row["operation"]: row for row in summary["ranks"][1]["rows"]}
    assert {name: row["calls"] for name, row in rows.items()} == {
        "all_gather": 1,
        "reduce_scatter": 1,
        "all_reduce": 3,
    }
    for row in rows.values():
        assert 0 < row["exposed_ns"]["total"] <= row["communication_ns"]["total"]
    assert rows["all_gather"]["bytes"] == 8 * 3 * 4


def sharded(group, path: str):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
    tpk.zero(model, group, stage=3, units=[nn.Sequential])
    model(torch.randn(2, 16)).sum().backward()
    with tpk.trace.record(path, group=group):
        model(torch.randn(2, 16)).sum().backward()


def test_gathers_and_reductions_of_zero_name_their_units(pool, tmp_path):
    pool.run(sharded, str(tmp_path / "step"), world_size=2)
    rows = json.loads((tmp_path / "step.summary.json").read_text())["rows"]
    for operation in ("zero.gather", "zero.reduce", "zero.wait", "zero.wait_reduce"):
        found = [row for row in rows if row["operation"] == operation]
        assert {row["phase"] for row in found} == {"other"}
        assert {row["layer"] for row in found} >= {"1"} if operation != "zero.wait" else found
    gathers = [row for row in rows if row["operation"] == "zero.gather"]
    assert all(row["bytes"] > 0 and row["communication_ns"]["total"] > 0 for row in gathers)


def compiled(group, path: str):
    model, x = layer(group).eval(), torch.randn(2, 8, 32)
    mlp = torch.compile(
        lambda given: model[0].linear2(model[0].linear1(given)), backend="aot_eager"
    )
    with torch.no_grad():
        plain = model[0].linear2(model[0].linear1(x))
    with tpk.trace.record(path, group=group):
        y = mlp(x.requires_grad_())
        y.sum().backward()
    assert torch.equal(y, plain)
    return x.grad


def test_compiled_layers_run_and_are_recorded(pool, tmp_path):
    grads = pool.run(compiled, str(tmp_path / "step"), world_size=2, timeout=120)
    assert torch.equal(*grads)
    calls = calls_by_operation(json.loads((tmp_path / "step.summary.json").read_text()))
    assert calls["gemm_all_reduce"] == 1 and calls["column_backward"] == 1


def failing(group, path: str):
    with tpk.trace.record(path, group=group):
        tpk.comm.all_reduce_(torch.ones(4), group)
        if group.rank() == 1:
            raise ValueError("it broke <here>")


def test_where_a_rank_raises_each_writes_its_own(pool, tmp_path):
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(failing, str(tmp_path / "step"), world_size=2)
    assert time.monotonic() - began < 20
    (raised,) = [each for each in caught.value.failures if each.rank == 1]
    assert (raised.type_name, raised.message) == ("ValueError", "it broke <here>")
    assert not (tmp_path / "step.html").exists()
    found = read(sorted(tmp_path.glob("step.rank*.json")))
    assert [each.rank for each in found] == [0, 1]
    assert found[1].error == "ValueError: it broke <here>"
    assert "rank 1 left its recording early: ValueError" in found[0].error
    assert found[0].intervals[0].name == "all_reduce"


def absent(group, path: str):
    if group.rank() == 0:
        with tpk.trace.record(path, group=group):
            pass


def test_a_rank_that_does_not_record_is_named_within_the_limit(pools, tmp_path):
    with pytest.raises(RankError, match=r"rank 1 did not come within 0\.5 s"):
        pools(2).run(absent, str(tmp_path / "x"), env={"TPKERNELS_TIMEOUT": "0.5"})


def test_one_process_without_ranks(tmp_path):
    with tpk.trace.record(tmp_path / "alone.html") as trace:
        x = torch.ones(3)
        with instrument.operation("x", "a.b", "", x), instrument.computing("gemm", x):
            pass
    summary = json.loads(trace.paths[2].read_text())
    assert [row["layer"] for row in summary["rows"]] == ["a.b"]
    assert summary["ranks"][0]["clock"]["bound_ns"] == 0


def test_a_recording_inside_another_is_refused(tmp_path):
    with (
        tpk.trace.record(tmp_path / "outer"),
        pytest.raises(ConfigError, match=r"records already\. Fix"),
        tpk.trace.record(tmp_path / "inner"),
    ):
        pass
    with tpk.trace.record(tmp_path / "next"):
        pass
    assert (tmp_path / "next.html").exists()


@pytest.mark.parametrize("name", ["nowhere/step.html", "."])
def test_where_it_cannot_be_written_is_said_before_anything_runs(tmp_path, name):
    with pytest.raises(ConfigError, match="Fix"), tpk.trace.record(tmp_path / name):
        pytest.fail("the block ran")


def test_an_error_of_the_block_is_the_one_that_is_raised(tmp_path):
    with pytest.raises(KeyError) as caught, tpk.trace.record(tmp_path / "step"):
        raise KeyError("a")
    assert "step.rank0.json" in caught.value.__notes__[0]
    (found,) = read([tmp_path / "step.rank0.json"])
    assert found.error == "KeyError: 'a'"
    assert not instrument.recording()


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ('{"schema": "x"}', "not a rank's recording: its schema is 'x'")],
)
def test_other_files_are_refused_by_name(tmp_path, text, says):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"a.json: {says}"):
        read([path])
