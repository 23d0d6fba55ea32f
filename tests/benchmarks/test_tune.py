"""Tuning: the winner by medians, gated, saved after every bucket; the kernels through Triton's
interpreter, the times by an injected timer."""

from __future__ import annotations

import io
import json
import warnings

import pytest
import torch

from tpkernels.benchmarks import tune
from tpkernels.benchmarks.budget import Budget, Progress
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.shapes import MODELS, custom, shards
from tpkernels.benchmarks.timers import Sample
from tpkernels.benchmarks.tune import Tuner, buckets, winner
from tpkernels.benchmarks.tuned_ops import OPS
from tpkernels.kernels import available, table
from tpkernels.kernels.config import GemmConfig, configs
from tpkernels.kernels.table import DeviceDescription

DEVICE = DeviceDescription("Made-up GPU", (9, 0))
CPU = torch.device("cpu")
FAST, SLOW = GemmConfig(64, 64, 32), GemmConfig(128, 64, 32)


class Clock:
    """A timer that knows how long each configuration takes, and counts the calls."""

    def __init__(self, us):
        self.us, self.calls, self.last = us, 0, "reference"

    def __call__(self, run, host_us=0.0):
        self.calls += 1
        self.last = "reference"
        run()
        return Sample(self.us[self.last])

    def synchronize(self):
        pass


@pytest.fixture
def fake(monkeypatch):
    """Kernels that are plain PyTorch and tell the clock which configuration ran."""
    clock = Clock({"reference": 10.0, str(FAST): 8.0, str(SLOW): 12.0})

    for name, op in list(OPS.items()):

        def launch(*arguments, op=op):
            clock.last = str(arguments[-1])
            return op.reference(*arguments[:-1])

        monkeypatch.setitem(OPS, name, tune.TunedOp(**{**vars(op), "launch": launch}))
    return clock


def tuner(clock, path, found=(SLOW, FAST), **options) -> Tuner:
    options = {"budget": Budget(), **options}
    options["progress"] = Progress(0, options["budget"], io.StringIO())
    return Tuner(CPU, DEVICE, clock, configs=lambda op, dtype: found, path=path, **options)


def one(op="gemm_act", shapes=((8, 16, 8),), act="gelu"):
    return buckets(custom(shapes), [op], [torch.float32], [act])


def test_the_fastest_configuration_wins_and_is_written(fake, tmp_path):
    path = tmp_path / "table.json"
    (row,) = tuner(fake, path, commit="abc").run(one())
    assert (row.implementation, row.config) == ("triton", str(FAST))
    assert (row.us, row.reference_us) == (8.0, 10.0)
    written = json.loads(path.read_text())
    assert (written["device"], written["commit"]) == ("Made-up GPU", "abc")
    assert written["rows"] == [
        {
            "op": "gemm_act",
            "dtype": "float32",
            "epilogue": "gelu",
            "m": 8,
            "n": 16,
            "k": 8,
            "implementation": "triton",
            "config": str(FAST),
            "us": 8.0,
            "reference_us": 10.0,
        }
    ]


def test_the_users_own_table_is_what_choosing_looks_up(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE", str(tmp_path))
    table.invalidate()
    try:
        tuner(fake, None).run(one())
        row = table.lookup("gemm_act", DEVICE, torch.float32, "gelu", 8, 16, 8)
        assert row is not None and row.winner == "triton" and row.config == str(FAST)
    finally:
        monkeypatch.undo()
        table.invalidate()


def test_a_tie_is_plain_pytorchs(fake, tmp_path):
    fake.us[str(FAST)] = 10.0
    (row,) = tuner(fake, tmp_path / "table.json").run(one())
    assert (row.implementation, row.config, row.us) == ("reference", None, 10.0)


def test_rows_of_these_versions_are_not_measured_again(fake, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    asked = one()
    assert len(tuner(fake, path).run(asked)) == 1
    calls = fake.calls
    assert tuner(fake, path).run(asked) == [] and fake.calls == calls
    assert len(tuner(fake, path).run(asked, retune=True)) == 1
    monkeypatch.setattr(table, "triton_version", lambda: "9.9")
    assert len(tuner(fake, path).run(asked)) == 1


def test_the_table_is_saved_after_every_bucket(fake, tmp_path):
    path = tmp_path / "table.json"
    saved = []

    class Ended(Clock):
        def __call__(self, run, host_us=0.0):
            if path.exists():
                saved.append(len(json.loads(path.read_text())["rows"]))
                raise KeyboardInterrupt
            return fake(run, host_us)

    with pytest.raises(KeyboardInterrupt):
        tuner(Ended({}), path).run(one(shapes=[(8, 16, 8), (64, 16, 8)]))
    assert saved == [1] and len(json.loads(path.read_text())["rows"]) == 1


def test_a_budget_ends_it_between_buckets(fake, tmp_path):
    class Seconds:
        now = 0.0

        def __call__(self):
            self.now += 0.4
            return self.now

    each = tuner(fake, tmp_path / "table.json", budget=Budget(1.5, Seconds()))
    found = each.run(one(shapes=[(8, 16, 8), (64, 16, 8), (512, 16, 8)]))
    assert 0 < len(found) < 3
    assert each.progress is not None
    assert "left out" in each.progress.stream.getvalue()
    assert "no time left of 1.5 s" in each.progress.stream.getvalue()


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_kernel_is_named_and_never_wins(fake, tmp_path, monkeypatch, op):
    def wrong(*arguments):
        fake.last = str(FAST)
        found = OPS[op].reference(*arguments[:-1])
        *first, last = (found,) if isinstance(found, torch.Tensor) else found
        return (*first, last + 0.1)

    monkeypatch.setitem(OPS, op, tune.TunedOp(**{**vars(OPS[op]), "launch": wrong}))
    act = OPS[op].acts[0]
    each = tuner(fake, tmp_path / "table.json", (FAST,))
    (row,) = each.run(one(op, act=act))
    assert row.implementation == "reference"
    assert f"triton {FAST}: wrong: {OPS[op].outputs[-1]}: relative error" in each.wrong[0]


def test_a_kernel_that_raises_is_not_chosen(fake, tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of resources")

    monkeypatch.setitem(
        OPS, "gemm_act", tune.TunedOp(**{**vars(OPS["gemm_act"]), "launch": broken})
    )
    each = tuner(fake, tmp_path / "table.json")
    (row,) = each.run(one())
    assert row.implementation == "reference" and each.wrong == []


def times(**us):
    return {
        name: Sample(*value) if isinstance(value, tuple) else Sample(value)
        for name, value in us.items()
    }


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([times(reference=10.0)], "reference"),
        ([times(reference=10.0, a=9.0, b=8.0)], "b"),
        ([times(reference=10.0, a=11.0)], "reference"),
        # no slower at every shape of the bucket, whatever the mean says
        ([times(reference=10.0, a=9.0, b=5.0), times(reference=10.0, a=9.5, b=10.1)], "a"),
        # timed at every shape
        ([times(reference=10.0, a=9.0, b=5.0), times(reference=10.0, a=9.0)], "a"),
        # a stream of single calls is bound by the host: 40 us instead of 15
        ([times(reference=(10.0, 15.0), a=(8.0, 40.0))], "reference"),
        ([times(reference=(50.0, 15.0), a=(45.0, 40.0))], "a"),
    ],
)
def test_the_winner(rounds, expected):
    assert winner(rounds) == expected


def test_buckets_join_shapes_and_models_ask_for_the_ops_they_call():
    found = buckets(shards(MODELS, [1, 8], [2048]), list(OPS), [torch.bfloat16])
    keys = [each.key for each in found]
    assert len(keys) == len(set(keys))
    gated = {each.key[3:] for each in found if each.op.name == "gemm_dglu"}
    assert gated == {
        (2048, 16384, 4096),
        (2048, 2048, 4096),
        (2048, 32768, 8192),
        (2048, 4096, 8192),
    }
    by_key = {each.key: each for each in found}
    shared = by_key["gemm_act", "bfloat16", "gelu_tanh", 2048, 16384, 4096]
    assert set(shared.shapes) == {(2048, 20480, 5120), (2048, 14336, 4096)}
    alone = by_key["gemm_act_aux", "bfloat16", "gelu_tanh", 2048, 16384, 4096]
    assert alone.shapes == ((2048, 20480, 5120),)


def test_the_real_kernels_pass_the_gate_and_are_measured(tmp_path):
    if not (available.status().available and available.interpreting()):
        pytest.skip("needs Triton's interpreter (on a GPU, test_gpu.py)")
    from tpkernels.benchmarks.timers import CpuTimer

    each = tuner(CpuTimer(), tmp_path / "table.json")
    names = ["gemm_act_aux", "gemm_dact_dbias", "gemm_glu_aux", "gemm_dglu"]
    asked = buckets(custom([(5, 19, 7)]), names, [torch.float32])
    each.configs = lambda op, dtype: configs(op, dtype, (8, 0))[:1]
    found = each.run([b for b in asked if b.act != "gelu"])
    assert each.wrong == [] and [row.op for row in found] == names
    assert each.progress is not None and "left out" not in each.progress.stream.getvalue()
    # Interpreted kernels are slow; that they were timed shows before the winner is known.
    kernels = each.configs(names[0], torch.float32)
    passed, rotation = each._prepare(asked[0], (5, 19, 7), kernels)
    tune.measure(passed, rotation, each.timer, tune._FIRST_ROUND)
    assert [bool(m.samples) for m in passed] == [True, True]


def test_a_broken_table_is_replaced_with_a_warning(fake, tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{broken")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert len(tuner(fake, path).run(one())) == 1
    assert len(json.loads(path.read_text())["rows"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["--tune"], ["tune", "--budget", "5"]], ids=str)
def test_without_a_gpu_it_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "torch sees none. Fix: " in error
