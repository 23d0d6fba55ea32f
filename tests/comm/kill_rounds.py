"""Ranks of one host killed at random moments: `python kill_rounds.py ROUNDS SEED` prints JSON.

One process imports torch and forks the ranks of each round, so that a round takes tenths of a
second. The ranks go through random collectives over `tpshm`; one is killed with SIGKILL, at times
while the group is being made. A line of the answer is a round: who was killed, when, and what each
survivor said and after how long.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import tpshm

WORLD, LIMIT = 3, 5.0  # LIMIT: TPKERNELS_TIMEOUT of the ranks, seconds
SAID, RAN, SILENT = 7, 0, 9  # exit statuses: a named error, all done, something else


def collectives(rank: int, seed: int, count: int) -> None:
    choose = random.Random(seed)  # the same on every rank
    for _ in range(count):
        size = choose.choice([1, 17, 768, 5000, 300_000])
        kind = choose.randrange(6)
        x = torch.full((size,), float(rank + 1))
        if kind == 0:
            dist.all_reduce(x)
        elif kind == 1:
            tpk.comm.all_reduce_(x)
        elif kind == 2:
            dist.broadcast(x, choose.randrange(WORLD))
        elif kind == 3:
            dist.all_gather_into_tensor(x.new_empty(WORLD * size), x)
        elif kind == 4:
            dist.all_reduce(x, async_op=True).wait()
        else:
            dist.barrier()
        if kind in (0, 1, 4) and not bool((x == WORLD * (WORLD + 1) / 2).all()):
            raise AssertionError(f"wrong sum {x[0]}")


def rank_main(rank: int, store: str, answer: Path, seed: int, ready: int, count: int) -> int:
    began = time.monotonic()
    try:
        dist.init_process_group(
            "cpu:tpshm", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD
        )
        backend, reason = tpshm.served_by(dist.group.WORLD)
        if backend != "tpshm":
            raise AssertionError(f"served by {backend}: {reason}")
        os.write(ready, b"r")
        collectives(rank, seed, count)
    except Exception as error:
        answer.write_text(f"{time.monotonic() - began:.3f} {type(error).__name__}: {error}")
        return SAID
    dist.destroy_process_group()
    return RAN


def one_round(number: int, choose: random.Random, kill: bool, folder: Path) -> dict:
    reading, writing = os.pipe()
    seed = choose.randrange(1 << 30)
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            status = SILENT
            try:
                os.close(reading)
                count = 1 << 30 if kill else 200
                answer = folder / f"{number}-{rank}"
                status = rank_main(
                    rank, str(folder / f"store-{number}"), answer, seed, writing, count
                )
            finally:
                os._exit(status)
        children.append(child)
    os.close(writing)
    victim, early = choose.randrange(WORLD), choose.random() < 0.1
    if kill:
        for _ in range(0 if early else WORLD):
            os.read(reading, 1)
        time.sleep(choose.random() * (0.2 if early else 0.03))
        os.kill(children[victim], signal.SIGKILL)
    killed = time.monotonic()
    survivors = []
    for rank, child in enumerate(children):
        _, status = os.waitpid(child, 0)
        if kill and rank == victim:
            continue
        path = folder / f"{number}-{rank}"
        survivors.append(
            {
                "rank": rank,
                "status": os.waitstatus_to_exitcode(status),
                "seconds": time.monotonic() - killed,
                "said": path.read_text() if path.exists() else "",
            }
        )
    os.close(reading)
    return {"victim": victim if kill else None, "early": early, "survivors": survivors}


def main(rounds: int, seed: int) -> None:
    torch.set_num_threads(1)
    os.environ["TPKERNELS_TIMEOUT"] = str(LIMIT)
    tpshm.register()
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            print(json.dumps(one_round(number, choose, True, Path(folder))), flush=True)
        print(json.dumps(one_round(rounds, choose, False, Path(folder))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
