"""`tpkernels bench mlp --nproc N`: checked variants on real ranks, limits, rows and options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.benchmarks import mlp_ranks, mlp_ranks_rows
from tpkernels.benchmarks.collectives_backends import absent
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.mlp_ranks_rows import Ceilings, MLPRanksRow, Result
from tpkernels.benchmarks.mlp_ranks_variants import (
    DENSE,
    DTENSOR,
    NAMES,
    ON_TPSHM,
    OURS,
    OURS_GLOO,
    Shape,
    state,
    truth,
)
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.turns import Timed, Turns, measure

BENCH = Path(__file__).parents[2] / "bench"
FEW = Turns(seconds=0.01, least=3, most=3)
TINY = Shape(3, 8, 24)
HAVE_TPSHM = absent("tpshm", "cpu") is None


def joined(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group.rank(), group.size(), torch.device("cpu"), group, None, 2)


# --- on real ranks ---


def every_variant(group: dist.ProcessGroup, dtype: torch.dtype, rotate: int) -> list[Result]:
    groups = dict.fromkeys((DENSE, DTENSOR, OURS_GLOO), group)
    with torch.no_grad():
        return mlp_ranks.run_shape(TINY, dtype, groups, joined(group), FEW, rotate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotate", [0, 4000], ids=["warm", "rotated"])
def test_all_are_right_and_timed(dtype, rotate, pool):
    found = pool.run(every_variant, dtype, rotate, world_size=2)
    assert found[0] == found[1]  # the slowest rank's times, the same on both
    assert [each.name for each in found[0]] == [DENSE, DTENSOR, OURS_GLOO]
    for each in found[0]:
        assert each.error is None and 0 <= each.relative_error < 0.01
        p20, p50, p80 = each.percentiles
        assert 0 < p20 <= p50 <= p80 and each.repetitions == 3 and each.calls >= 1
    assert [each.served_by for each in found[0]] == [None, None, "gemm_act, GEMM, all-reduce"]


def one_is_wrong(group: dist.ProcessGroup) -> list[Result]:
    """Ours gives a wrong result on rank 1 only; DTensor raises there."""
    honest = mlp_ranks.build

    class Wrong(nn.Module):
        def __init__(self, inner: nn.Module, name: str) -> None:
            super().__init__()
            self.inner, self.name = inner, name

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if group.rank() == 1 and self.name == DTENSOR:
                raise RuntimeError("lost")
            return y * 1.01 if group.rank() == 1 and self.name == OURS_GLOO else y

    def build(name: str, *arguments: object) -> nn.Module:
        return Wrong(honest(name, *arguments), name)

    mlp_ranks.build = build
    try:
        return every_variant(group, torch.float32, 0)
    finally:
        mlp_ranks.build = honest


def test_what_is_wrong_on_one_rank_is_not_timed_on_any(pool):
    for dense, dtensor, ours in pool.run(one_is_wrong, world_size=2):
        assert dense.error is None and dense.percentiles
        assert dtensor.error == "cannot run: RuntimeError: lost" and dtensor.percentiles is None
        assert ours.error.startswith("wrong: y: relative error 1.0")
        assert ours.percentiles is None and ours.relative_error == pytest.approx(0.01, rel=1e-3)


def alone(group: dist.ProcessGroup) -> tuple[int, int, list[float]]:
    together, single = [], []
    variants = [
        Timed("together", [lambda: together.append(1)]),
        Timed("alone", [lambda: single.append(1)], alone=True),
    ]
    measure(variants, joined(group), FEW)
    return len(together), len(single), variants[1].us


def test_dense_runs_on_rank_0_while_the_others_wait(pool):
    first, second = pool.run(alone, world_size=2)
    assert first[0] == second[0] > 0
    assert first[1] > 0 and second[1] == 0
    assert first[2] == second[2] and min(first[2]) > 0


def test_the_truth_is_the_mlp_in_float64():
    weights = state(TINY, torch.bfloat16, 0)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    h = x.double() @ weights["up_proj.weight"].double().T + weights["up_proj.bias"].double()
    h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    y = h @ weights["down_proj.weight"].double().T + weights["down_proj.bias"].double()
    torch.testing.assert_close(truth(TINY, weights, x), y)
    other = state(TINY, torch.bfloat16, 1)
    assert not torch.equal(other["up_proj.weight"], weights["up_proj.weight"])


# --- rows ---


def made(m: int = 16, cold: bool = False) -> list[MLPRanksRow]:
    results = [
        Result(DENSE, None, 1e-7, None, (90.0, 100.0, 110.0), 50, 4),
        Result(DTENSOR, None, 1e-7, None, (190.0, 200.0, 210.0), 50, 2),
        Result(OURS_GLOO, "x", None, "wrong: y: NaN"),
        Result(OURS, "fused: one native call", 1e-7, None, (24.0, 25.0, 26.0), 50, 20, 0.01),
    ]
    origin = mlp_ranks_rows.Origin("CPU", "CPU", 1, {"torch": "2.13.0"}, "abc", "2026-11-30")
    ceilings = Ceilings(flops=1e12, dense_read=4e9, split_read=8e9)
    return mlp_ranks_rows.make_rows(
        Shape(m, 100, 200), "bfloat16", 2, 2, results, ceilings, origin, cold=cold, pinned=True
    )


def test_limits_are_bytes_or_arithmetic_of_one_rank():
    dense, _, wrong, ours = made(m=1)  # 40,000 weights of 2 bytes; 80,000 operations
    assert (dense.weight_bytes, dense.limit_us) == (80_000, 20.0)
    assert (ours.weight_bytes, ours.limit_us, ours.percent_of_limit) == (40_000, 5.0, 20.0)
    assert made(m=1000)[3].limit_us == 40.0  # arithmetic: half of 80e6 / 1e12
    assert (ours.ratio_to_dense, ours.ratio_to_dtensor) == (4.0, 8.0)
    assert wrong.us is None and wrong.percent_of_limit is None and wrong.error == "wrong: y: NaN"


def test_rows_are_read_back_and_shown(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    old = [replace(row, us=999.0) for row in made()]
    rows = [*old, *made(), *made(cold=True)]
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert mlp_ranks_rows.read(path) == rows
    target = tmp_path / "table.md"
    assert main(["mlp", "--nproc", "2", "--read", str(path), "--markdown", str(target)]) == 0
    shown = target.read_text()
    assert shown.count("### ") == 2 and "999" not in shown
    assert "### MLP forward, bfloat16, 2 ranks, weights warm" in shown
    assert (
        "| 16, 100, 200 | 100 (90.0 to 110) | 200 (190 to 210) | wrong | 25.0 (24.0 to 26.0)"
        in (shown)
    )
    assert "| fused: one native call | 4.00 | 8.00 | 5.0 | 20 | 20 |" in shown
    assert "- ours gloo, M=16, not timed: wrong: y: NaN" in shown


# --- the program ---


def test_a_real_run(tmp_path):
    out = tmp_path / "rows.jsonl"
    script = [str(BENCH / "bench_mlp.py"), "--nproc", "2", "--quick", "--warm", "--commit", "abc"]
    shape = ["--widths", "16,64", "--m", "1", "3", "--dtype", "bf16", "--seconds", "0.02"]
    done = subprocess.run(
        [sys.executable, *script, *shape, "--out", str(out)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "TPKERNELS_TIMEOUT": "30"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stderr and "Traceback" not in done.stderr
    assert "### MLP forward, bfloat16, 2 ranks, weights warm" in done.stdout
    found = mlp_ranks_rows.read(out)
    assert f"{len(found)} rows appended to {out}" in done.stdout
    names = [name for name in NAMES if HAVE_TPSHM or name not in ON_TPSHM]
    assert [row.implementation for row in found] == names * 2
    for row in found:
        assert row.error is None and row.us > 0 and row.repetitions >= 7
        assert (row.dtype, row.world, row.cold, row.commit) == ("bfloat16", 2, False, "abc")
        assert row.percent_of_limit == pytest.approx(100 * row.limit_us / row.us, rel=1e-3)
        if row.implementation == OURS:
            assert row.served_by == "fused: one native call"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1"], "--nproc 1: nothing to exchange; allowed: from 2"),
        (["--nproc=0"], "'0' is not a number of ranks"),
        (["--nproc", "2", "--widths", "8"], "'8' is not d_model,d_ff; allowed: two whole numbers"),
        (["--nproc", "4", "--widths", "8,3"], "--widths 8,3: d_ff must be at least the 4 ranks"),
        (["--nproc", "2", "--variants", "nope"], "invalid choice: 'nope'"),
        (["--nproc", "2", "--dtype", "fp64"], "invalid choice: 'fp64'"),
        (["--nproc", "2", "--m", "0"], "'0' is not a whole number"),
        (["--nproc", "2", "--shapes", "1,2,3"], "unrecognized arguments: --shapes"),
        (["--nproc", "2", "--warm", "--rotate"], "not allowed with argument"),
        (["--nproc", "2", "--out", "/"], "it is a directory"),
    ],
    ids=str,
)
def test_bad_values_are_one_line_and_exit_2(arguments, message, capsys):
    try:
        status = main(["mlp", *arguments])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["mlp", "--nproc", "2", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tpkernels bench mlp --nproc N [options]")
    options = ["--nproc", "--m", "--widths", "--dtype", "--variants", "--warm", "--rotate"]
    for option in (*options, "--seconds", "--quick", "--out", "--markdown", "--read", "--commit"):
        assert option in shown, option
    with pytest.raises(SystemExit):
        main(["mlp", "--help"])
    assert "--nproc N" in capsys.readouterr().out
