"""Futures of tpshm: callbacks may communicate and wait; tensors that overlap; rare reductions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tpkernels as tpk
from tpkernels import native
from tpkernels.comm import tpshm

pytestmark = pytest.mark.skipif(
    not native.status().available, reason="tpshm is compiled; this machine has none"
)
OPS = dist.ReduceOp


def sharing(group):
    """A group of the same ranks over shared memory."""
    tpshm.register()
    return dist.new_group(dist.get_process_group_ranks(group), backend="tpshm")


def waits_in_a_callback(group):
    group = sharing(group)

    def again(depth):
        def callback(future):
            x = future.value()[0] if depth == 3 else future.value()
            work = dist.all_reduce(x, group=group, async_op=True)
            return work.get_future().wait()[0]

        return callback

    future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    for depth in (3, 2, 1):
        future = future.then(again(depth))
    return future.wait()


def test_a_callback_waits_for_other_collectives(pools):
    for x in pools(2).run(waits_in_a_callback, world_size=2):
        assert torch.equal(x, torch.full((2,), 16.0))


def ddp_steps(group, hook):
    group = sharing(group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    wrapped = DistributedDataParallel(model, process_group=group)
    if hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        wrapped.register_comm_hook(group, getattr(default_hooks, hook))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        torch.manual_seed(10 * step + group.rank())
        opt.zero_grad()
        wrapped(torch.randn(4, 32)).square().mean().backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("hook", ["powerSGD", "fp16_compress_hook", None])
def test_ddp_with_a_hook_keeps_the_ranks_alike(pools, hook):
    first, second = pools(2).run(ddp_steps, hook, world_size=2)
    assert torch.equal(first, second) and bool(first.isfinite().all())


def waits_in_a_transform(group, transform):
    group = sharing(group)

    def waits(y):
        pending[0].wait()
        return y.sum()

    for _ in range(20):
        x = torch.ones(4, 4).t()[1:]  # not in one piece: it is copied on the way
        pending = [dist.all_reduce(x, group=group, async_op=True)]
        y = torch.ones(3)
        if transform == "jvp":
            torch.func.jvp(waits, (y,), (y,))
        else:
            getattr(torch.func, transform)(waits)(y)
        assert x.tolist() == [[2.0] * 4] * 3


@pytest.mark.parametrize("transform", ["functionalize", "grad", "jvp", "vmap"])
def test_a_transform_that_waits_does_not_transform_the_collective(pools, transform):
    pools(2).run(waits_in_a_transform, transform)


def overlapping(group):
    group = sharing(group)
    rank = group.rank()
    parts = [torch.arange(70_000.0) + i for i in range(2)] if rank == 0 else None
    out = parts[1] if parts else torch.empty(70_000)  # what rank 1 is to get
    dist.scatter(out, parts, group=group, group_src=0)
    assert torch.equal(out, torch.arange(70_000.0) + rank)
    for call in (
        lambda x: dist.all_reduce(x, group=group),
        lambda x: tpk.comm.all_reduce_(x, group),
    ):
        base = torch.ones(1, 3) * (rank + 1)
        call(base.expand(4, 3))
        assert torch.equal(base, torch.full((1, 3), 3.0))
    negative = torch.complex(torch.ones(2), torch.ones(2) + rank).conj().imag
    assert torch.equal(tpk.comm.all_reduce_(negative, group, "max"), torch.full((2,), -1.0))


def test_tensors_that_overlap_or_are_negated(pools):
    pools(2).run(overlapping, world_size=2)


def different(group, how):
    group = sharing(group)
    first, x = group.rank() == 0, torch.full((3,), 3)
    with pytest.raises(dist.DistBackendError) as caught:
        if how == "fold":
            dist.all_reduce(x, OPS.BAND if first else OPS.PRODUCT, group=group)
        elif how == "gather" and not first:
            dist.all_gather([torch.empty_like(x) for _ in range(2)], x, group=group)
        elif how == "gather":
            dist.all_reduce(x, OPS.PRODUCT, group=group)
        else:
            dist.reduce(x, group_dst=0 if first else 1, op=OPS.PRODUCT, group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "both"),
    [
        ("fold", ["all_reduce(band) of int64 [3]", "all_reduce(product) of int64 [3]"]),
        ("gather", ["all_reduce(product) of int64 [3]", "all_gather of int64 [3]"]),
        ("root", ["reduce(product) from or to rank 0", "reduce(product) from or to rank 1"]),
    ],
)
def test_a_mismatch_of_rare_reductions_names_both(pools, how, both):
    for message in pools(2).run(different, how, world_size=2):
        assert all(each in message for each in both), message
