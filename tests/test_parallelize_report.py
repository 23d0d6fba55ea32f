"""``parallelize``: the report, and ranks that do not agree on weights or inputs."""

from __future__ import annotations

import pytest
import torch

from tests.models.zoo import build
from tests.test_parallelize import assert_unchanged, state_of
from tpkernels.errors import AgreementError
from tpkernels.parallelize import parallelize
from tpkernels.report import ModuleRow, ParallelReport
from tpkernels.testing import RankError


def disagree_task(group, what):
    model = build("gpt2")
    if what == "weights":
        with torch.no_grad():
            model.transformer.ln_f.bias[3] += group.rank()
    state = state_of(model)
    try:
        parallelize(model, group)
    except AgreementError as error:
        assert what == "weights" and "'transformer.ln_f.bias' differs in values" in str(error)
        assert_unchanged(model, state)
        return
    assert what == "inputs"
    ids = torch.randint(3, 50, (1, 5))
    model(ids)
    ids[0, 2] = group.rank()
    model(ids)


@pytest.mark.parametrize("what", ["weights", "inputs"])
def test_ranks_that_disagree_raise_everywhere(pool, what):
    if what == "weights":
        pool.run(disagree_task, what, world_size=2)
        return
    with pytest.raises(RankError, match="inputs of GPT2LMHeadModel: 'argument 0'") as caught:
        pool.run(disagree_task, what, world_size=2)
    assert all(isinstance(f.exception, AgreementError) for f in caught.value.failures)


def unchecked_task(group):
    model = build("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.bias[3] += group.rank()
    parallelize(model, group)


def test_the_checks_can_be_switched_off(pool):
    pool.run(unchecked_task, world_size=2, env={"TPKERNELS_CHECK": "off"})


def report_task(group):
    model = build("llama_uneven", torch.float32)
    report = parallelize(model, group)
    return report, str(report)


def test_the_report(pool):
    reports = pool.run(report_task, world_size=2)
    report, text = reports[0]
    assert (report.world_size, report.rank, reports[1][0].rank) == (2, 0, 1)
    assert [row.kind for row in report.modules] == ["vocabulary", *["attention", "mlp"] * 2]
    attention = report.modules[1]
    assert attention.name == "model.layers.0.self_attn"
    assert attention.reason == "6+3 heads, 2+1 KV heads"
    assert "overlap off" in attention.implementation
    assert "model.layers.{0..1}.self_attn x2" in text
    assert f"{len(report.replaced)} modules split over 2 ranks, 0 kept" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_report_prints_without_rows():
    assert "0 modules split over 1 ranks" in str(ParallelReport(1, 0))
    kept = ParallelReport(2, 0, [ModuleRow("a", "linear", "kept", "-", "why")], 8, 8)
    assert kept.replaced == [] and "why" in str(kept)
