"""Prints what joins the GPUs: NCCL, peer access, multicast, and ``nvidia-smi topo -m``."""

from __future__ import annotations

import subprocess

import torch
import torch.distributed as dist


def main() -> int:
    """0 always: these are facts, and the steps after it find out what they mean."""
    print(f"backends: {', '.join(sorted(dist.Backend.backend_list))}")
    print(f"nccl: {'.'.join(map(str, torch.cuda.nccl.version()))}")
    count = torch.cuda.device_count()
    for first in range(count):
        reached = [
            str(second)
            for second in range(count)
            if second != first and torch.cuda.can_device_access_peer(first, second)
        ]
        print(f"peers of gpu {first}: {', '.join(reached) or 'none'}")
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30
        )
        print(done.stdout.strip() or done.stderr.strip())
    except (OSError, subprocess.SubprocessError) as error:
        print(f"nvidia-smi topo -m: {error}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
