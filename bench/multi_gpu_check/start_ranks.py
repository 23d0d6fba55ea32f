"""Starts a program once a rank, and ends all when one fails: no launcher that imports torch.

start_ranks.py RANKS PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "gpu_check"))

from lifeline import tied_to_us

GRACE = 10.0  # seconds that the others have to say what they saw when one has failed
_POLL = 0.1


def start(
    count: int, command: list[str], variables: dict[str, str], **options: Any
) -> list[subprocess.Popen[Any]]:
    """``count`` processes of one world on this machine; ``options`` are Popen's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=tied_to_us(),
            **options,
        )
        for rank in range(count)
    ]


def main(count: int, command: list[str]) -> int:
    """0 if all ranks ended with 0."""
    ranks = start(count, command, {})
    try:
        while all(rank.poll() in (None, 0) for rank in ranks):
            if all(rank.returncode == 0 for rank in ranks):
                return 0
            time.sleep(_POLL)
        end = time.monotonic() + GRACE
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(_POLL)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    failed = [f"{n} ({rank.returncode})" for n, rank in enumerate(ranks) if rank.returncode]
    print(f"ranks that failed, and their exit status: {', '.join(failed)}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
