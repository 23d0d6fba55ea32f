"""Gradients are those of one process, whatever a module takes, returns and does to tensors."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpkernels as tpk
from tests.zero import samples
from tests.zero.samples import WIDTH, Block
from tpkernels.testing import max_relative_error

Pair = namedtuple("Pair", "hidden other")


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    note: str = "kept"
    rest: object = None


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Attributes:
    def __init__(self, hidden):
        self.inner = {"deep": [hidden]}

    @property
    def hidden(self):
        return self.inner["deep"][0]


PACKS = {
    "dict": (lambda x: {"hidden": x, "none": None}, lambda y: y["hidden"]),
    "tuple": (lambda x: (None, x, "text"), lambda y: y[1]),
    "named tuple": (lambda x: Pair(x, None), lambda y: y.hidden),
    "dataclass": (Record, lambda y: y.hidden),
    "slots": (Slotted, lambda y: y.hidden),
    "attributes": (Attributes, lambda y: y.hidden),
}


class Packing(Block):
    """Takes and gives its tensor inside something."""

    def __init__(self, pack):
        super().__init__()
        self.pack, self.unpack = PACKS[pack]

    def forward(self, given, *, scale):
        x = given if isinstance(given, torch.Tensor) else self.unpack(given)
        return self.pack(super().forward(x) * scale)


class Packed(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.blocks = nn.ModuleList(Packing(pack) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=1.5)
        return self.blocks[0].unpack(x)


class EditsOutput(samples.Stack):
    """What the caller does to a block's output."""

    def forward(self, x):
        x = self.blocks[0](x)
        x.mul_(2)
        x = self.blocks[1](x)
        x[:, :3] = 0.5
        x = self.blocks[2](x)
        x.add_(1).mul_(0.5)
        return x


class ViewBlock(Block):
    def forward(self, x):
        return super().forward(x).view(-1, 2, WIDTH // 2)


class EditsView(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ViewBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y[:, 0].mul_(3)
            y.add_(0.25)
            x = y.flatten(1)
        return x


class InplaceFirst(Block):
    def forward(self, x):
        x = torch.relu_(x) if not (x.is_leaf and x.requires_grad) else x.relu()
        return self.fc2(self.fc1(self.norm(x)))


class EditsInput(nn.Module):
    """Each block edits its input in place first (nn.ReLU(inplace=True))."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(InplaceFirst() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class ReturnsInput(Block):
    def forward(self, x):
        return x, super().forward(x)


class GivesBack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsInput() for _ in range(3))

    def forward(self, x):
        total = 0
        for block in self.blocks:
            same, x = block(x)
            total = total + same
        return x + total


class NoInputGradient(samples.Stack):
    """Every block sees the detached sum of what came before; all outputs count."""

    def forward(self, x):
        outputs = []
        for block in self.blocks:
            x = block(x.detach())
            outputs.append(x)
        return sum(outputs)


class Repeats(samples.Stack):
    def forward(self, x):
        for index in (0, 1, 0, 2, 1, 1):
            x = self.blocks[index](x)
        return x


class Grows(Block):
    """Its input is cut out of, and its output joined to, what others see."""

    def forward(self, x):
        a, b = x.split(WIDTH // 2, dim=-1)
        return super().forward(torch.cat([b, a], dim=-1)).split(WIDTH // 2, dim=-1)


class Splits(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Grows() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            a, b = block(x)
            x = torch.cat([a, b * 2], dim=-1)
        return x


class OddShapes(nn.Module):
    """Z-20: parameters of shapes (1,), (2,), () beside a matrix."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(1))
        self.two = nn.Parameter(torch.randn(2))
        self.scalar = nn.Parameter(torch.randn(()))
        self.fc = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.fc(x) * self.two * self.scalar + self.one


class Branches(samples.Stack):
    """Two branches of one trunk, one of them twice: a diamond."""

    def forward(self, x):
        trunk = self.blocks[0](x)
        return self.blocks[1](trunk) * self.blocks[2](trunk) + self.blocks[2](x)


class Recomputes(samples.Stack):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.reentrant)
        return x


MODELS = {
    **{name: lambda name=name: Packed(name) for name in PACKS},
    "edits an output": EditsOutput,
    "edits a view": EditsView,
    "edits its input": EditsInput,
    "gives its input back": GivesBack,
    "no input gradients": NoInputGradient,
    "repeats": Repeats,
    "splits": Splits,
    "odd shapes (Z-20)": OddShapes,
    "diamond": Branches,
    "recomputed": lambda: Recomputes(False),
    "reentrant": lambda: Recomputes(True),
}


def built(make):
    torch.manual_seed(0)
    return make().double()


def plain(model, x):
    return model(x).square().mean().backward()


def siamese(model, x):
    """Z-12: two forwards, one backward."""
    (model(x).square().mean() + model(x * 0.5).pow(3).mean()).backward()


def two_backwards_of_one_graph(model, x):
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def eval_between(model, x):
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    loss.backward()


def forward_between(model, x):
    """A forward whose graph is dropped, between a forward and its backward."""
    loss = model(x).square().mean()
    model(x + 1)
    loss.backward()


def input_needs_gradient(model, x):
    x = x.clone().requires_grad_()
    model(x).square().mean().backward()
    model.seen = x.grad


def interleaved(model, x):
    first, second = model(x).square().mean(), model(x * 2).square().mean()
    first.backward()
    second.backward()


PASSES = {
    "one": plain,
    "siamese (Z-12)": siamese,
    "retain_graph": two_backwards_of_one_graph,
    "eval between": eval_between,
    "forward between": forward_between,
    "input": input_needs_gradient,
    "interleaved": interleaved,
}


def every_model_and_pass(group, passes, stage):
    """Names of what differed from one process, with how much.

    Of many passes each model takes the first and another one, in turn.
    """
    rank, world = group.rank(), group.size()
    wrong = {}
    for number, (name, make) in enumerate(MODELS.items()):
        few = passes if len(passes) < 3 else [passes[0], passes[1 + number % (len(passes) - 1)]]
        for label in few:
            reference, model = built(make), built(make)
            PASSES[label](reference, samples.floats(0))
            manager = tpk.zero(model, group, stage=stage, prefetch_bytes=3000)
            key = f"{name}, {label}"
            try:
                for _ in range(2):  # the second follows a recorded order
                    model.zero_grad()
                    PASSES[label](model, samples.floats(0, rank, world))
            except Exception as error:
                wrong[key] = f"{type(error).__name__}: {error}"
                manager.reset()
                continue
            if stage == 3 and not samples.all_sharded(manager):
                wrong[key] = "left gathered"
            expected = {n: p.grad for n, p in reference.named_parameters()}
            found = samples.gradients(model)
            if found.keys() != {n for n, g in expected.items() if g is not None}:
                wrong[key] = f"gradients of {sorted(found)}"
                continue
            off = max(max_relative_error(found[n], expected[n]) for n in found)
            if (
                label == "input" and reference.seen is not None
            ):  # of the mean over a rank's own rows
                own = reference.seen.chunk(world)[rank]
                off = max(off, max_relative_error(model.seen / world, own))
            if not off < 1e-10:
                wrong[key] = f"off by {off}"
    return wrong


@pytest.mark.parametrize(
    ("world", "stage", "passes"),
    [
        (1, 3, ["one", "interleaved"]),
        (2, 3, list(PASSES)),
        (2, 2, ["siamese (Z-12)", "retain_graph"]),
    ],
    ids=["1 rank", "2 ranks", "stage 2"],
)
def test_gradients_are_those_of_one_process(pool, world, stage, passes):
    for wrong in pool.run(every_model_and_pass, passes, stage, world_size=world, timeout=120):
        assert wrong == {}
