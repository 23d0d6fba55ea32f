"""Models on the meta device get their values unit by unit, the same on any number of ranks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels.errors import UnsupportedModuleError
from tpkernels.testing import max_relative_error


class Rotary(nn.Module):
    """Holds a buffer alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(4))

    def reset_parameters(self):
        self.angles.copy_(torch.arange(4.0))

    def forward(self, x):
        return x + self.angles.sum()


class WithBuffers(samples.Language):
    def __init__(self, kind="plain", width=samples.WIDTH, blocks=3):
        super().__init__(kind, blocks, width)
        self.rotary = Rotary()
        self.counted = nn.BatchNorm1d(width)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.counted(self.rotary(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


def built_on_meta(group, kind):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = WithBuffers(kind)
    manager = tpk.zero(model, group)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    state = samples.full(model)
    samples.loss_of(model, *samples.batch(0, group.rank(), group.size())).backward()
    assert samples.all_sharded(manager)
    return state, flags, len(samples.gradients(model))


@pytest.mark.parametrize("kind", ["plain", "tied", "frozen"])
def test_values_do_not_depend_on_the_world_size(pool, kind):
    states = []
    for world in (1, 2, 4):
        results = pool.run(built_on_meta, kind, world_size=world)
        for state, flags, gradients in results:
            states.append(state)
            expected = {n: p.requires_grad for n, p in WithBuffers(kind).named_parameters()}
            assert flags == expected and gradients == sum(expected.values())
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    first = states[0]
    assert torch.equal(first["rotary.angles"], torch.arange(4.0))
    assert torch.equal(first["norm.weight"], torch.ones(8))
    assert first["counted.num_batches_tracked"] == 0 and first["counted.running_var"].min() == 1
    assert 0.5 < first["embedding.weight"].std() < 1.5
    assert not torch.equal(first["blocks.0.fc1.weight"], first["blocks.1.fc1.weight"])
    if kind == "tied":
        assert torch.equal(first["embedding.weight"], first["head.weight"])


def peak_of_construction(group):
    """The most bytes of tensors there were, while a model was built and sharded, and its own."""
    before = samples.storages().keys()
    peak = 0
    original = nn.Linear.reset_parameters

    def watched(linear):
        nonlocal peak
        original(linear)
        if linear.out_features == 64:  # the second of a block: all of it is there
            peak = max(peak, sum(samples.storages(before).values()))

    nn.Linear.reset_parameters = watched
    try:
        with torch.device("meta"):
            model = samples.Language(blocks=8, width=64)
        whole = sum(p.numel() for p in model.parameters()) * 4
        tpk.zero(model, group)
    finally:
        nn.Linear.reset_parameters = original
    gc.collect()
    return peak, sum(samples.storages(before).values()), whole


def test_the_whole_model_never_exists(pool):
    for peak, after, whole in pool.run(peak_of_construction, world_size=4):
        assert whole / 4 <= after < whole * 0.27
        assert whole / 8 < peak < whole * 0.5  # the shards, and one unit of eight


class Unset(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class Hub(nn.Module):
    """As Hugging Face's: the model initialises its modules."""

    def __init__(self, hub):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.inner = Unset()
        if hub:
            self._init_weights = self._fill

    def _fill(self, module):
        if isinstance(module, Unset):
            module.scale.fill_(7)

    def forward(self, x):
        return self.fc(x) * self.inner.scale


def test_a_module_that_cannot_be_initialised_is_named():
    with torch.device("meta"):
        model, hub = Hub(False), Hub(True)
    with pytest.raises(
        UnsupportedModuleError, match=r"inner \(Unset\) holds scale on the meta.*reset_parameters"
    ):
        tpk.zero(model)
    assert all(p.is_meta for p in model.parameters())
    tpk.zero(hub)
    assert torch.equal(samples.full(hub)["inner.scale"], torch.full((3,), 7.0))


def half_on_meta(group):
    torch.manual_seed(0)
    model = samples.language()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.blocks[1].to("meta")
    tpk.zero(model, group)
    state = samples.full(model)
    return all(torch.equal(v, before[n]) for n, v in state.items() if "blocks.1" not in n)


def test_what_has_values_keeps_them(pool):
    assert pool.run(half_on_meta, world_size=2) == [True, True]


def offloaded(group):
    rank, world = group.rank(), group.size()
    model, reference = samples.language(dtype=torch.float64), samples.language(dtype=torch.float64)
    manager = tpk.zero(model, group, offload_policy="cpu")
    losses = samples.train(model, samples.make(None, "adamw", manager), 3, rank, world, manager)
    truth = samples.train(reference, samples.make(reference.parameters(), "adamw"), 3)
    found = samples.full(model)
    error = max(max_relative_error(found[n], p) for n, p in reference.named_parameters())
    return error, losses, truth, {p.device.type for p in manager.parameters()}


def test_offload_on_a_cpu_changes_nothing(pool):
    for error, _, _, devices in pool.run(offloaded, world_size=2):
        assert error < 1e-12 and devices == {"cpu"}
