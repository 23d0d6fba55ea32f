"""Ranks of one host that measure together: how they start, which core each has, how they agree."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import launch
from tpkernels.benchmarks.shaped_hosts import module_path
from tpkernels.cli import CommandParser, rank_count
from tpkernels.errors import ConfigError, TPKernelsError

_DEFAULT_WORLD = 2
# That a rank waits for another: DeepSpeed compiles at its first use.
_RANK_SECONDS = 180.0


class WrongResultError(TPKernelsError):
    """A variant computed something else than the others."""


@dataclass(frozen=True)
class Ranks:
    """This rank among those that measure.

    Attributes:
        control: a Gloo group of all ranks, for what is not measured.
        core: the one core that this process may use, or None where ranks outnumber cores.
        cores: that all ranks share.
    """

    rank: int
    world: int
    device: torch.device
    control: Any
    core: int | None
    cores: int

    def say(self, text: str) -> None:
        """On standard output, by rank 0; a progress line is cleared."""
        if self.rank == 0:
            _clear_progress()
            print(text, flush=True)

    def note(self, text: str) -> None:
        """On standard error, by rank 0; a progress line is cleared."""
        if self.rank == 0:
            _clear_progress()
            print(text, file=sys.stderr, flush=True)

    def barrier(self) -> None:
        """Wait for all, asleep."""
        dist.barrier(group=self.control)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of the ranks'; collective."""
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in found]

    def total(self, value: int) -> int:
        """The sum of the ranks'; collective."""
        found = torch.tensor(value)
        dist.all_reduce(found, group=self.control)
        return int(found)

    def first_error(self, error: str | None) -> str | None:
        """That of the lowest rank that has one; collective."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, error, group=self.control)
        return next((text for text in everyone if text is not None), None)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def placed(self) -> str:
        """Where the ranks run, in words."""
        if self.device.type == "cuda":
            return f"{self.world} ranks, a GPU each"
        if self.core is not None:
            return f"{self.world} ranks of one thread, each pinned to a core of its own"
        return f"{self.world} ranks of one thread share {self.cores} cores, not pinned"


def _clear_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def add_nproc(parser: CommandParser) -> None:
    parser.add_argument(
        "--nproc",
        type=rank_count,
        metavar="N",
        help=f"ranks to start on this machine (default: {_DEFAULT_WORLD}; under torchrun, its "
        "world size)",
    )


def chosen_world(nproc: int | None) -> int:
    """`--nproc`, or the launcher's number of ranks.

    Raises:
        ConfigError: another number than the launcher's, or fewer than 2.
    """
    if launch.inside_rank():
        world = int(os.environ["WORLD_SIZE"])
        if nproc not in (None, world):
            raise ConfigError(
                f"--nproc {nproc} under a launcher that started {world} ranks. "
                "Fix: leave --nproc out"
            )
    else:
        world = nproc or _DEFAULT_WORLD
    if world < 2:
        raise ConfigError(f"--nproc {world}: nothing to exchange; allowed: from 2. Fix: --nproc 2")
    return world


def run(
    arguments: Sequence[str],
    world: int,
    parsed: Namespace,
    device: torch.device,
    measure: Callable[[Ranks, Namespace], None],
) -> int:
    """Start `world` ranks of `tpkernels ARGUMENTS`, or as one of them: join, and `measure`.

    Returns:
        0; 1 where a rank failed, which is then told, or a result was wrong.
    """
    if not launch.inside_rank():
        os.environ.update(module_path())
        os.environ["OMP_NUM_THREADS"] = "1"
        return launch.start_ranks(["tpkernels", *arguments], world)
    # The launcher ends ranks by SIGTERM: at once, also where they wait in native code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    launch.prepare_rank()
    try:
        ranks = join(device)
        measure(ranks, parsed)
        dist.destroy_process_group()
    except Exception as error:
        return launch.report_failure(error)
    return 0


def join(device: torch.device) -> Ranks:
    """Pin this rank, and meet the others."""
    torch.set_num_threads(1)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    core, cores = None, os.cpu_count() or 1
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    elif hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        cores = len(allowed)
        if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= cores:
            core = allowed[local]
            os.sched_setaffinity(0, {core})  # also of threads that libraries start from here on
    dist.init_process_group("gloo", timeout=timedelta(seconds=_RANK_SECONDS))
    return Ranks(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD, core, cores)
