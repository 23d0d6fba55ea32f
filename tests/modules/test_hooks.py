"""Hooks on layers that are split: seen and obeyed as in the dense model, or refused by name."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from tpkernels.parallelize import parallelize
from tpkernels.testing import RankError


class Halves(nn.Module):
    """An MLP inside a residual: its leaves are split, the GELU is fused into ``up``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Halves() for _ in range(2))).double()


def doubled(module, args, output):
    return output * 2


def hook_task(group, where, when):
    dense, split = model(), model()
    seen: dict[str, list[torch.Tensor]] = {"dense": [], "split": []}
    if when == "after":
        parallelize(split, group)
    for name, each in (("dense", dense), ("split", split)):
        leaf = each[0].get_submodule(where)
        leaf.register_forward_hook(lambda m, a, y, name=name: seen[name].append(y.detach()))
        leaf.register_forward_hook(doubled)
    if when == "before":
        parallelize(split, group)
    x = torch.randn(3, 6, dtype=torch.float64)
    ours, theirs = split(x), dense(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (part,), (whole,) = seen["split"], seen["dense"]
    start = 0 if group.rank() == 0 else 5
    expected = whole if where == "down" else whole[:, start : start + 5]
    torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)
    copied = copy.deepcopy(split)  # the copy's activation follows the copy's layer
    torch.testing.assert_close(copied(x), ours, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("where", "when"), list(itertools.product(["up", "down"], ["before", "after"])), ids="-".join
)
def test_hooks_see_and_change_what_they_do_in_the_dense_model(pool, where, when):
    pool.run(hook_task, where, when, world_size=2)


def gradient_hook_task(group, kind):
    split = model()
    weight = split[1].up.weight
    if kind == "hook":
        weight.register_hook(lambda grad: grad * 2)
    else:
        weight.register_post_accumulate_grad_hook(lambda p: None)
    before = {key: value.clone() for key, value in split.state_dict().items()}
    try:
        parallelize(split, group)
    finally:
        assert all(torch.equal(split.state_dict()[key], value) for key, value in before.items())
        assert type(split[0].up) is nn.Linear


@pytest.mark.parametrize("kind", ["hook", "post_accumulate"])
def test_hooks_on_a_weights_gradient_are_refused_and_nothing_is_half_replaced(pool, kind):
    with pytest.raises(RankError, match=r"weight of a .* has hooks on its gradient.*Fix:"):
        pool.run(gradient_hook_task, kind, world_size=2)
