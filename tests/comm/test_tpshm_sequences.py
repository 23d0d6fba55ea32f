"""Any sequence of collectives on any groups: exact on integers, the same bits on every rank."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import tpkernels as tpk
from tpkernels import native
from tpkernels.comm import tpshm

pytestmark = pytest.mark.skipif(
    not native.status().available, reason="tpshm is compiled; this machine has none"
)
WORLD = 4
GROUPS = ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 3))  # overlapping and strided
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
KINDS = (
    *("all_reduce", "direct", "reduce", "reduce_scatter", "all_gather", "all_to_all"),
    *("broadcast", "gather", "scatter", "barrier"),
)

step = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "group": st.integers(0, len(GROUPS) - 1),
        "dtype": st.integers(0, len(DTYPES) - 1),
        "size": st.sampled_from([0, 1, 3, 64, 1000, 40_001]),  # both sides of every threshold
        "reduction": st.sampled_from(sorted(REDUCTIONS)),
        "root": st.integers(0, WORLD - 1),
        "asynchronous": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def values(seed, rank, size, dtype):
    generator = torch.Generator().manual_seed(seed * WORLD + rank)
    return torch.randint(-2, 3, (size,), generator=generator).to(dtype)


def reduced(parts, how):
    stacked = torch.stack([part.to(torch.int64) for part in parts])
    return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[how]


class Step:
    """One collective: what this rank calls, and what it must have then."""

    def __init__(self, step, group):
        self.group, self.step = group, step
        self.rank, self.world = group.rank(), group.size()
        self.dtype, self.size = DTYPES[step["dtype"]], step["size"]
        self.root = step["root"] % self.world
        self.options = {"group": group, "async_op": step["asynchronous"]}

    def of(self, rank, parts=1):
        return values(self.step["seed"], rank, self.size * parts, self.dtype)

    def start(self):
        """(work or None, result, expected as integers)."""
        return getattr(self, self.step["kind"])()

    def all(self, parts=1):
        return [self.of(rank, parts) for rank in range(self.world)]

    def all_reduce(self):
        x, how = self.of(self.rank), self.step["reduction"]
        work = dist.all_reduce(x, REDUCTIONS[how], **self.options)
        return work, x, reduced(self.all(), how)

    def direct(self):
        x, how = self.of(self.rank), self.step["reduction"]
        tpk.comm.all_reduce_(x, self.group, how)
        return None, x, reduced(self.all(), how)

    def reduce(self):
        x, how = self.of(self.rank), self.step["reduction"]
        work = dist.reduce(x, group_dst=self.root, op=REDUCTIONS[how], **self.options)
        is_root = self.rank == self.root
        return work, x if is_root else None, reduced(self.all(), how) if is_root else None

    def reduce_scatter(self):
        how, out = self.step["reduction"], torch.empty(self.size, dtype=self.dtype)
        parts = list(self.of(self.rank, self.world).chunk(self.world)) if self.size else None
        parts = parts or [out.clone() for _ in range(self.world)]
        work = dist.reduce_scatter(out, parts, REDUCTIONS[how], **self.options)
        mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
        return work, out, reduced(self.all(self.world), how)[mine]

    def all_gather(self):
        out = [torch.empty(self.size, dtype=self.dtype) for _ in range(self.world)]
        work = dist.all_gather(out, self.of(self.rank), **self.options)
        return work, out, torch.cat(self.all())

    def all_to_all(self):
        # Rank r sends size + q elements to rank q.
        def sent(rank):
            whole = values(self.step["seed"], rank, sum(self.uneven()), self.dtype)
            return whole.split(self.uneven())

        length = self.size + self.rank
        out = torch.empty(length * self.world, dtype=self.dtype)
        work = dist.all_to_all_single(
            out, torch.cat(sent(self.rank)), [length] * self.world, self.uneven(), **self.options
        )
        return work, out, torch.cat([sent(rank)[self.rank] for rank in range(self.world)])

    def uneven(self):
        return [self.size + rank for rank in range(self.world)]

    def broadcast(self):
        x = self.of(self.rank)
        work = dist.broadcast(x, group_src=self.root, **self.options)
        return work, x, self.of(self.root)

    def gather(self):
        is_root = self.rank == self.root
        empty = [torch.empty(self.size, dtype=self.dtype) for _ in range(self.world)]
        out = empty if is_root else None
        work = dist.gather(self.of(self.rank), out, group_dst=self.root, **self.options)
        return work, out, torch.cat(self.all()) if is_root else None

    def scatter(self):
        out = torch.empty(self.size, dtype=self.dtype)
        parts = self.all() if self.rank == self.root else None
        work = dist.scatter(out, parts, group_src=self.root, **self.options)
        return work, out, self.of(self.rank)

    def barrier(self):
        return dist.barrier(**self.options), None, None


def run(world, steps):
    tpshm.register()
    groups = [dist.new_group(list(ranks), backend="tpshm") for ranks in GROUPS]
    pending = []
    for index, each in enumerate(steps):
        if world.rank() in GROUPS[each["group"]]:
            pending.append((index, each, *Step(each, groups[each["group"]]).start()))
    digests = {}
    for index, each, work, result, expected in pending:
        if each["asynchronous"] and work is not None:
            work.wait()
        if result is None:
            continue
        whole = torch.cat(result) if isinstance(result, list) else result
        assert torch.equal(whole.to(torch.int64), expected.to(torch.int64)), (index, each)
        if each["kind"] in ("all_reduce", "direct", "all_gather", "broadcast"):
            raw = whole.contiguous().view(torch.uint8).numpy().tobytes() if whole.numel() else b""
            digests[index] = hashlib.sha256(raw).hexdigest()
    return digests


@settings(max_examples=25)
@given(steps=st.lists(step, min_size=1, max_size=12))
def test_mixed_collectives_on_mixed_groups(pools, steps):
    results = pools(WORLD).run(run, steps, timeout=60)
    for index in range(len(steps)):
        assert len({digests[index] for digests in results if index in digests}) <= 1, steps[index]
