"""ZeRO on a GPU: trains as plain PyTorch, beside its gathers, in constant memory, on any stream.

A world of one rank; its group is kept, so that NCCL gathers and reduces. Two ranks where there are
two GPUs.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tpkernels as tpk
from tpkernels.comm.group import Group
from tpkernels.errors import ConfigError
from tpkernels.zero import ZeroConfig, streams

WIDTH, BLOCKS, ROWS = 64, 4, 32


class Block(nn.Module):
    """Norm and two layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


UNIT_BYTES = sum(p.numel() for p in Block().parameters()) * 4


def made(device):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8)).to(device)


def inputs(step, device, rank=0, world=1):
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(ROWS, WIDTH, generator=generator)
    return whole[rank * ROWS // world : (rank + 1) * ROWS // world].to(device)


def trained(model, optimizer, device, steps=5, rank=0, world=1):
    """The losses."""
    losses = []
    for step in range(steps):
        loss = model(inputs(step, device, rank, world)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def adamw(model, manager=None):
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    if manager is not None:
        return manager.optimizer(torch.optim.AdamW, **settings)
    return torch.optim.AdamW(model.parameters(), **settings)


def assert_same_weights(model, manager, plain, tolerance=1e-5):
    with manager.gathered():
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.detach().cpu(), theirs.detach().cpu(), rtol=tolerance, atol=tolerance
            )


@pytest.fixture
def world(any_device):
    """A group of one rank that keeps its process group: collectives run."""
    backend = "cpu:gloo,cuda:nccl" if any_device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = Group(dist.group.WORLD, None, "dp_shard")
    group.process_group = dist.group.WORLD
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("budget", [0, 1, 100])
def test_trains_as_plain_pytorch(stage, budget, world, any_device):
    plain, model = made(any_device), made(any_device)
    config = ZeroConfig(stage=stage, prefetch_bytes=budget * UNIT_BYTES, units=[Block])
    manager = tpk.zero(model, world, config=config)
    ours = trained(model, adamw(model, manager), any_device)
    theirs = trained(plain, adamw(plain), any_device)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_same_weights(model, manager, plain)
    stats = manager.stats()
    assert stats["peak_idle_bytes"] <= budget * UNIT_BYTES or stage < 3
    assert stage < 3 or stats["gathered_bytes"] == 0


def test_offloaded_it_trains_the_same_and_hooks_see_whole_gradients_Z_52(world, any_device):
    plain, model = made(any_device), made(any_device)
    config = ZeroConfig(units=[Block], offload_optimizer="cpu", mp_policy="bf16")
    resident = copy.deepcopy(plain)
    manager = tpk.zero(model, world, config=config)
    reference = tpk.zero(resident, world, config=ZeroConfig(units=[Block], mp_policy="bf16"))
    shards = list(model.parameters())
    assert all(each.device.type == "cpu" for each in shards)
    assert all(each.plain().is_pinned() for each in shards) or any_device.type == "cpu"
    seen = []
    for shard in shards:
        shard.register_post_accumulate_grad_hook(
            lambda each: seen.append((each, each.grad.detach().clone()))
        )
    x = inputs(0, any_device)
    for each in (model, resident):
        each(x).square().mean().backward()
    assert len(seen) == len(shards)
    pairs = zip(shards, resident.parameters(), strict=True)
    expected = {id(ours): theirs.grad for ours, theirs in pairs}
    for shard, grad in seen:
        assert torch.equal(grad.plain(), expected[id(shard)].plain().cpu())
    for each in (*shards, *resident.parameters()):
        each.grad = None
    trained(model, adamw(model, manager), any_device)
    trained(resident, adamw(resident, reference), any_device)
    with reference.gathered():
        assert_same_weights(model, manager, resident, tolerance=1e-2)


def test_edits_of_offloaded_shards_are_seen_by_the_next_forward(world, any_device):
    model = made(any_device)
    manager = tpk.zero(model, world, config=ZeroConfig(units=[Block], offload_optimizer="cpu"))
    x = inputs(0, any_device)
    for scale in (1.0, 0.0):
        with torch.no_grad():
            for shard in model.parameters():
                shard.mul_(scale)  # while what the last forward gathered may still be on its way
            y = model(x)
        assert bool(y.abs().sum() > 0) == bool(scale)
    assert manager.stats()["gathered_bytes"] == 0


@pytest.mark.gpu
def test_gathers_run_beside_compute(monkeypatch):
    """Both are kernels that sleep: gather i + 1 overlaps block i, unless nothing is prefetched."""
    spans = {"gather": [], "compute": []}

    def timed(kind):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        end.record()
        spans[kind].append((begin, end))

    monkeypatch.setattr(streams, "all_gather_in_place", lambda *_: timed("gather"))
    base = torch.cuda.Event(enable_timing=True)
    overlapping = {}
    for budget in (0, 2):
        model = made("cuda")
        for block in list(model)[:BLOCKS]:
            block.norm.register_forward_hook(lambda *_: timed("compute"))
        config = ZeroConfig(prefetch_bytes=budget * UNIT_BYTES, units=[Block])
        tpk.zero(model, config=config)
        with torch.no_grad():
            model(inputs(0, "cuda"))  # learns the order
            for each in spans.values():
                each.clear()
            torch.cuda.synchronize()
            base.record()
            model(inputs(1, "cuda"))
        torch.cuda.synchronize()
        gathers, computes = (
            [(base.elapsed_time(a), base.elapsed_time(b)) for a, b in spans[kind]]
            for kind in ("gather", "compute")
        )
        overlapping[budget] = sum(
            any(min(b, d) - max(a, c) > 0.2 * (b - a) for c, d in computes) for a, b in gathers
        )
    assert overlapping[0] == 0
    assert overlapping[2] >= BLOCKS - 1


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("budget", [0, 2, 100])
def test_memory_does_not_grow(budget, offload, world):
    model = made("cuda")
    config = ZeroConfig(
        prefetch_bytes=budget * UNIT_BYTES, units=[Block], offload_optimizer=offload
    )
    manager = tpk.zero(model, world, config=config)
    optimizer = adamw(model, manager)
    trained(model, optimizer, "cuda", steps=4)
    kinds = ("segment.all.allocated", "reserved_bytes.all.current", "allocated_bytes.all.current")

    def counted():
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return [stats[kind] for kind in kinds]

    before = counted()
    trained(model, optimizer, "cuda", steps=20)
    assert counted() == before


@pytest.mark.gpu
def test_the_current_stream_is_honoured(world):
    """Inputs are late on a side stream, and so is each step: another stream would read old ones."""
    plain, model = made("cuda"), made("cuda")
    config = ZeroConfig(prefetch_bytes=2 * UNIT_BYTES, units=[Block])
    manager = tpk.zero(model, world, config=config)
    optimizer, reference = adamw(model, manager), adamw(plain)
    streams_used = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    late = torch.zeros(ROWS, WIDTH, device="cuda")
    before = torch.cuda.current_stream()
    for step in range(6):
        stream = streams_used[step % 3]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(inputs(step, "cuda"))
            model(late).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = stream
    torch.cuda.current_stream().wait_stream(before)
    trained(plain, reference, "cuda", steps=6)
    assert_same_weights(model, manager, plain)


@pytest.mark.gpu
def test_a_unit_called_on_two_streams_at_once(world):
    plain, model = made("cuda"), made("cuda")
    manager = tpk.zero(model, world, config=ZeroConfig(prefetch_bytes=0, units=[Block]))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = inputs(0, "cuda")
    for _ in range(3):
        side.wait_stream(main)
        first = model[0](x)
        with torch.cuda.stream(side):
            second = model[0](x)
        main.wait_stream(side)
        second.record_stream(main)
        (first + 2 * second).square().mean().backward()
    (3 * plain[0](x)).square().mean().backward()
    for ours, theirs in zip(model[0].parameters(), plain[0].parameters(), strict=True):
        expected = 3 * theirs.grad.flatten()
        torch.testing.assert_close(ours.grad.plain(), expected, rtol=1e-4, atol=1e-5)
    assert manager.stats()["gathered_bytes"] == 0


@pytest.mark.gpu
def test_a_capture_is_refused_and_training_goes_on(world):
    model = made("cuda")
    manager = tpk.zero(model, world, config=ZeroConfig(units=[Block]))
    x = inputs(0, "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ConfigError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
        model(x)
    trained(model, adamw(model, manager), "cuda", steps=1)


def _rank_of_two(rank, address):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    plain, model = made("cuda"), made("cuda")
    config = ZeroConfig(units=[Block], prefetch_bytes=2 * UNIT_BYTES, separate_reduce_group=True)
    manager = tpk.zero(model, config=config)
    trained(model, adamw(model, manager), "cuda", rank=rank, world=2)
    trained(plain, adamw(plain), "cuda")
    assert_same_weights(model, manager, plain)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(tmp_path):
    torch.multiprocessing.spawn(_rank_of_two, (f"file://{tmp_path}/store",), nprocs=2)
