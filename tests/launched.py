"""What `test_launch.py` has the launcher run on each rank: `python -m tests.launched HOW`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from tpkernels import launch
from tpkernels.errors import ConfigError


def main(how: str) -> int:
    launch.prepare_rank()
    assert launch.inside_rank()
    dist.init_process_group("gloo")
    try:
        if dist.get_rank() == 1:
            misbehave(how)
        if how != "sleep":
            dist.all_reduce(torch.ones(1))
        say(f"rank {dist.get_rank()} of {dist.get_world_size()} on {threads()} threads")
    except Exception as error:
        return launch.report_failure(error)
    dist.destroy_process_group()
    return 0


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "refuse":
        raise ConfigError("tp=3 does not divide 8 heads. Fix: tp=2")
    if how == "bug":
        raise KeyError("missing")
    if how == "sleep":
        say(f"sleeping {os.getpid()}")
        time.sleep(600)


def say(line: str) -> None:
    """One write, so that the lines of two ranks cannot mix: `print` may write its end apart."""
    os.write(1, f"{line}\n".encode())


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
