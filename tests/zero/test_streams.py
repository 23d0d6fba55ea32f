"""CUDA transfers over fake streams: nothing that touches one memory is unordered, whatever runs.

Random schedules of units on random streams; and each wait, left out, is missed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from unittest import mock

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero.fake_cuda import FakeCuda, WatchedTransfers
from tpkernels.errors import ConfigError
from tpkernels.zero import ZeroConfig, entry

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


def watched_run(group, seed, offload, dropped=None, steps=6):
    """(races, waits performed, the shards) of random training on fake streams."""
    chance = random.Random(seed)
    cuda = FakeCuda(dropped)
    torch.manual_seed(seed)
    model = Model()
    config = drawn_config(chance, offload)

    def transfers(group, replicas, device, config):
        return WatchedTransfers(
            group, replicas, device, offloads=offload, pin_memory=False, cuda=cuda
        )

    with mock.patch.object(entry, "_transfers", transfers), contextlib.suppress(UserWarning):
        manager = tpk.zero(model, group, config=config)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    streams = [cuda.Stream() for _ in range(3)]
    # Values that are random on each rank alone.
    inputs = torch.Generator().manual_seed(group.rank() if hasattr(group, "rank") else 0)

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


def all_runs(group, cases, dropped=None):
    races, waits, values = [], set(), []
    for seed, offload in cases:
        found, performed, shards = watched_run(group, seed, offload, dropped)
        races += [f"seed {seed}, offload {offload}: {race}" for race in found]
        waits |= performed
        values.append(shards)
    return races, waits, values


CASES = [(seed, offload) for seed in range(12) for offload in (False, True)]


def test_random_schedules_on_random_streams_are_ordered(pool):
    for races, waits, _ in pool.run(all_runs, CASES, world_size=2):
        assert races == []
        assert len(waits) == 9
