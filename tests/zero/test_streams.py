"""CUDA transfers over fake streams: nothing that touches one memory is unordered, whatever runs.

Random schedules of units on random streams; and each wait, left out, is missed.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels as tpk
from tests.zero.fake_cuda import FakeCuda, WatchedTransfers
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError, TPKernelsWarning
from tpkernels.zero import ZeroConfig, entry, streams, transfers
from tpkernels.zero.reduce_group import separate_reduce_group

WIDTH = 8


class On(torch.autograd.Function):
    """The current stream becomes ``forward_to``, and in backward ``backward_to``."""

    @staticmethod
    def forward(ctx, x, cuda, forward_to, backward_to):
        ctx.cuda, ctx.to = cuda, backward_to
        cuda.current = forward_to
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.cuda.current = ctx.to
        return grad, None, None, None


class Fork(torch.autograd.Function):
    """The streams may read ``x``; in backward, autograd lets the current one read their results."""

    @staticmethod
    def forward(ctx, x, main, streams):
        ctx.main, ctx.streams = main, streams
        for stream in streams:
            stream.wait_stream(main)
        return tuple(x.clone() for _ in streams)

    @staticmethod
    def backward(ctx, *grads):
        for stream in ctx.streams:
            ctx.main.wait_stream(stream)
        return sum(grads), None, None


class Join(torch.autograd.Function):
    """The sum of what the streams computed, on the current one; in backward the reverse."""

    @staticmethod
    def forward(ctx, main, streams, *xs):
        ctx.main, ctx.streams = main, streams
        for stream in streams:
            main.wait_stream(stream)
        return sum(xs)

    @staticmethod
    def backward(ctx, grad):
        for stream in ctx.streams:
            stream.wait_stream(ctx.main)
        return None, None, *(grad.clone() for _ in ctx.streams)


def beside(cuda, streams, functions, x):
    """The sum of ``functions`` of ``x``, each on a stream of its own, as a user would write it."""
    main = cuda.current
    results = []
    for stream, function, part in zip(
        streams, functions, Fork.apply(x, main, streams), strict=True
    ):
        results.append(On.apply(function(On.apply(part, cuda, stream, main)), cuda, main, stream))
    return Join.apply(main, streams, *results)


class Block(nn.Module):
    """Two layers, one after the other or each on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.run = None

    def forward(self, x):
        if self.run is None:
            return self.two(self.one(x).tanh())
        return self.run([self.one, self.two], x)


class Model(nn.Module):
    """Blocks in an order and on streams that ``plan`` says for the next call."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.plan = []

    def forward(self, x):
        for index, how in self.plan:
            block = self.blocks[index]
            block.run = how if how is not None and how.keywords["inside"] else None
            x = block(x) if block.run or how is None else how([block, block], x)
        return x


def drawn_plan(chance, cuda, streams, blocks):
    plan = []
    for index in chance.choices(range(blocks), k=chance.randint(1, blocks + 1)):
        how = None
        if chance.random() < 0.6:
            two = chance.sample(streams, 2)
            how = functools.partial(run_beside, cuda, two, inside=chance.random() < 0.5)
        plan.append((index, how))
    return plan


def run_beside(cuda, streams, functions, x, *, inside):
    return beside(cuda, streams, functions, x)


def drawn_config(chance, offload):
    unit = 2 * (WIDTH + 1) * WIDTH * 4
    return ZeroConfig(
        stage=chance.choice([1, 2, 3, 3, 3]),
        prefetch_bytes=chance.choice([0, unit, 2 * unit + 64, 10**6]),
        max_live_bytes=chance.choice([None, None, 3 * unit]),
        units=[Block],
        mp_policy=chance.choice([None, "bf16"]),
        offload_optimizer="cpu" if offload else "none",
        reshard_after_forward=chance.random() < 0.7,
        reshard_after_backward=chance.random() < 0.8,
        find_unused_parameters=True,
        max_pending_reduces=chance.choice([1, 2]),
    )


def watched_run(group, seed, offload, dropped=None, host=False, mesh=None, steps=5):
    """(races, waits performed, the shards) of random training on fake streams.

    ``host``: by the transfers of the CPU instead, for the values.
    """
    chance = random.Random(seed)
    cuda = FakeCuda(dropped)
    torch.manual_seed(seed)
    model = Model()
    config = drawn_config(chance, offload)

    def over_streams(group, replicas, device, config):
        return WatchedTransfers(
            group, replicas, device, offloads=offload, pin_memory=False, cuda=cuda
        )

    with (
        mock.patch.object(entry, "_transfers", entry._transfers if host else over_streams),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", TPKernelsWarning)  # units larger than a budget
        manager = tpk.zero(model, mesh or group, config=config)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    streams = [cuda.Stream() for _ in range(3)]
    inputs = torch.Generator().manual_seed(group.rank())

    def watch_shards():
        for unit in manager._engine.units:
            for buffer in unit.buffers:
                cuda.watch(buffer.master, f"shards of {unit.name}", offload)
                if buffer.gradient is not None:
                    cuda.watch(buffer.gradient, f"gradients of {unit.name}", offload)

    with cuda:
        for _ in range(steps):
            watch_shards()
            home = chance.choice([cuda.default, *streams])
            home.wait_stream(cuda.default)
            x = torch.randn(4, WIDTH, generator=inputs)
            model.plan = drawn_plan(chance, cuda, streams, 4)
            does = chance.choice(["train", "train", "train", "evaluate", "edit", "fail"])
            with cuda.stream(home):
                if does in ("evaluate", "edit"):
                    with torch.no_grad():
                        model(x)
                elif does == "fail":
                    model(x).square().sum()
                    manager.reset()  # instead of a backward
                else:
                    sync = chance.random() < 0.8
                    does = "train" if sync else "collect"
                    with contextlib.nullcontext() if sync else manager.no_sync():
                        model(x).square().sum().backward()
            for stream in streams:
                cuda.default.wait_stream(stream)
            watch_shards()
            if does == "train":
                optimizer.step()
                optimizer.zero_grad()
            if does == "edit":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
        waits = set(cuda.waits)
        manager.reset()
    return cuda.races, waits, [p.detach().plain().clone() for p in model.parameters()]


def compared_runs(group, cases, replicas=1):
    """Races and waits of all cases, and whether each trains as by the transfers of the CPU."""
    races, waits, mesh = [], set(), None
    if replicas > 1:
        shape = (replicas, group.size() // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for seed, offload in cases:
        found, performed, shards = watched_run(group, seed, offload, mesh=mesh)
        races += [f"seed {seed}, offload {offload}: {race}" for race in found]
        waits |= performed
        _, _, expected = watched_run(group, seed, offload, host=True, mesh=mesh)
        is_bf16 = drawn_config(random.Random(seed), offload).precision.param_dtype is not None
        # Two ranks: one sum, whatever the order.
        tolerance = 1e-2 if is_bf16 else 0 if mesh is None else 1e-6
        for ours, theirs in zip(shards, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    return races, waits


def first_race(group, cases, dropped):
    """The first race without the wait ``dropped``, or None."""
    for seed, offload in cases:
        races, _, _ = watched_run(group, seed, offload, dropped)
        if races:
            return races[0]
    return None


CASES = [(seed, offload) for seed in range(3) for offload in (False, True)]
# Of "wait" the stream's and, with offload, the host's.
WAITS = ["finish", "free", "gather", "reduce", "settle", "use", "wait", "wait", "write"]


def test_random_schedules_on_random_streams_are_ordered_and_each_wait_is_needed(pool):
    races, waits = pool.run(compared_runs, CASES, world_size=2)[0]
    assert races == []
    assert sorted(site.split(":")[0] for site in waits) == WAITS
    for site in sorted(waits):
        assert pool.run(first_race, CASES, site, world_size=2)[0] is not None, site


def test_replicas_are_reduced_in_order(pool):
    races, waits = pool.run(compared_runs, CASES[:4], 2, world_size=4)[0]
    assert races == [] and any(site.startswith("reduce:") for site in waits)


def test_an_allocation_that_nothing_awaits_is_a_race():
    """The checker itself: the smallest case by hand."""
    cuda = FakeCuda()
    other, tensor = cuda.Stream(), torch.zeros(3)
    with cuda:
        cuda.allocated(tensor, cuda.default, "memory")
        other.wait_stream(cuda.default)
        with cuda.stream(other):
            tensor.add_(1)
        assert cuda.races == []
        tensor.sum()
    assert cuda.races == [
        "aten::sum on default stream after aten::add_.Tensor on stream 0: memory is not ordered"
    ]


def test_a_capture_is_refused():
    cuda = FakeCuda()
    group = resolve_group(None)
    made = WatchedTransfers(group, None, torch.device("cpu"), cuda=cuda)
    gradients = made.empty(4, torch.float32)
    cuda.capturing = True
    with pytest.raises(ConfigError, match=r"cannot be captured in a CUDA graph\. Fix: "):
        made.reduce(gradients)
    model = nn.Linear(2, 2)
    with mock.patch.object(entry, "_transfers", lambda *_: made):
        tpk.zero(model)
    with pytest.raises(ConfigError, match="gathers its parameters anew at each call"):
        model(torch.ones(1, 2))


def with_a_second_group(group, separate, host):
    """(the shards, names of groups that gathered, names of groups that reduced)."""
    gather, reduce = (
        ("all_gather_in_place_async", "all_to_all_async")
        if host
        else ("all_gather_in_place", "reduce_scatter_into")
    )
    used = {gather: set(), reduce: set()}

    def watched(module, name):
        real = getattr(module, name)

        def call(*args):
            used[name].add(args[-1])
            return real(*args)

        return mock.patch.object(module, name, call)

    def over_streams(group, replicas, device, config):
        second = separate_reduce_group(group) if config.separate_reduce_group else None
        return WatchedTransfers(group, replicas, device, reduce_group=second, cuda=FakeCuda())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ZeroConfig(separate_reduce_group=separate)
    with mock.patch.object(entry, "_transfers", entry._transfers if host else over_streams):
        manager = tpk.zero(model, group, config=config)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    module = transfers if host else streams
    with watched(module, gather), watched(module, reduce):
        for _ in range(2):
            model(torch.full((2, 4), 1.0 + group.rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().plain() for p in model.parameters()], used[gather], used[reduce]


@pytest.mark.parametrize("host", [True, False], ids=["host", "streams"])
def test_reductions_have_a_group_of_their_own_where_it_is_asked_for(pool, host):
    """In a pool whose ranks are members of different numbers of groups, some destroyed."""
    for together, apart in zip(
        pool.run(with_a_second_group, False, host, world_size=2),
        pool.run(with_a_second_group, True, host, world_size=2),
        strict=True,
    ):
        assert together[1] == together[2] and len(together[1]) == 1
        assert apart[1] == together[1] and len(apart[2]) == 1 and apart[1].isdisjoint(apart[2])
        for ours, theirs in zip(apart[0], together[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
