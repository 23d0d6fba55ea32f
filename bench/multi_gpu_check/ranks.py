"""What the programs that run on every rank share: start, device, one exit status for all."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "gpu_check"))

from lifeline import tie_to_parent


def start(device_type: str, seconds: float = 120.0) -> torch.device:
    """This rank's device, with the process group of all ranks running over NCCL or Gloo.

    ``seconds``: the time limit of a collective.
    """
    tie_to_parent()
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=seconds)
    if device_type == "cpu":
        dist.init_process_group("gloo", timeout=limit)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=limit)
    return device


def say(text: str) -> None:
    """A line, once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def checked(name: str, check: Callable[[], None], device: torch.device) -> bool:
    """Run ``check`` on this rank; whether it passed on all. What failed is printed by its rank."""
    try:
        check()
        synchronize(device)
        failed = 0
    except Exception:  # whatever it is, it is this check's result
        print(f"wrong: {name}, rank {dist.get_rank()}: {traceback.format_exc()}", flush=True)
        failed = 1
    count = torch.tensor(failed, device=device)
    dist.all_reduce(count)
    say(f"{'passed' if not count.item() else 'FAILED'}: {name}")
    return not count.item()


def finish(results: list[bool], what: str) -> int:
    """0 if all passed; the last line says how many."""
    say(f"{what}: {sum(results)} of {len(results)} passed")
    dist.destroy_process_group()
    return int(not all(results))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def integers(seed: int, *shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1, the same on every rank: sums of few of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(device, dtype)
