"""A rank that is killed between two calls: the others end within the time limit, saying who.

    killed_rank.py cuda|cpu RANKS

Over NCCL twice: with blocking waits the call raises and names the rank; with PyTorch's watchdog,
which is the default, the process is ended, and the watchdog says in which operation.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import start_ranks

SECONDS = 15  # time limit of a collective
GRACE = 45  # more until a survivor must have ended: the watchdog looks around now and then
KILLED = 3  # exit status of the rank that goes
LAYER = "block.0.mlp"
NAMED = rf"layer {re.escape(LAYER)}, gemm_all_reduce: .*no sign of life from rank {{rank}}\b"
WATCHDOG = r"(?i)watchdog.*(timeout|allreduce)|allreduce.*timeout"
ROUNDS = {
    "cpu": {"Gloo": ({}, NAMED)},
    "cuda": {
        "NCCL, blocking waits": ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, NAMED),
        "NCCL, watchdog": ({}, rf"(?s){NAMED}|{WATCHDOG}"),
    },
}


def main(device: str, count: int) -> int:
    """0 if in every round all survivors ended in time and said what was expected."""
    failed = 0
    for name, (variables, pattern) in ROUNDS[device].items():
        wrong = _round(device, count, variables, pattern)
        print(f"{'FAILED' if wrong else 'passed'}: {name}, rank {count - 1} of {count} killed")
        print("".join(f"  {line}\n" for line in wrong), end="", flush=True)
        failed += bool(wrong)
    print(f"killed rank: {len(ROUNDS[device]) - failed} of {len(ROUNDS[device])} passed")
    return int(failed > 0)


def _round(device: str, count: int, variables: dict[str, str], pattern: str) -> list[str]:
    """What was not as expected, in words."""
    limits = {"TPKERNELS_TIMEOUT": str(SECONDS), "TPKERNELS_OVERLAP": "chunked"}
    began = time.monotonic()
    ranks = start_ranks.start(
        count,
        [str(Path(__file__).resolve()), "rank", device],
        {**variables, **limits},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wrong = []
    for rank, process in enumerate(ranks):
        try:
            left = began + SECONDS + GRACE - time.monotonic()
            told, _ = process.communicate(timeout=max(1.0, left))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            told, _ = process.communicate()
            wrong.append(f"rank {rank} still ran after {SECONDS + GRACE} s: {told[-300:]}")
            continue
        if rank == count - 1:
            if process.returncode != KILLED:
                wrong.append(f"the rank that should go did not: {told[-300:]}")
        elif not re.search(pattern.replace("{rank}", str(count - 1)), told):
            wrong.append(f"rank {rank} did not name it, status {process.returncode}: {told[-600:]}")
    return wrong


def rank_main(device_type: str) -> int:
    """One rank: the last one goes without a word in its second call."""
    import torch
    import torch.distributed as dist
    from ranks import start, synchronize

    from tpkernels.comm.group import resolve_group
    from tpkernels.errors import CommunicationError
    from tpkernels.overlap import gemm_all_reduce

    device = start(device_type, SECONDS)
    x, weight = torch.ones(64, 8, device=device), torch.ones(8, 8, device=device)
    name = resolve_group(None).name
    try:
        for call in range(3):
            if call == 1 and dist.get_rank() == dist.get_world_size() - 1:
                synchronize(device)
                os._exit(KILLED)
            gemm_all_reduce(x, weight, None, name, layer=LAYER)
            synchronize(device)
    except CommunicationError as error:
        print(error, flush=True)
        os._exit(1)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        raise SystemExit(rank_main(sys.argv[2]))
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
