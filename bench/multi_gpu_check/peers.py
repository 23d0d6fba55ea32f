"""Peers' memory: whether these GPUs address each other's, and whether PyTorch's sums over it hold.

What cannot be is said and is no failure: the product's own strategies between GPUs are NCCL's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import checked, finish, integers, say, start

from tpkernels.comm.group import resolve_group

ELEMENTS = 1 << 16


def main() -> int:
    """0 if what is there is right."""
    device = start("cuda")
    reach = all(
        torch.cuda.can_device_access_peer(device.index, other)
        for other in range(torch.cuda.device_count())
        if other != device.index
    )
    every = torch.tensor(int(reach), device=device)
    dist.all_reduce(every, dist.ReduceOp.MIN)
    if not every.item():
        say("peers' memory: not available, some GPU cannot address another one's")
        dist.destroy_process_group()
        return 0

    def summed() -> None:
        from torch.distributed import _symmetric_memory as symmetric

        name = resolve_group(None).name
        mine = symmetric.empty(ELEMENTS, dtype=torch.float32, device=device)
        handle = symmetric.rendezvous(mine, name)
        say(f"multicast: {'yes' if handle.multicast_ptr else 'no'}")
        for call in range(3):
            mine.copy_(integers(call, ELEMENTS, device=device, dtype=torch.float32))
            expected = mine * dist.get_world_size()
            dist.barrier()
            total = torch.ops.symm_mem.one_shot_all_reduce(mine, "sum", name)
            if not torch.equal(total, expected):
                raise AssertionError(f"call {call}: the sum over peers' memory is wrong")
            dist.barrier()

    return finish([checked("one-shot all-reduce over peers' memory", summed, device)], "peers")


if __name__ == "__main__":
    raise SystemExit(main())
