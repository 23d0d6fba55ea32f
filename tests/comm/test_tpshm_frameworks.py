"""PyTorch's own parallelism runs over ``tpshm`` unchanged, and gives what it gives over Gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("gloo", "tpshm")


class Branches(nn.Module):
    """Uses its second branch only where it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, both):
        self.calls += 1
        return self.first(x) + self.second(x) if both else self.first(x)


def train_ddp(group, backend):
    made = dist.new_group(backend=backend)
    torch.manual_seed(0)
    net = DistributedDataParallel(
        Branches(), process_group=made, find_unused_parameters=True, bucket_cap_mb=0.0001
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + made.rank())
    for step in range(4):
        x = torch.randn(5, 6)
        optimizer.zero_grad()
        if step == 1:
            with net.no_sync():
                net(x, True).square().sum().backward()
        net(x, step != 2 or made.rank() == 0).square().sum().backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


def test_ddp(pools):
    """With buckets, parameters that one rank does not use, and steps without communication."""
    gloo, tpshm = (pools(2).run(train_ddp, backend) for backend in BACKENDS)
    for theirs, ours in zip(gloo, tpshm, strict=True):
        for a, b in zip(theirs, ours, strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)  # two ranks: one order of adding


def mesh_of(group, backend):
    made = dist.new_group(backend=backend)
    return DeviceMesh.from_group(made, "cpu", mesh_dim_names=("x",))


def redistribute(group):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(group, "tpshm")
    whole = torch.arange(35.0).view(5, 7)  # uneven on both dimensions
    for dim in (0, 1):
        split = distribute_tensor(whole, mesh, [Shard(dim)])
        assert torch.equal(split.full_tensor(), whole)
        other = split.redistribute(mesh, [Shard(1 - dim)])
        assert torch.equal(other.full_tensor(), whole)
        assert torch.equal((other + other).redistribute(mesh, [Replicate()]).to_local(), 2 * whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), mesh.size() * whole)
    kept = partial.redistribute(mesh, [Shard(0)])
    assert torch.equal(kept.full_tensor(), mesh.size() * whole)


def test_dtensor(pools):
    pools(3).run(redistribute)


def tensor_parallel(group):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    torch.manual_seed(0)
    split = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(split, mesh_of(group, "tpshm"), plan)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(split(x), dense(x))
    split(x).square().sum().backward()
    dense(x).square().sum().backward()
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), dense[0].weight.grad)


def test_tensor_parallel_plan(pools):
    pools(2).run(tensor_parallel)


def save_and_load(group, directory):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    def model(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        whole = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        whole.load_state_dict(net.state_dict())
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh)
        return net, whole

    mesh = mesh_of(group, "tpshm")
    net, dense = model(0)
    x = torch.randn(4, 5)
    net(x).square().sum().backward()  # the same on all ranks, so that the mean is this
    dense(x).square().sum().backward()
    for ours, theirs in zip(net.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    made = mesh.get_group()
    dcp.save(net.state_dict(), checkpoint_id=directory, process_group=made)
    other, _ = model(1)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=directory, process_group=made)
    other.load_state_dict(state)
    for ours, theirs in zip(other.parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


def test_fully_shard_and_dcp(pools, tmp_path):
    pools(2).run(save_and_load, str(tmp_path))


def call_functional(group):
    made = dist.new_group(backend="tpshm")
    rank, world = made.rank(), made.size()
    x = torch.full((2 * world, 2), 1.0 + rank)
    total = world * (world + 1) / 2
    assert torch.equal(functional.all_reduce(x, "sum", made) + 0, torch.full_like(x, total))
    gathered = functional.all_gather_tensor(x[:2], 0, made)
    assert gathered[:, 0].tolist() == [1.0 + r for r in range(world) for _ in range(2)]
    assert (functional.reduce_scatter_tensor(x, "sum", 0, made) == total).all()
    swapped = functional.all_to_all_single(x, None, None, made)
    assert torch.equal(swapped + 0, gathered)
    compiled = torch.compile(
        lambda t: functional.all_reduce(t * 2, "sum", made), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x), torch.full_like(x, 2 * total))
    leaf = x.clone().requires_grad_()
    (functional.all_reduce(leaf.detach(), "avg", made) * leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(x, total / world))


def test_functional_collectives(pools):
    pools(2).run(call_functional)


def call_with_objects(group):
    made = dist.new_group(backend="tpshm")
    rank, world = made.rank(), made.size()
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 10**rank}, group=made)
    told = [rank, None] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, group_src=1, group=made)
    scattered = [None]
    dist.scatter_object_list(
        scattered, [[r] for r in range(world)] if rank == 0 else None, group_src=0, group=made
    )
    return [len(each["text"]) for each in gathered], told, scattered


def test_objects(pools):
    results = pools(3).run(call_with_objects)
    assert results == [([1, 10, 100], [1, None], [[r]]) for r in range(3)]


SCRIPT = """
    import torch, torch.distributed as dist, tpkernels
    from torch.nn.parallel import DistributedDataParallel
    from tpkernels.comm import tpshm

    mesh = tpkernels.init_mesh(tp=2, device_type="cpu")
    assert dist.get_backend() == "tpshm"
    for name in ("tp", "dp_shard", "pp"):
        assert tpshm.served_by(mesh[name].get_group()).backend == "tpshm", name
    limit = mesh["tp"].get_group()._get_backend(torch.device("cpu")).options._timeout
    assert limit.total_seconds() == 40, limit
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(4, 4))
    net(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    print(net.module.weight.grad[0].tolist())
    dist.barrier()
    split = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    x = torch.ones(3, 8)
    whole = split(x).detach()
    print(tpkernels.parallelize(split, mesh["tp"]).modules[0].action)
    torch.testing.assert_close(split(x).detach(), whole)
    dist.destroy_process_group()
"""


def test_a_world_that_init_mesh_starts():
    """From torchrun's variables: ours and PyTorch's run on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TPKERNELS_TIMEOUT": "40",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for output, _ in said:
        assert output.splitlines() == ["[1.0, 1.0, 1.0, 1.0]", "TPMLP"], said
