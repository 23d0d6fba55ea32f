"""`tpkernels bench zero3`: a real quick run, limits, the check of gradients, rows and charts."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpkernels.benchmarks import zero3, zero3_limits, zero3_rows, zero3_variants, zero3_worker
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.shaped_hosts import Host
from tpkernels.benchmarks.zero3_limits import Traffic
from tpkernels.benchmarks.zero3_model import MODELS, make_batch, make_model, sizes
from tpkernels.benchmarks.zero3_variants import COMPUTE, DDP, OURS, Plan

BENCH = Path(__file__).parents[2] / "bench"
TINY = MODELS["tiny"]
HAVE_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


# --- a real run ---


def test_a_quick_run_over_loopback(tmp_path, capfd):
    out, markdown, chart = (tmp_path / name for name in ("rows.jsonl", "table.md", "chart.svg"))
    files = ["--out", str(out), "--markdown", str(markdown), "--chart", str(chart)]
    arguments = ["--quick", "--rate", "none", "--repeats", "3", "--budgets", "0", "2units"]
    assert main(["zero3", *arguments, *files, "--commit", "abc"]) == 0
    found = zero3_rows.read(out)
    step = {row.implementation: row for row in found if row.op == zero3_rows.STEP}
    forward = {row.implementation: row for row in found if row.op == zero3_rows.FORWARD}
    ours = ["ours prefetch=0", "ours prefetch=2units"]
    assert list(step) == list(forward) == [*zero3_variants.BASELINES, *ours]
    for name, row in step.items():
        assert (row.link, row.nominal_mbs, row.world, row.commit) == ("unshaped", None, 2, "abc")
        assert row.sent_bytes is None and row.measured_mbs > 0
        if name.startswith("deepspeed") and not HAVE_DEEPSPEED:
            assert row.error == "deepspeed is not installed. Fix: pip install deepspeed"
            assert row.us is None and row.limit_us is None
            continue
        assert row.error is None and 0 < row.relative_error <= zero3_worker.TOLERANCE
        assert row.repetitions == 3 and row.p20_us <= row.us <= row.p80_us
        assert forward[name].us < row.us
        assert row.percent_of_limit == pytest.approx(100 * row.limit_us / row.us, rel=1e-3)
    assert step[COMPUTE].percent_of_limit == 100 and step[COMPUTE].wire_bytes == 0
    unit = sizes(TINY).units[0]
    for name, budget in zip(ours, (0, 2 * unit), strict=True):
        assert step[name].prefetch_bytes == budget and step[name].unit_bytes == unit
        # One unit in use, and what may be ahead; gathered in both passes, reduced once.
        assert unit <= step[name].peak_gathered_bytes <= 2 * unit + budget
        assert step[name].wire_bytes <= 1.1 * step[name].full_wire_bytes
    printed = capfd.readouterr()
    assert markdown.read_text() in printed.out
    assert "### ZeRO-3, tiny, 2 hosts, unshaped" in printed.out
    assert chart.read_text().startswith("<?xml")


# --- limits ---


def test_the_limit_of_two_ranks_by_hand():
    """Two units of 8 and 6 bytes, a root of 2: half of each travels."""
    traffic = zero3_limits.sharded((8, 6), 2, 2)
    assert traffic == Traffic(forward=8, backward=16, first=4, last=4)
    kept = zero3_limits.sharded((8, 6), 2, 2, gather_backward=False)
    assert kept == Traffic(forward=8, backward=8, first=4, last=4)
    without_root = zero3_limits.sharded((8, 6), 2, 2, gather_root_backward=False)
    assert without_root.backward == 15
    assert zero3_limits.sharded((8, 6), 2, 4).forward == 12  # (N - 1) / N
    slow = zero3_limits.limit(traffic, 10.0, 1e6, backward=True)  # a byte a microsecond
    assert (slow.compute_us, slow.wire_us, slow.first_us, slow.last_us) == (10, 24, 4, 4)
    assert slow.us == 24 + 8
    fast = zero3_limits.limit(traffic, 10.0, 1e6, backward=False)
    assert fast.us == 10 + 4 and fast.last_us == 0


def test_ddp_sends_its_last_bucket_after_computing():
    mib = 1 << 20
    one = zero3_limits.ddp([4 * mib], 2)
    assert (one.forward, one.backward, one.last) == (0, 4 * mib, 4 * mib)
    # From the end: 2 (over 1 MiB, full), then 20 + 6 (over 25, full), then 4.
    several = zero3_limits.ddp([mib, 3 * mib, 6 * mib, 20 * mib, 2 * mib], 4)
    assert several.backward == 1.5 * 32 * mib and several.last == 1.5 * 4 * mib


def test_sizes_are_those_of_the_model():
    for blocks in (1, 3):
        model, found = make_model(TINY, blocks), sizes(TINY, blocks)
        nbytes = [4 * parameter.numel() for parameter in model.parameters()]
        assert list(found.parameters) == nbytes and len(found.units) == -(-TINY.blocks // blocks)
        assert sum(found.units) + found.root == sum(nbytes)
        for theirs, ours in zip(model.parameters(), make_model(TINY).parameters(), strict=True):
            assert torch.equal(theirs, ours)
    block = sizes(MODELS["6x512"]).units[0] / 4
    assert block == 12 * 512**2 + 13 * 512


# --- the check ---


def _compared(group, kind, spoil):
    """(error, what is wrong) of a variant, on a rank, after `spoil` of its gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    trained = zero3_variants.build(Plan(kind, prefetch_bytes=1 << 20), TINY, mesh)
    right = trained.gradients

    def gradients():
        found = right()
        if spoil == "scaled":
            found[3] = found[3] * 1.0001
        elif spoil == "nan":
            found[2] = found[2] * float("nan")
        elif spoil == "missing":
            found.pop()
        elif spoil == "shape":
            found[0] = found[0][:-1]
        return found

    trained.gradients = gradients
    truth = zero3_worker.alone_on_all(TINY, dist.get_world_size())
    return zero3_worker.compare(trained, make_batch(TINY, dist.get_rank()), truth)


def test_right_gradients_are_right(pools):
    for error, wrong in pools(2).run(_compared, DDP, None):
        assert wrong is None and 0 < error <= zero3_worker.TOLERANCE


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("scaled", "gradient 3: relative error 1.0e-04, allowed: 1e-05"),
        ("nan", "gradient 2: relative error nan, allowed: 1e-05"),
        ("missing", "49 gradients instead of 50"),
        ("shape", "gradient 0 is (63,) instead of (64,)"),
    ],
)
def test_a_wrong_gradient_is_seen(spoil, message, pools):
    for _, wrong in pools(2).run(_compared, DDP, spoil):
        assert wrong == message


def test_counters_are_given_a_step_and_peaks_as_they_are():
    names = ("gathers", "hits", "misses", "wasted", "stall_seconds")
    names += ("gather_bytes_sent", "reduce_bytes_sent")
    peaks = ("peak_idle_bytes", "peak_gathered_bytes", "peak_live_bytes")
    before = {name: 10 * i for i, name in enumerate(names)} | dict.fromkeys(peaks, 100)
    after = {name: 10 * i + 3 * i for i, name in enumerate(names)} | dict.fromkeys(peaks, 120)
    expected = {name: i for i, name in enumerate(names)} | dict.fromkeys(peaks, 120)
    assert zero3_worker.a_step(before, {**after, "stage": 3, "units": []}, 3) == expected


# --- without ranks: what rank 0 would write ---

STATS = {"gather_bytes_sent": 600_000, "reduce_bytes_sent": 400_128, "peak_gathered_bytes": 500_000}


def outcome(plan: Plan, us: float, **changes: object) -> dict[str, object]:
    cut = sizes(TINY, plan.blocks_per_unit)
    traffic = Traffic() if plan.kind == COMPUTE else zero3_limits.sharded(cut.units, cut.root, 2)
    return {
        "plan": asdict(plan),
        "relative_error": 1e-7,
        "error": None,
        "forward_us": [us / 3, us / 3, us / 2],
        "step_us": [us, us, 1.5 * us],
        "sent": [1000.0, 1000.0, 1000.0],
        "cpu_us": [0.8 * us, 0.8 * us, 1.2 * us],
        "stats": STATS if plan.kind == OURS else None,
        "traffic": asdict(traffic),
        **changes,
    }


@pytest.fixture
def ranks(monkeypatch):
    """Ranks that are not started: they leave `ranks.outcomes`, then raise `ranks.error`."""

    class Ranks:
        def __init__(self):
            self.outcomes = [
                outcome(Plan(COMPUTE), 3000.0),
                outcome(Plan(OURS, 1, 0, "0"), 6000.0),
                outcome(Plan(OURS, 2, 0, "0"), 5000.0),
            ]
            self.error = self.hosts = self.order = None

        def run(self, command, hosts, **options):
            self.hosts, self.order = hosts, zero3_worker.Order.from_json(command[-2])
            record = {"model": "tiny", "world": len(hosts), "bandwidth": 120e6}
            line = json.dumps({**record, "outcomes": self.outcomes})
            Path(command[-1]).write_text(line + "\n")
            if self.error is not None:
                raise self.error

    found = Ranks()
    monkeypatch.setattr(zero3, "run_ranks", found.run)
    return found


def test_a_row_is_its_schedule_as_counted(ranks, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["zero3", "--quick", "--rate", "none", "--out", str(out)]) == 0
    step = next(row for row in zero3_rows.read(out) if row.op == zero3_rows.STEP and row.stats)
    cut = sizes(TINY)
    assert step.wire_bytes == STATS["gather_bytes_sent"] + STATS["reduce_bytes_sent"]
    assert step.full_wire_bytes == 1.5 * sum(cut.parameters)
    assert (step.us, step.compute_us, step.peak_gathered_bytes) == (6000.0, 3000.0, 500_000)
    assert step.core_share == 0.8
    ends = 2 * (cut.units[0] / 2) / 120e6 * 1e6
    assert step.limit_us == pytest.approx(1_000_128 / 120 + ends, rel=1e-3)
    assert step.full_limit_us == pytest.approx(step.full_wire_bytes / 120 + ends, rel=1e-3)


def test_a_sweep_is_a_table_and_a_chart(ranks, tmp_path, capsys):
    chart, out = tmp_path / "chart.svg", tmp_path / "rows.jsonl"
    arguments = ["zero3", "--sweep", "--rate", "none", "--models", "tiny", "--out", str(out)]
    assert main([*arguments, "--chart", str(chart)]) == 0
    (name, plans) = ranks.order.models[0]
    assert name == "tiny" and {plan.kind for plan in plans} == {COMPUTE, OURS}
    assert {plan.blocks_per_unit for plan in plans if plan.kind == OURS} == {1, 2, 3}
    printed = capsys.readouterr().out
    assert "| 2 | 0 | 0.5 | 1.7 | 5.0 |" in printed
    first = chart.read_bytes()
    assert b"<!-- 2 blocks a unit -->" in first and b"3 blocks a unit" not in first
    assert main(["zero3", "--read", str(out), "--chart", str(chart)]) == 0
    assert chart.read_bytes() == first  # the same rows, the same file
    assert "| 2 | 0 | 0.5 | 1.7 | 5.0 |" in capsys.readouterr().out


def test_a_wrong_variant_is_an_exit_status_and_has_no_time(ranks, capsys):
    changes = {"forward_us": [], "step_us": [], "sent": [], "traffic": None}
    wrong = outcome(Plan(DDP), 1.0, error="wrong: loss: relative error 1e-02", **changes)
    ranks.outcomes = [*ranks.outcomes, wrong]
    assert main(["zero3", "--quick", "--rate", "none"]) == 1
    printed = capsys.readouterr().out
    assert "| ddp | wrong | - |" in printed
    assert "- ddp, not timed: wrong: loss: relative error 1e-02" in printed


def test_an_interrupt_keeps_the_models_that_are_done(ranks, tmp_path, capsys):
    ranks.error, out = KeyboardInterrupt(), tmp_path / "rows.jsonl"
    assert main(["zero3", "--quick", "--rate", "none", "--out", str(out)]) == 130
    assert len(zero3_rows.read(out)) == 6
    captured = capsys.readouterr()
    assert "### ZeRO-3, tiny" in captured.out and "interrupted" in captured.err


def test_where_links_cannot_be_shaped_it_says_why(ranks, monkeypatch, capsys):
    monkeypatch.setattr("tpkernels.benchmarks.shaped_hosts.cannot_shape", lambda: "no such luck")
    assert main(["zero3", "--quick"]) == 0
    assert ranks.hosts == [Host(), Host()]
    captured = capsys.readouterr()
    assert "links are not shaped: no such luck" in captured.err and "unshaped" in captured.out
    assert main(["zero3", "--quick", "--rate", "1gbit"]) == 2  # asked for
    assert "--rate 1gbit: no such luck. Fix: " in capsys.readouterr().err


def test_the_options_make_the_plans(ranks):
    arguments = ["--models", "tiny", "--budgets", "0", "2units", "1.5MiB", "--units", "1", "2"]
    chosen = ["--variants", "ddp", "ours", "--repeats", "2", "--seconds", "9", "--hosts", "3"]
    assert main(["zero3", "--rate", "none", *arguments, *chosen]) == 0
    assert len(ranks.hosts) == 3
    order = ranks.order
    assert (order.repeats, order.seconds) == (2, 9)
    ((_, plans),) = order.models
    assert [plan.name for plan in plans] == [
        "compute",
        "ddp",
        "ours prefetch=0",
        "ours prefetch=2units",
        "ours prefetch=1.5MiB",
        "ours prefetch=0 blocks=2",
        "ours prefetch=2units blocks=2",
        "ours prefetch=1.5MiB blocks=2",
    ]
    one, two = sizes(TINY, 1).units[0], sizes(TINY, 2).units[0]
    budgets = [plan.prefetch_bytes for plan in plans[2:]]
    assert budgets == [0, 2 * one, 3 << 19, 0, 2 * two, 3 << 19]
    with pytest.raises(RuntimeError, match="never started"):
        ranks.error = RuntimeError("never started")
        main(["zero3", "--rate", "none"])
    assert [name for name, _ in ranks.order.models] == ["6x512", "12x768"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "'fast' is not a rate"),
        (["--rate", "1kbit"], "'1kbit' is not a rate"),
        (["--hosts", "1"], "'1' is not a number of hosts; allowed: 2 to 254"),
        (["--budgets", "much"], "'much' is not a prefetch budget"),
        (["--budgets", "-1"], "'-1' is not a prefetch budget"),
        (["--units", "5", "--quick"], "--units 5: tiny has 4 blocks"),
        (["--models", "huge"], "invalid choice: 'huge'"),
        (["--variants", "fsdp1"], "invalid choice: 'fsdp1'"),
        (["--out", "/absent/rows.jsonl"], "--out /absent/rows.jsonl: its directory is not there"),
        (["--chart", "/tmp/c.pdf"], "its suffix is '.pdf'; allowed: .svg, .png"),
        (["--read", "/absent/rows.jsonl"], "/absent/rows.jsonl cannot be read"),
    ],
    ids=str,
)
def test_bad_values_are_one_line_and_exit_2(arguments, message, capsys):
    try:
        status = main(["zero3", *arguments])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{", "line 1: not JSON"),
        ("[]", "its schema is None"),
        ('{"schema": "tpkernels-bench-1"}', "its schema is 'tpkernels-bench-1'"),
        (f'{{"schema": "{zero3_rows.SCHEMA}"}}', "not a row of this benchmark"),
    ],
    ids=["empty", "cut", "list", "other", "fields"],
)
def test_files_that_are_not_its_rows(text, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert main(["zero3", "--read", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_chart_needs_ours_with_a_time(ranks, tmp_path, capsys):
    ranks.outcomes = ranks.outcomes[:1]
    arguments = ["zero3", "--quick", "--rate", "none", "--chart", str(tmp_path / "c.png")]
    assert main(arguments) == 2
    assert "no row of ours has a time" in capsys.readouterr().err


def test_the_latest_of_a_variant_is_shown(ranks, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert main(["zero3", "--quick", "--rate", "none", "--out", str(out)]) == 0
    found = zero3_rows.read(out)
    later = [replace(row, us=1.0) for row in found[:1]]
    ((_, pairs),) = zero3_rows.of_model([*found, *later]).items()
    assert pairs[0][0].us == 1.0 and len(pairs) == 3


@pytest.mark.skipif(not BENCH.is_dir(), reason="needs the repository")
def test_the_script_is_the_program(monkeypatch):
    given = []
    monkeypatch.setattr("tpkernels.benchmarks.command.main", lambda argv: given.append(argv) or 7)
    monkeypatch.setattr(sys, "argv", ["bench_zero3.py", "--option"])
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / "bench_zero3.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "harness", raising=False)
    assert ended.value.code == 7 and given == [["zero3", "--option"]]


@pytest.mark.parametrize("text", ["-1", "0", "nan", "soon"])
def test_a_time_that_is_none_names_its_own_option(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["zero3", "--seconds", text])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert f"'{text}' is not a time" in error and "argument --seconds: " in error
    assert "--budget" not in error
