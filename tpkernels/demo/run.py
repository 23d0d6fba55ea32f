"""The `tpkernels demo` command: options, checks before ranks start, and what each rank runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

import tpkernels
from tpkernels import launch
from tpkernels.cli import USAGE_ERROR, CommandParser, not_negative, positive, rank_count
from tpkernels.demo.packages import MODELS, ModelPackage
from tpkernels.errors import ConfigError, TPKernelsError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: list[str]) -> int:
    """Run the demo; 0 if every model's error is within its limit."""
    if launch.inside_rank():
        launch.prepare_rank()
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _check(options)
        models, left_out = _choose(options)
    except ConfigError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.nproc == 1 or launch.inside_rank():
        return _rank_main(options, models, left_out)
    return launch.start_ranks(["tpkernels", "demo", *argv], options.nproc)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tpkernels demo",
        description="Run pretrained models dense and tensor-parallel, and compare them.",
    )
    parser.add_argument(
        "--nproc",
        type=rank_count,
        help="ranks to start on this machine (default: 2; under torchrun, its world size)",
    )
    parser.add_argument(
        "--model",
        choices=[*MODELS, "all"],
        default="all",
        help="all (the default) leaves out, saying so, a model that is not there",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="what weights and activations are held in (default: float32)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the ranks run; cuda needs a GPU for each (default: cpu)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        help="sentences or prompts in a run (default: 16 sentences, 4 prompts)",
    )
    parser.add_argument(
        "--repeat",
        type=not_negative,
        help="timed runs of each variant, 0 for none (default: 10, or what a few seconds allow)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Complete `options`, and refuse what cannot work on this machine."""
    if launch.inside_rank():
        world = int(os.environ["WORLD_SIZE"])
        if options.nproc not in (None, world):
            raise ConfigError(
                f"--nproc {options.nproc} under a launcher that started {world} ranks. "
                "Fix: leave --nproc out"
            )
        options.nproc = world
    options.nproc = options.nproc or 2
    if options.device == "cuda":
        gpus = torch.cuda.device_count()
        if gpus == 0:
            raise ConfigError("--device cuda: torch sees no GPU. Fix: --device cpu")
        if options.nproc > gpus:
            raise ConfigError(
                f"--nproc {options.nproc}: each rank needs a GPU, and there are {gpus}. "
                f"Fix: --nproc {gpus}, or --device cpu"
            )
    if options.json is not None and options.json.is_dir():
        fix = f"--json {options.json / 'results.json'}"
        raise ConfigError(f"--json {options.json}: it is a directory. Fix: {fix}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: its directory is not there. Fix: create it")


def _choose(options: argparse.Namespace) -> tuple[list[ModelPackage], list[str]]:
    """The models to run, and for each that `all` leaves out the reason."""
    if options.model != "all":
        model = MODELS[options.model]
        model.check(options.nproc)
        return [model], []
    chosen, left_out = [], []
    for model in MODELS.values():
        try:
            model.check(options.nproc)
            chosen.append(model)
        except ConfigError as error:
            left_out.append(str(error))
    if not chosen:
        raise ConfigError("\n  ".join(["no model can run:", *left_out]))
    return chosen, left_out


def _rank_main(options: argparse.Namespace, models: list[ModelPackage], left_out: list[str]) -> int:
    try:
        return _run(options, models, left_out)
    except Exception as error:
        if launch.inside_rank():
            return launch.report_failure(error)
        if isinstance(error, TPKernelsError):
            print(f"tpkernels demo: error: {error}", file=sys.stderr)
            return 1
        raise


def _run(options: argparse.Namespace, models: list[ModelPackage], left_out: list[str]) -> int:
    import importlib

    from tpkernels.demo.session import Session, counted

    dtype = _DTYPES[options.dtype]
    outcomes = []
    session = Session.start(options.device, dtype, options.batch, options.repeat)
    session.say(
        f"tpkernels {tpkernels.__version__}, torch {torch.__version__}: "
        f"{counted(session.world_size, 'rank')} on {options.device}, {options.dtype}, "
        f"{counted(torch.get_num_threads(), 'thread')} a rank"
    )
    for model in models:
        demo = importlib.import_module(f"tpkernels.demo.{model.name}").demo
        outcomes.append(demo(session))
    for reason in left_out:
        session.say(f"\nleft out: {reason}")
    session.say()
    for outcome in outcomes:
        session.say(f"{outcome.model}: {outcome.checks[-1]}")
    if options.json is not None and session.rank == 0:
        results = {
            "version": tpkernels.__version__,
            "torch": torch.__version__,
            "world_size": session.world_size,
            "device": options.device,
            "dtype": options.dtype,
            "models": [outcome.as_dict() for outcome in outcomes],
            "left_out": left_out,
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    torch.distributed.destroy_process_group()
    failed = [f"{o.model}: {check}" for o in outcomes for check in o.checks if not check.passed]
    if failed:
        raise TPKernelsError("; ".join(failed))
    return 0
