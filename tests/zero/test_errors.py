"""After an error everything is sharded again, and the next step is right."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models.zoo import llama
from tests.zero import samples
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import (
    AgreementError,
    ConfigError,
    TPKernelsWarning,
    UnsupportedModuleError,
)
from tpkernels.testing import max_relative_error
from tpkernels.zero import ZeroConfig


class Stop(BaseException):
    """As a KeyboardInterrupt: not an Exception, so no hook of PyTorch's runs."""


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error("in backward")


class Fragile(samples.Block):
    fails = None

    def forward(self, x):
        y = super().forward(x)
        if self.fails == "forward":
            raise self.error("in forward")
        return FailsInBackward.apply(y, self.error) if self.fails == "backward" else y


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.first = nn.Linear(samples.WIDTH, samples.WIDTH)
        self.blocks = nn.ModuleList(Fragile() for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def built(recompute=False):
    torch.manual_seed(0)
    return Model(recompute).double()


def step(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


def fail_and_go_on(group, where, error, budget, recompute):
    rank, world = group.rank(), group.size()
    reference, model = built(), built(recompute)
    step(reference, samples.floats(1))
    manager = tpk.zero(model, group, prefetch_bytes=budget)
    x = samples.floats(1, rank, world)
    step(model, x)
    model.blocks[1].fails, model.blocks[1].error = where, error
    with pytest.raises(error, match="in "):
        if where == "loss":
            model(x)
            raise error("in the loss")
        step(model, x)
    model.blocks[1].fails = None
    sharded = all(isinstance(p, ChunkedTensor) and p.dim() == 1 for p in manager.parameters())
    idle, gathered = manager.stats()["idle_bytes"], manager.stats()["gathered_bytes"]
    assert gathered == idle <= budget
    assert where == "loss" or gathered == 0
    step(model, x)
    found = samples.gradients(model)
    off = max(max_relative_error(found[n], p.grad) for n, p in reference.named_parameters())
    return sharded, off < 1e-10, samples.all_sharded(manager)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("error", [ValueError, Stop], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_the_step_after_an_error_is_right(pool, where, error, recompute):
    for budget in (0, 10**6):
        for result in pool.run(fail_and_go_on, where, error, budget, recompute, world_size=2):
            assert result == (True, True, True)


def caught_inside(group):
    """A module that catches the error of its child goes on."""
    model = built()
    manager = tpk.zero(model, group)

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            try:
                return self.inner(x)
            except ValueError:
                self.inner.blocks[1].fails = None
                return self.inner(x)

    outer = Catching()
    model.blocks[1].fails, model.blocks[1].error = "forward", ValueError
    outer(samples.floats(1, group.rank(), group.size())).square().mean().backward()
    return samples.all_sharded(manager), len(samples.gradients(model))


def test_an_error_caught_inside_the_forward(pool):
    assert pool.run(caught_inside, world_size=2) == [(True, 20), (True, 20)]


class Closure(samples.Block):
    def forward(self, x):
        y = super().forward(x)
        return lambda: y


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Closure() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)()
        return x


def hidden_output(group):
    model = Hidden()
    manager = tpk.zero(model, group, prefetch_bytes=0)
    with pytest.raises(RuntimeError) as caught:
        model(samples.floats(0, dtype=torch.float32)).sum().backward()
    assert manager.stats()["gathered_bytes"] == 0
    return str(caught.value)


def test_an_output_that_hides_its_tensor_is_an_error(pool):
    """Never a crash, never a wrong gradient: autograd's version counters notice."""
    for message in pool.run(hidden_output, world_size=2):
        assert "inplace operation" in message


def backward_after_step(group, stage):
    """As without sharding: the weights that backward needs are gone."""
    model = built()
    manager = tpk.zero(model, group, stage=stage)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    step(model, samples.floats(0))
    loss = model(samples.floats(0)).square().mean()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    step(model, samples.floats(0))
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_backward_after_the_weights_changed_is_an_error(pool, stage):
    assert pool.run(backward_after_step, stage, world_size=2) == [True, True]


# --- ranks that do different things ---


class Experts(nn.Module):
    """Each rank may choose its expert; ``skip`` leaves one parameter without a gradient."""

    def __init__(self, choice=0, skip=False):
        super().__init__()
        self.first = nn.Linear(samples.WIDTH, samples.WIDTH)
        self.experts = nn.ModuleList(samples.Block() for _ in range(2))
        self.choice, self.skip = choice, skip

    def forward(self, x):
        x = self.first(x)
        return self.experts[self.choice](x) if self.choice is not None else x


class Branch(samples.Block):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(samples.WIDTH))
        self.takes = True

    def forward(self, x):
        y = super().forward(x)
        return y * self.extra if self.takes else y


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def different_experts(group, choices, whole):
    torch.manual_seed(0)
    model = Experts(choices[group.rank()])
    units = None if not whole else [Experts]
    config = ZeroConfig(units=units, find_unused_parameters=whole)
    manager = tpk.zero(model, group, config=config)
    try:
        model(samples.floats(0, dtype=torch.float32)).sum().backward()
    except AgreementError as error:
        assert manager.stats()["gathered_bytes"] == 0
        return str(error)
    return sorted(samples.gradients(model))


def test_ranks_that_take_different_experts_are_told(pool):
    """Z-7: an error, at once, that names what each rank does."""
    for message in pool.run(different_experts, (0, 1), False, world_size=2, timeout=20):
        assert re.search(r"rank 0 .*'experts.0', rank 1 .*'experts.1'", message), message


def test_ranks_that_take_different_experts_of_one_unit(pool):
    """Z-7: the whole group of experts as one unit works."""
    first, second = pool.run(different_experts, (0, 1), True, world_size=2, timeout=20)
    assert first == second and len(first) == 2 + 2 * 6


def test_a_module_that_only_one_rank_calls_is_named(pool):
    """Z-9: rank 1 has no image."""
    messages = pool.run(different_experts, (0, None), False, world_size=2, timeout=20)
    assert all("rank 0" in each and "'experts.0'" in each and "Fix: " in each for each in messages)


def different_branches(group, find):
    torch.manual_seed(0)
    model = Branches()
    manager = tpk.zero(model, group, config=ZeroConfig(find_unused_parameters=find))
    model.blocks[1].takes = group.rank() == 0
    try:
        model(samples.floats(0, dtype=torch.float32)).sum().backward()
    except AgreementError as error:
        assert manager.stats()["gathered_bytes"] == 0
        return str(error)
    gradients = samples.gradients(model)
    alone = Branches()
    alone.load_state_dict(tpk.full_state_dict(model))
    alone(samples.floats(0, dtype=torch.float32)).sum().backward()
    extra = alone.blocks[1].extra.grad / group.size()
    torch.testing.assert_close(gradients["blocks.1.extra"], extra, rtol=1e-5, atol=1e-6)
    return "completed"


def test_a_gradient_that_only_one_rank_has(pool):
    """Z-8: an error that names the parameter; counted as zero where that was asked for."""
    has, lacks = pool.run(different_branches, False, world_size=2, timeout=20)
    assert "'blocks.1'" in has and "'blocks.1'" in lacks
    assert "blocks.1.extra of 'blocks.1' got no gradient yet" in lacks
    assert "find_unused_parameters=True" in has
    assert pool.run(different_branches, True, world_size=2) == ["completed"] * 2


# --- second order ---


def gradient_of_a_gradient(group, keep):
    reference, model = built(), built()
    config = ZeroConfig(reshard_after_backward=not keep)
    manager = tpk.zero(model, group, config=config)

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return slope.square().sum()

    x = samples.floats(0)
    try:
        penalty(model, x).backward()
    except ConfigError as error:
        return str(error)
    penalty(reference, x).backward()
    found = samples.gradients(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)
    assert manager.stats()["idle_bytes"] <= manager.stats()["prefetch_bytes"]
    return "equal"


def test_second_order(pool):
    """Z-17: with the weights kept it works; without, the error names the option."""
    assert pool.run(gradient_of_a_gradient, True, world_size=2) == ["equal", "equal"]
    for message in pool.run(gradient_of_a_gradient, False, world_size=2):
        assert "reshard_after_backward=False" in message


# --- what cannot be sharded ---


def test_what_zero_refuses():
    """Every refusal names the parameter and the fix; nothing was sharded by then."""
    model = samples.language()
    with pytest.raises(ConfigError, match=r"must be an nn\.Module, got int"):
        tpk.zero(3)
    with pytest.raises(ConfigError, match=r"stage, prefetch_bytes given beside config.*Fix: "):
        tpk.zero(model, stage=2, prefetch_bytes=1, config=ZeroConfig())
    with pytest.raises(ConfigError, match=r"offload_policy given beside config.*Fix: "):
        tpk.zero(model, offload_policy="cpu", config=ZeroConfig())
    with pytest.raises(ConfigError, match="config must be a ZeroConfig, got dict"):
        tpk.zero(model, config={"stage": 3})
    with pytest.raises(UnsupportedModuleError, match="GELU has no parameters"):
        tpk.zero(nn.GELU())
    with pytest.raises(ConfigError, match="no shape yet"):
        tpk.zero(nn.Sequential(nn.LazyLinear(3)))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(ConfigError, match=r"head.weight has a gradient already.*Fix: model.zero"):
        tpk.zero(model)
    assert model.head.weight.shape == (samples.VOCAB, samples.WIDTH)


def test_parameters_that_cannot_be_moved():
    model = samples.language()
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(UnsupportedModuleError, match=r"head.weight has hooks.*after zero"):
        tpk.zero(model)


def sharded_twice(group):
    model = samples.language()
    tpk.zero(model, group)
    with pytest.raises(UnsupportedModuleError, match=r"sharded by zero\(\) already"):
        tpk.zero(model, group)
    other = samples.language(seed=group.rank())
    with pytest.raises(AgreementError, match=r"same seed or checkpoint.*TPKERNELS_CHECK=off"):
        tpk.zero(other, group)
    mesh = tpk.init_mesh(dp_shard=2, device_type="cpu")
    with pytest.raises(ConfigError, match=r"dimensions.*Fix: mesh\['dp_shard'\]"):
        tpk.zero(samples.language(), mesh)


def test_refusals_across_ranks(pools):
    pools(2).run(sharded_twice)


# --- ranks that ask for different things ---


def frozen_on_one(rank):
    model = samples.language()
    model.head.requires_grad_(rank == 0)
    return model


UNEQUAL = {
    "stage": lambda rank: (samples.language(), {"stage": 2 + rank}),
    "prefetch_bytes": lambda rank: (samples.language(), {"prefetch_bytes": 5000 + rank}),
    "max_live_bytes": lambda rank: (samples.language(), {"max_live_bytes": 10**6 * rank + 10**6}),
    "mp_policy": lambda rank: (samples.language(), {"mp_policy": "bfloat16"} if rank else {}),
    "offload_optimizer": lambda rank: (
        samples.language(),
        {"offload_policy": "cpu"} if rank else {},
    ),
    "find_unused_parameters": lambda rank: (
        samples.language(),
        {"config": ZeroConfig(find_unused_parameters=rank == 1)},
    ),
    "units": lambda rank: (samples.language(blocks=2 + rank), {}),
    "units' shapes": lambda rank: (samples.language(width=8 * (1 + rank)), {}),
    "units' dtypes": lambda rank: (samples.language().to((torch.float32, torch.double)[rank]), {}),
    "units' requires_grad": lambda rank: (frozen_on_one(rank), {}),
    "units' device": lambda rank: (samples.language().to(("cpu", "meta")[rank]), {}),
}


def unequal_settings(group, replicated):
    rank, messages = group.rank(), {}
    mesh = group
    if replicated:
        whole = tpk.init_mesh(dp_replicate=2, dp_shard=2, device_type="cpu")
        mesh = whole["dp_replicate", "dp_shard"]
    odd = int(rank == group.size() - 1)
    for name, build in UNEQUAL.items():
        model, settings = build(odd)
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(AgreementError) as caught:
            tpk.zero(model, mesh, **settings)
        messages[name] = str(caught.value)
        assert [p.shape for p in model.parameters()] == shapes  # nothing is sharded
    tpk.zero(samples.language(), mesh)  # and the ranks are in step
    return messages


@pytest.mark.parametrize("replicated", [False, True])
def test_settings_that_differ_between_ranks_are_named(pool, replicated):
    world = 4 if replicated else 2
    for rank, messages in enumerate(pool.run(unequal_settings, replicated, world_size=world)):
        for name, message in messages.items():
            assert f"zero(): {name} differs between the ranks: rank {world - 1} from" in message
            assert f"here, on rank {rank}, it is " in message and "Fix: " in message
    assert "it is 2000000" in messages["max_live_bytes"]


def unequal_unchecked(group):
    model = samples.language()
    manager = tpk.zero(model, group, prefetch_bytes=10**6 + group.rank())
    return manager.stats()["prefetch_bytes"]


def test_settings_are_not_compared_where_checks_are_off(pool):
    found = pool.run(unequal_unchecked, world_size=2, env={"TPKERNELS_CHECK": "off"})
    assert found == [10**6, 10**6 + 1]


def over_tensor_parallel_ranks(group):
    """``zero(model)`` without a mesh takes the tensor-parallel ranks for copies."""
    mesh = tpk.init_mesh(tp=2, device_type="cpu")
    model = llama().double()
    tpk.parallelize(model, mesh["tp"])
    with pytest.raises(AgreementError, match=r"or the mesh: tensor-parallel.*mesh\['dp_shard'\]"):
        tpk.zero(model)


def test_the_mesh_of_tensor_parallel_ranks_is_named(pools):
    pools(2).run(over_tensor_parallel_ranks, world_size=2)


def embedding(kind, **settings):
    return nn.Sequential(kind(5, 4, **settings), nn.Linear(4, 4))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_cannot_be_sharded(kind):
    with pytest.raises(UnsupportedModuleError, match=r"^0 has max_norm=1.0: .*Fix: max_norm=None"):
        tpk.zero(embedding(kind, max_norm=1.0))
    with pytest.raises(UnsupportedModuleError, match=r"^0 has sparse=True: .*Fix: sparse=False"):
        tpk.zero(embedding(kind, sparse=True))
    frozen = embedding(kind, sparse=True)
    frozen[0].requires_grad_(False)
    tpk.zero(frozen)  # it has no gradient


def test_an_optimizer_made_before_is_told():
    model, other = samples.language(), samples.language()
    early = torch.optim.AdamW([model.head.weight], lr=0.1)
    with pytest.warns(TPKernelsWarning, match=r"AdamW was made of this model's.*Fix: .*after zero"):
        manager = tpk.zero(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tpk.zero(other)  # another model's optimizer
        manager.optimizer(torch.optim.AdamW)
    assert early.param_groups[0]["params"][0].shape == (samples.VOCAB, samples.WIDTH)


def refused_whole(group):
    """What is refused in the last unit leaves the first one as it was."""
    told = []
    for spoil, settings in (
        (lambda m: m.blocks[-1].fc1.weight.register_hook(lambda g: g), {}),
        (lambda m: m.blocks[-1].fc1.weight.data.add_(group.rank()), {}),
        (lambda m: None, {"prefetch_bytes": 100, "strict": True}),
    ):
        model = samples.language()
        before = {name: id(p) for name, p in model.named_parameters()}
        spoil(model)
        with pytest.raises((ConfigError, AgreementError)) as caught:
            tpk.zero(model, group, **settings)
        told.append(str(caught.value))
        assert {name: id(p) for name, p in model.named_parameters()} == before
    return told


def test_a_refusal_changes_nothing(pool):
    for hooks, weights, budget in pool.run(refused_whole, world_size=2):
        assert "hooks" in hooks and "differs in values" in weights and "prefetch_bytes" in budget
