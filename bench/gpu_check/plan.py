"""What is run, in order of how much it tells; should time run out, the end is missing."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from machine import nvcc
from runner import Step
from workspace import Workspace

HERE = Path(__file__).resolve().parent
NEEDS_CUDA = "needs CUDA"
NOT_QUICK = "not part of --quick"
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
# Errors of API calls that torch and Triton try and handle are not what is looked for.
_SANITIZER_OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
_MACHINE_SECONDS = 150  # a first `import torch` may read gigabytes
_TESTS_NEED = ("pytest", "hypothesis")


@dataclass(frozen=True)
class Settings:
    """What was asked for; ``quick`` also in a dry run."""

    out: Path
    dry_run: bool
    quick: bool
    commit: str


def environment(settings: Settings, space: Workspace) -> dict[str, str]:
    """That of all steps: nothing set for other runs counts, and no cache outside is written."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TPKERNELS_") and name not in ("TRITON_INTERPRET", "WORLD_SIZE")
    }
    # Before what is set, which may hold another tpkernels.
    found = [str(space.tree), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(found)
    env["TPKERNELS_CACHE"] = str(space.cache)
    env.setdefault("TRITON_CACHE_DIR", str(space.scratch / "triton"))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(space.scratch / "inductor"))
    if (compiler := nvcc()) is not None:
        env["PATH"] = os.pathsep.join([env.get("PATH", ""), str(Path(compiler).parent)])
    if settings.dry_run:
        env["CUDA_VISIBLE_DEVICES"] = ""  # a dry run is the same with and without a GPU
    return env


def machine_step(settings: Settings) -> Step:
    """The facts: the first step, that decides whether there are others."""
    command = (sys.executable, str(HERE / "machine.py"), settings.commit)
    return Step("machine", command, _MACHINE_SECONDS, 1)


def steps(settings: Settings, space: Workspace, facts: dict[str, str]) -> list[Step]:
    """All steps after :func:`machine_step`, of ``facts`` as it printed them."""
    python, quick = sys.executable, settings.quick
    results, table = settings.out / "results.jsonl", str(settings.out / "report.md")
    needs_cuda = NEEDS_CUDA if settings.dry_run else None
    chart = ("--chart", str(settings.out / "chart.svg")) if _has(facts, "matplotlib") else ()
    absent = [f"{name} is not installed" for name in _TESTS_NEED if not _has(facts, name)]
    without = ", ".join(absent) or None
    tests: tuple[str, ...] = (
        "--results",
        str(settings.out / "junit.xml"),
        "--scratch",
        str(space.scratch),
    )
    return [
        build_step(settings),
        Step("doctor", (python, "-m", "tpkernels", "doctor"), 20),
        Step(
            "tests",
            (python, str(HERE / "gpu_tests.py"), *tests, *(["--quick"] * quick)),
            50 if quick else 150,
            skipped=without if settings.dry_run else None,
            failed=None
            if without is None
            else f"{without}. Fix: pip install {' '.join(_TESTS_NEED)}",
            env={"GPU_TESTS_EXAMPLES": "4"} if quick else {},
        ),
        *_measured(settings, (python, "-m", "tpkernels", "bench"), results),
        Step(
            "zero",
            (python, str(HERE / "zero_check.py"), "cpu" if settings.dry_run else "cuda"),
            60 if settings.dry_run else 40,
            10,
        ),
        _cuda_check(settings, space, facts),
        *(
            Step(
                tool,
                (*_SANITIZER, tool, *options, python, str(HERE / "small_kernels.py")),
                60,
                20,
                skipped=needs_cuda or (NOT_QUICK if quick else _missing("compute-sanitizer")),
                # Each tensor is an allocation of its own, so that its end is checked.
                env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                # What it reports of asynchronous copies is for a person to judge.
                informative=tool == "racecheck",
            )
            for tool, options in _SANITIZER_OPTIONS.items()
        ),
        Step(
            "report",
            (python, "-m", "tpkernels", "bench", "report", str(results), "--out", table, *chart),
            30,
            2,
            last=True,
        ),
    ]


def _measured(settings: Settings, bench: tuple[str, ...], results: Path) -> list[Step]:
    """Tuning and measuring, of the same sizes: what is not tuned is plain PyTorch by choice."""
    needs_cuda, quick = NEEDS_CUDA if settings.dry_run else None, settings.quick
    commit = ("--commit", settings.commit)
    out, planned = ("--out", str(results), *commit), ("--budget", "{seconds}")
    # K of 1600 and 5120, most and less to gain; 8 cases each, that of the README's table first
    models = ("--models", "gpt2-xl", "gpt3-13b")
    first = (*models, "--m", "8192", "--tp", *(["8"] if quick else ["1", "8"]))
    forward: tuple[str, ...] = (*models, "--m", "8192", *(["2048"] * (not quick)), "--tp", "1", "8")
    both: tuple[str, ...] = first  # forward, and forward with backward
    run: tuple[str, ...] = ("--device", "cuda", *planned, *(["--quick"] * quick))
    if settings.dry_run:
        run = ("--device", "cpu", "--shapes", "8,32,16", "--no-compile", "--budget", "5")
        forward = both = ()
    tune = (*bench, "tune", "--act", "gelu_tanh", *planned, *commit)
    return [
        Step(
            "tune gemm_gelu",
            (*tune, "--op", "gemm_act", *forward),
            25 if quick else 65,
            skipped=needs_cuda,
        ),
        Step(
            "bench gemm_gelu",
            (*bench, "gemm_gelu", *out, *run, *forward),
            35 if quick else 95,
            12,
        ),
        Step(
            "tune mlp",
            (*tune, "--op", "gemm_act_aux", "gemm_dact_dbias", *both),
            60,
            20,
            skipped=needs_cuda or (NOT_QUICK if quick else None),
        ),
        Step("bench mlp", (*bench, "mlp", *out, *run, *both), 30 if quick else 70, 12),
    ]


def build_step(settings: Settings) -> Step:
    """The extension: built, or in a dry run the one that was copied."""
    if settings.dry_run:  # a machine without a GPU may have few cores
        return Step("build", (sys.executable, str(HERE / "present.py")), 300)
    limit = 50 if settings.quick else 130
    return Step("build", (sys.executable, "-m", "tpkernels.build"), limit)


def _cuda_check(settings: Settings, space: Workspace, facts: dict[str, str]) -> Step:
    """nvcc of the CUDA sources by themselves: registers and spills; needs no GPU."""
    skipped = None
    if not sorted((space.tree / "csrc" / "kernels").glob("*.cu")):
        skipped = "this version has no CUDA sources"
    elif not _has(facts, "nvcc"):
        skipped = "no nvcc"
    elif settings.quick and not settings.dry_run:
        skipped = NOT_QUICK
    return Step("cuda-check", ("make", "-s", "cuda-check"), 60, skipped=skipped or _missing("make"))


def _has(facts: dict[str, str], name: str) -> bool:
    return facts.get(name, "none") != "none"


def _missing(program: str) -> str | None:
    there = shutil.which(program) is not None
    if not there and (compiler := nvcc()) is not None:
        there = (Path(compiler).parent / program).is_file()
    return None if there else f"{program} is not installed"
