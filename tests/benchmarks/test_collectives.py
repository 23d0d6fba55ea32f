"""`tpkernels bench collectives`: exact checks on real ranks, columns, options, rows, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels.benchmarks import collectives_options, collectives_rows, ranks
from tpkernels.benchmarks.collectives import run_exchange
from tpkernels.benchmarks.collectives_backends import Backend, absent, through_c10d
from tpkernels.benchmarks.collectives_ops import (
    BARRIER,
    DTYPES,
    OPS,
    SPLITTING,
    Buffers,
    Exchange,
)
from tpkernels.benchmarks.collectives_rows import CollectiveRow, bandwidths, bus_factor
from tpkernels.benchmarks.command import main
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.turns import Timed, Turns
from tpkernels.cli import CommandParser
from tpkernels.comm import tpshm

BENCH = Path(__file__).parents[2] / "bench"
FEW = Turns(seconds=0.01, least=3, most=3)
CPU = torch.device("cpu")
HAVE_TPSHM = absent("tpshm", "cpu") is None


def joined(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group.rank(), group.size(), CPU, group, None, 2)


def exchange(op: str, group: dist.ProcessGroup, elements: int = 12, **options: str) -> Exchange:
    given = {"dtype": "fp32", "redop": "sum", **options}
    return Exchange(op, elements, rank=group.rank(), world=group.size(), device=CPU, **given)


# --- exact results, on real ranks ---


def every_exchange(group: dist.ProcessGroup) -> list[tuple[object, ...]]:
    backend, found = through_c10d("gloo", group), []
    cases = [exchange(op, group, 0 if op == BARRIER else 12) for op in OPS]
    cases += [exchange("all_reduce", group, 13, dtype=dtype) for dtype in DTYPES]
    cases += [exchange("all_reduce", group, redop=redop) for redop in ("max", "min")]
    for case in cases:
        for result in run_exchange(case, [backend], joined(group), FEW):
            found.append((case.op, case.dtype, result.wrong, result.error, result.percentiles))
    return found


def test_gloo_is_right_and_timed(pool):
    for found in zip(*pool.run(every_exchange, world_size=3), strict=True):
        for op, dtype, wrong, error, times in found:
            assert (wrong, error) == (0, None), (op, dtype)
            assert 0 < times[0] <= times[1] <= times[2]
        assert len({each[4] for each in found}) == 1  # the slowest rank's, on all


def corrupted(group: dist.ProcessGroup, op: str, clean_calls: int) -> list[tuple[object, ...]]:
    """Rank 1's result has two wrong elements, from some call on."""
    case, honest, calls = exchange(op, group), through_c10d("gloo", group), []

    def bind(case: Exchange, given: torch.Tensor, taken: torch.Tensor) -> Callable[[], object]:
        right = honest.call(case, given, taken)

        def call() -> None:
            right()
            calls.append(1)
            if group.rank() == 1 and len(calls) > clean_calls:
                (given if case.in_place else taken)[2:4] += 1

        return call

    broken = replace(honest, name="broken", call=bind)
    found = run_exchange(case, [honest, broken], joined(group), FEW)
    return [(each.backend, each.wrong, each.error, each.percentiles is None) for each in found]


@pytest.mark.parametrize("op", [op for op in OPS if op != BARRIER])
@pytest.mark.parametrize("clean_calls", [0, 1], ids=["always", "after the first call"])
def test_wrong_elements_are_counted_and_not_timed(op, clean_calls, pool):
    for found in pool.run(corrupted, op, clean_calls, world_size=2):
        assert found == [("gloo", 0, None, False), ("broken", 2, "wrong: 2 elements", True)]


def misplaced(group: dist.ProcessGroup, op: str) -> int:
    """As if a rank's parts were at another rank's place, or nothing had been sent."""

    def bind(case: Exchange, given: torch.Tensor, taken: torch.Tensor) -> Callable[[], object]:
        return lambda: taken.copy_(given.repeat(2)[: len(taken)])

    backend = Backend("lazy", bind, lambda case: None)
    (found,) = run_exchange(exchange(op, group, 24), [backend], joined(group), FEW)
    return found.wrong


@pytest.mark.parametrize("op", [op for op in OPS if op != BARRIER])
def test_who_sends_nothing_is_wrong(op, pool):
    assert all(wrong > 0 for wrong in pool.run(misplaced, op, world_size=2))


def failing(group: dist.ProcessGroup) -> list[tuple[object, ...]]:
    def bind(case: Exchange, given: torch.Tensor, taken: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            if group.rank() == 1:
                raise RuntimeError("no such op")

        return call

    honest = through_c10d("gloo", group)
    broken = replace(honest, name="broken", call=bind)
    absent = replace(honest, name="absent", refusal=lambda case: "it has only barrier")
    found = run_exchange(
        exchange("all_reduce", group), [absent, broken, honest], joined(group), FEW
    )
    return [(each.backend, each.error, each.percentiles is None) for each in found]


def test_what_one_rank_raises_is_the_rows_error(pool):
    for found in pool.run(failing, world_size=2):
        assert found == [
            ("broken", "cannot run: RuntimeError: no such op", True),
            ("gloo", None, False),
        ]


def test_inputs_are_never_zero_and_results_are_exact():
    for op in OPS[:-1]:
        for redop in ("sum", "avg", "max", "min"):
            case = Exchange(op, 35, "bf16", redop, 1, 5, CPU)
            assert case.input_of(1).min() > 0
            kept = case.count if op == "reduce_scatter" else case.elements
            assert len(case.expected()) == kept


def test_a_sum_that_the_dtype_cannot_represent_is_refused():
    case = Exchange("all_reduce", 1000, "int8", "sum", 0, 64, CPU)
    with pytest.raises(ranks.ConfigError, match="int8: it cannot represent the sum over 64 ranks"):
        case.expected()


# --- buffers and turns ---


def test_rotated_buffers_exceed_the_cache_and_share_no_line():
    case = Exchange("all_reduce", 100, "fp32", "sum", 0, 2, CPU)
    buffers = Buffers(case, rotate_bytes=4000)
    starts = [each.data_ptr() for each in buffers.inputs]
    assert len(starts) * 400 > 4000 and all(start % 64 == 0 for start in starts)
    assert min(b - a for a, b in pairwise(starts)) >= 448  # 7 lines
    buffers.inputs[3].zero_()
    buffers.refresh()
    assert torch.equal(buffers.inputs[3].long(), case.input_of(0))


def test_buffers_are_put_back_before_values_overflow():
    refreshed, used = [], []
    timed = Timed("x", [lambda: used.append(1)], lambda: refreshed.append(1), lasting=10)
    assert timed.most_calls() == 8  # with two that are not timed
    for _ in range(3):
        timed.take(7)
    assert len(refreshed) == 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world", [2, 8])
def test_timed_sums_stay_finite(dtype, world):
    case = Exchange("all_reduce", 4, dtype, "sum", 0, world, CPU)
    value = torch.tensor(3.0, dtype=DTYPES[dtype])
    for _ in range(case.lasting):
        value = value * world
    assert value.isfinite() or case.lasting == 3  # the least that a batch needs


# --- columns ---


@pytest.mark.parametrize(
    ("op", "world", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_nccl_tests(op, world, factor):
    assert bus_factor(op, world) == factor
    algorithm, bus = bandwidths(op, 4_000_000, 1000.0, world)
    assert algorithm == 4.0 and bus == 4.0 * factor


def test_without_a_time_or_bytes_there_is_no_bandwidth():
    assert bandwidths("all_reduce", 8, None, 2) is None and bandwidths(BARRIER, 0, 1.0, 2) is None


def test_size_and_count_are_nccl_tests():
    for op in OPS:
        case = Exchange(op, 12, "bf16", "sum", 0, 3, CPU)
        assert case.size == 24  # bytes of the whole
        assert case.count == (4 if op in SPLITTING else 12)


# --- the program ---


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": "", "TPKERNELS_TIMEOUT": "30", **variables}


def started(*command: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


QUICK = ["--seconds", "0.02", "--commit", "abc"]


def test_a_real_run(tmp_path):
    out, markdown = tmp_path / "rows.jsonl", tmp_path / "table.md"
    arguments = ["--sizes", "768,13", "--dtype", "bf16", "--out", str(out)]
    arguments += ["--markdown", str(markdown), "--backends", "gloo", *["tpshm"] * HAVE_TPSHM]
    arguments += ["direct"] * HAVE_TPSHM
    script = str(BENCH / "bench_collectives.py")
    process = started(script, *QUICK, *arguments, cwd=tmp_path)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Traceback" not in said and "[1/11] 0 s  all_reduce 768 bf16" in said
    header = next(line for line in printed.splitlines() if "size (B)" in line)
    columns = re_split(header.lstrip("#"))
    assert columns == list(collectives_rows._COLUMNS)
    found = collectives_rows.read(out)
    assert f"# {len(found)} rows appended to {out}" in printed
    assert [row.backend for row in found[: 1 + 2 * HAVE_TPSHM]] == (
        ["gloo", "tpshm", "direct"] if HAVE_TPSHM else ["gloo"]
    )
    assert {row.op for row in found} == set(OPS)
    for row in found:
        assert row.error is None and row.wrong == 0 and (row.world, row.commit) == (2, "abc")
        assert row.p20_us <= row.us <= row.p80_us and row.repetitions >= 7 and row.calls >= 1
        assert row.size == row.count * 2 * (2 if row.op in SPLITTING else 1)
        if row.op == BARRIER:
            assert row.busbw_gbs is None
        else:
            assert row.algbw_gbs == pytest.approx(row.size / row.us / 1e3, rel=1e-3)
            expected = row.algbw_gbs * bus_factor(row.op, 2)
            assert row.busbw_gbs == pytest.approx(expected, rel=1e-3)
    by_case: dict[tuple[str, int], dict[str, CollectiveRow]] = {}
    for row in found:
        by_case.setdefault((row.op, row.size), {})[row.backend] = row
    assert ("all_gather", 24) in by_case  # 13 elements, rounded down to a multiple of the ranks
    for rows in by_case.values():
        for row in rows.values():
            assert row.ratio_to_gloo == pytest.approx(rows["gloo"].us / row.us, rel=1e-3)
    assert markdown.read_text().count("### ") == len(OPS)
    assert "### all_reduce, bf16, 2 ranks, sum, warm" in markdown.read_text()


def re_split(line: str) -> list[str]:
    """A header's names: some have one space within."""
    names = collectives_rows._COLUMNS
    found, rest = [], line.strip()
    while rest:
        name = next((name for name in names if rest.startswith(name)), rest)
        found.append(name)
        rest = rest[len(name) :].strip()
    return found


def test_under_torchrun(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(BENCH / "bench_collectives.py"), *QUICK]
    chosen = ["--ops", "all_reduce", "--sizes", "8", "--backends", "gloo"]
    process = started(*launcher, *script, *chosen, cwd=tmp_path)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    lines = [line.split()[:5] for line in printed.splitlines() if not line.startswith("#")]
    assert lines == [["32", "8", "fp32", "sum", "gloo"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_keeps_the_rows_so_far(number, tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = ",".join(map(str, range(2, 300)))
    script = [str(BENCH / "bench_collectives.py"), *QUICK, "--sizes", sizes, "--out", str(out)]
    chosen = ["--ops", "all_reduce", "--backends", "gloo"]
    process = started(*script, *chosen, cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 150
    while not (out.exists() and out.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said and "Traceback" not in said
    found = collectives_rows.read(out)  # every line is whole
    assert 3 <= len(found) < 298
    assert f"{found[0].size} " in printed
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no rank is left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "1"], "--nproc 1: nothing to exchange; allowed: from 2. Fix: --nproc 2"),
        (["--nproc", "x"], "'x' is not a number of ranks"),
        (["--ops", "gather"], "invalid choice: 'gather'"),
        (["--sizes", "8,x"], "'8,x' is not a list of sizes"),
        (["--sizes", "0"], "'0' is not a list of sizes"),
        (["--sizes", "1"], "a size of 1 elements of fp32 is less than one a rank"),
        (["-b", "8X"], "'8X' is not a number of bytes"),
        (["-b", "8M", "-e", "8K"], "--max-bytes 8192 is below --min-bytes 8388608"),
        (["-b", "4", "-e", "1K"], "a size of 1 elements of fp32 is less than one a rank"),
        (["-b", "1K", "-e", "1G", "-f", "1.01"], "--factor 1.01: more than 64 sizes"),
        (["-f", "1"], "'1' is not a factor; allowed: greater than 1"),
        (["--sizes", "8", "-b", "8"], "--sizes and --min-bytes exclude each other"),
        (["--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["--redop", "xor"], "invalid choice: 'xor'"),
        (["--backends", "mpi"], "invalid choice: 'mpi'"),
        (["--backends", "nccl"], "--backends nccl: it is not for cpu. Fix: one of gloo, tpshm"),
        (["--backends", "direct", "--ops", "broadcast"], "direct: it has only all_reduce. Fix:"),
        (["--warm", "--rotate"], "not allowed with argument"),
        (["--seconds", "0"], "'0' is not a time"),
        (["--out", "/absent/rows.jsonl"], "its directory is not there"),
        (["--markdown", "/"], "it is a directory"),
        (["--read", "/absent"], "/absent cannot be read"),
    ],
    ids=str,
)
def test_bad_values_are_one_line_and_exit_2(arguments, message, capsys):
    if arguments[:2] == ["--backends", "direct"] and not HAVE_TPSHM:
        message = f"--backends direct: {absent('direct', 'cpu')}"
    try:
        status = main(["collectives", *arguments])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1


def test_a_backend_that_is_not_there_is_refused_with_the_fix(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["collectives", "--backends", "deepspeed"]) == 2
    said = capsys.readouterr().err
    assert "deepspeed is not installed. Fix: pip install tpkernels[peers]" in said
    monkeypatch.setattr(tpshm, "availability", lambda: (False, "no native code", "build it"))
    assert main(["collectives", "--backends", "tpshm"]) == 2
    assert "--backends tpshm: no native code. Fix: build it" in capsys.readouterr().err
    assert main(["mlp", "--nproc", "2", "--variants", "ours"]) == 2
    assert "--variants 'ours': no native code. Fix: build it" in capsys.readouterr().err


def test_another_number_of_ranks_than_the_launchers_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["collectives", "--nproc", "2"]) == 2
    assert "--nproc 2 under a launcher that started 4 ranks" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_gpus_that_are_not_there(capsys):
    assert main(["collectives", "--device", "cuda"]) == 2
    assert "--device cuda: 2 ranks need a GPU each, torch sees 0" in capsys.readouterr().err


def test_sizes_from_bytes_are_nccl_tests():
    parser = CommandParser()
    collectives_options.add_options(parser)

    def counts(*arguments: str, dtype: str = "fp32") -> list[int]:
        return collectives_options.counts(parser.parse_args(list(arguments)), dtype, 2)

    assert counts("-b", "8", "-e", "64", "-f", "2") == [2, 4, 8, 16]
    assert counts("--min-bytes", "1K", dtype="bf16") == [512]
    assert counts("-b", "1K", "-e", "16K", "--factor", "4") == [256, 1024, 4096]
    assert counts("--sizes", "4,8", "16") == [4, 8, 16]
    assert counts() == [768, 12_288, 524_288, 2_097_152]


@pytest.mark.parametrize("command", [["bench", "collectives"], ["comm"]], ids=" ".join)
def test_help_names_every_option(command, capsys):
    from tpkernels.cli import main as command_line

    with pytest.raises(SystemExit) as ended:
        command_line([*command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: tpkernels {' '.join(command)}")
    options = ["--nproc", "--ops", "--sizes", "-b", "-e", "-f", "--dtype", "--redop", "--backends"]
    options += ["--device", "--warm", "--rotate", "--seconds", "--quick", "--out", "--markdown"]
    for option in (*options, "--read", "--commit", "tpshm", "deepspeed", "nccl"):
        assert option in shown, option


# --- files ---

ROW = CollectiveRow(
    op="all_reduce",
    size=3072,
    count=768,
    dtype="fp32",
    redop="sum",
    backend="gloo",
    world=2,
    us=500.0,
    p20_us=450.0,
    p80_us=600.0,
    algbw_gbs=0.006144,
    busbw_gbs=0.006144,
    wrong=0,
    ratio_to_gloo=1.0,
    repetitions=100,
    calls=2,
    in_place=True,
    cold=False,
    pinned=True,
    cores=2,
    others_share=0.01,
    error=None,
    device="Made-up CPU",
    threads=1,
    versions={"torch": "2.13.0", "cuda": "none"},
    commit="0123456789ab",
    date="2026-11-30",
)


def written(path: Path, *rows: CollectiveRow) -> Path:
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return path


def test_reading_shows_the_latest_rows(tmp_path, capsys):
    ours = replace(ROW, backend="direct", us=5.0, ratio_to_gloo=100.0)
    theirs = replace(ROW, backend="deepspeed", us=7.0, ratio_to_gloo=71.4)
    failed = replace(ROW, backend="tpshm", us=None, wrong=None, error="cannot run: no")
    rows = [replace(ROW, us=900.0), ROW, failed, ours, replace(theirs, others_share=0.4)]
    path = written(tmp_path / "rows.jsonl", *rows)
    assert main(["collectives", "--read", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| 3072 | 768 | fp32 | sum | gloo | 500 | 450 to 600 |" in shown and "900" not in shown
    assert "- tpshm, 768, not timed: cannot run: no" in shown
    assert "- deepspeed / direct: 768: 1.40" in shown
    assert "- other programs took 1% to 40% of the cores meanwhile" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("{", "line 1: not JSON"),
        ('{"schema": "other"}', "its schema is 'other', allowed: 'tpkernels-bench-collectives-1'"),
        (json.dumps({**asdict(ROW), "more": 1}), "line 1: not a row of this benchmark"),
    ],
    ids=["empty", "not json", "other schema", "more fields"],
)
def test_what_is_not_rows_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert main(["collectives", "--read", str(path)]) == 2
    said = capsys.readouterr().err
    assert message in said and "Fix: write it with `tpkernels bench collectives --out FILE`" in said
