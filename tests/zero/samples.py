"""Small models, their batches and the training loop that the tests of ZeRO share."""

from __future__ import annotations

import contextlib
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk

VOCAB, WIDTH, SEQUENCE = 12, 8, 3
ROWS = 24  # of a whole batch: divides among 1 to 4 ranks, twice


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Language(nn.Module):
    """Embedding, blocks, head; ``kind``: plain, tied, frozen (half of it), or how it recomputes."""

    def __init__(self, kind="plain", blocks=3, width=WIDTH):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "frozen":
            self.embedding.requires_grad_(False)
            self.blocks[0].requires_grad_(False)
            self.blocks[1].fc1.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.kind in ("reentrant", "recomputed") and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Blocks one after another, of floats; ``order`` may be changed between calls."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.order = list(range(blocks))

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x)
        return x


def language(kind="plain", dtype=torch.float32, seed=0, **size):
    torch.manual_seed(seed)
    return Language(kind, **size).to(dtype)


def stack(dtype=torch.float64, seed=0, **size):
    torch.manual_seed(seed)
    return Stack(**size).to(dtype)


def batch(step, rank=0, world=1, rows=ROWS):
    """This rank's rows of the tokens and targets of ``step``."""
    generator = torch.Generator().manual_seed(1000 + step)
    both = torch.randint(VOCAB, (2, rows, SEQUENCE), generator=generator)
    return both[:, rank * rows // world : (rank + 1) * rows // world]


def floats(step, rank=0, world=1, rows=ROWS, width=WIDTH, dtype=torch.float64):
    """This rank's rows of the inputs of ``step``."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)
    return x[rank * rows // world : (rank + 1) * rows // world]


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make(model_parameters, optimizer, manager=None):
    cls, settings = {
        "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    }[optimizer]
    if manager is not None:
        return manager.optimizer(cls, **settings)
    return cls([p for p in model_parameters if p.requires_grad], **settings)


def train(model, optimizer, steps, rank=0, world=1, manager=None, accumulate="no"):
    """Losses of ``steps`` steps; ``accumulate``: "no", "no_sync" or "every" of two micro-batches.

    Micro-batches are strided over a rank's rows: on any number of ranks the step sees them all.
    """
    losses = []
    for step in range(steps):
        both = batch(step, rank, world)
        parts = [both] if accumulate == "no" else [both[:, 0::2], both[:, 1::2]]
        total = 0.0
        for number, (tokens, targets) in enumerate(parts):
            collects = accumulate == "no_sync" and number == 0 and manager is not None
            with manager.no_sync() if collects else contextlib.nullcontext():
                loss = loss_of(model, tokens, targets) / len(parts)
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def storages(without=()):
    """Bytes by address of every storage on the CPU that a tensor holds."""
    found = {}
    for each in gc.get_objects():
        if not isinstance(each, torch.Tensor) or isinstance(each, FakeTensor):
            continue
        if each.device.type != "cpu":
            continue
        storage = each.untyped_storage()
        try:
            address = storage.data_ptr() if storage.nbytes() else 0
        except RuntimeError:  # a functional or batched tensor that another test left
            continue
        if address and address not in without:
            found[address] = storage.nbytes()
    return found


def sharded(group, model, **settings):
    return tpk.zero(model, group, **settings)


def full(model):
    """The whole parameters by name, as plain tensors."""
    return {name: value.detach().clone() for name, value in tpk.full_state_dict(model).items()}


def all_sharded(manager):
    """Whether every unit shows shards, and holds no memory but that of residents."""
    units = manager._engine.units
    allocated = any(buffer.is_allocated for unit in units for buffer in unit.buffers)
    shown = any(unit.shown for unit in units)
    return not shown and (manager.stats()["stage"] < 3 or not allocated)


def gradients(model):
    """The whole gradient of every parameter that has one, by name; collective."""
    with torch.no_grad():
        kept = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name]) if name in kept else parameter.zero_()
        result = {n: v for n, v in full(model).items() if n in kept}
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return result
