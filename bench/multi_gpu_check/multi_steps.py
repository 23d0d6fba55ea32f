"""What is run between GPUs, in order of how much it tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from check_run import Refused
from plan import NEEDS_CUDA, Settings, build_step, machine_step
from runner import Result, Runner, Step
from workspace import Workspace

HERE = Path(__file__).resolve().parent
MOST_RANKS = 8
DRY_RANKS = 2
_OF_GPU_CHECK = "bench/gpu_check.sh --dry-run has it"
_LEFT_OUT_QUICK = "not part of --quick"


def steps(
    settings: Settings, space: Workspace, runner: Runner, results: list[Result]
) -> Iterator[Step]:
    """All steps; ``results`` has those of the ones before.

    Raises:
        Refused: fewer than two GPUs, without ``--dry-run``.
    """
    yield machine_step(settings)
    ranks = _ranks(settings, results[-1])
    needs_cuda = NEEDS_CUDA if settings.dry_run else None
    topology = (sys.executable, str(HERE / "topology.py"))
    yield Step("topology", topology, 60, 5, skipped=needs_cuda)
    yield build_step(settings)
    doctor = (sys.executable, "-m", "tpkernels", "doctor")
    yield Step("doctor", doctor, 30, skipped=_OF_GPU_CHECK if settings.dry_run else None)
    device = "cpu" if settings.dry_run else "cuda"
    size = ("--quick",) if settings.quick else ()
    yield Step("strategies", _launch(ranks, "strategies.py", device, *size), 240, 30)
    yield Step("graphs", _launch(ranks, "graphs.py"), 180, 30, skipped=needs_cuda)
    # A killed rank ends its process group: no launcher that would end the others first.
    killed = (sys.executable, str(HERE / "killed_rank.py"), device, str(ranks))
    yield Step("killed rank", killed, 180, 30)
    yield Step("peers' memory", _launch(ranks, "peers.py"), 120, 20, skipped=needs_cuda)
    rows = str(settings.out / "results.jsonl")
    tune = (sys.executable, "-m", "tpkernels", "bench", "overlap", "--tune")
    yield Step(
        "overlap",
        _launch(
            ranks, "overlap.py", device, "--out", rows, "--commit", settings.commit, *size,
            "--seconds", "{seconds}",
        ),
        300 if settings.quick else 700,
        60,
    )  # fmt: skip
    yield Step(
        "tune",
        (*tune, "--nproc", str(ranks), "--device", "cuda"),
        300,
        60,
        skipped=needs_cuda
        or (_LEFT_OUT_QUICK if settings.quick else None)
        or _no_cuda_tuning(space),
        informative=True,  # what was not tuned is not cut
    )


def _ranks(settings: Settings, machine: Result) -> int:
    """One a GPU, up to :data:`MOST_RANKS`."""
    if settings.dry_run:
        return DRY_RANKS
    lines = machine.output.splitlines()
    gpus = sum(line.startswith("gpu ") for line in lines)
    if gpus < 2:
        found = next((line for line in lines if line.startswith("torch: ")), "torch: not there")
        raise Refused(
            f"{found}; {gpus} CUDA devices are seen, and two are needed. Fix: run on a machine "
            "with two GPUs or more, or give --dry-run to check the programs on CPU"
        )
    return min(gpus, MOST_RANKS)


def _launch(ranks: int, program: str, *arguments: str) -> tuple[str, ...]:
    start = (sys.executable, str(HERE / "start_ranks.py"), str(ranks))
    return (*start, str(HERE / program), *arguments)


def _no_cuda_tuning(space: Workspace) -> str | None:
    """Why this version does not tune between GPUs, as far as its source says; None if it does."""
    source = space.tree / "tpkernels" / "benchmarks" / "overlap.py"
    if not source.is_file() or '"--device"' not in source.read_text():
        return "tpkernels bench overlap --tune measures CPU ranks only"
    return None
