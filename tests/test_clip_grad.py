"""``clip_grad_norm_`` is ``torch.nn.utils.clip_grad_norm_`` of the dense model, however split."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tpkernels as tpk
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError
from tpkernels.shard_spec import ShardSpec, layout_from_blocks
from tpkernels.testing import RankError

ORDERS = [1.0, 2.0, 3.5, math.inf]
# 2 key-value heads of 2 rows, each held by two of 4 ranks, beside 5 query rows split unevenly.
HEADS = layout_from_blocks(
    [([(0, 2), (2, 1), (3, 1), (4, 1)], 5), ([(0, 2), (0, 2), (2, 2), (2, 2)], 4)]
)


def dense_parameters(seed, dtype=torch.float64):
    """A norm's weight, a bias, and three matrices, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    parameters = []
    for shape in ((3,), (1,), (5, 4), (7, 2), (9, 3)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        parameters.append(parameter)
    return parameters


def with_grad(tensor, gradient):
    parameter = nn.Parameter(tensor)
    parameter.grad = gradient
    return parameter


def split_parameters(group, dense, mesh):
    """The same five: plain twice, DTensors over dimension 0 and replicated, head-split."""
    spec = ShardSpec(tuple(dense[4].shape), 0, HEADS, group.rank())
    result = [with_grad(p.detach().clone(), p.grad.clone()) for p in dense[:2]]
    for parameter, placement in ((dense[2], Shard(0)), (dense[3], Replicate())):
        data, gradient = (
            distribute_tensor(t.detach().clone(), mesh, [placement])
            for t in (parameter, parameter.grad)
        )
        result.append(with_grad(data, gradient))
    head_split = nn.Parameter(ChunkedTensor.wrap(spec.take(dense[4].detach()), spec))
    head_split.grad = spec.take(dense[4].grad)
    return [*result, head_split], spec


def clipped(group, max_norm, order, dtype):
    mesh = tpk.init_mesh(tp=group.size(), device_type="cpu")["tp"]
    dense = dense_parameters(1, dtype)
    ours, spec = split_parameters(group, dense, mesh)
    expected = nn.utils.clip_grad_norm_(dense, max_norm, order)
    total = tpk.clip_grad_norm_(ours, max_norm, order)
    tolerance = {"rtol": 1e-12 if dtype is torch.float64 else 2**-7, "atol": 0}
    torch.testing.assert_close(total.double(), expected.double(), **tolerance)
    for parameter, reference in zip(ours, dense, strict=True):
        gradient, whole = parameter.grad, reference.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif isinstance(parameter, ChunkedTensor):
            gradient, whole = gradient.plain(), spec.take(whole)
        torch.testing.assert_close(gradient, whole, **tolerance)
    return total


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clips", "leaves"])
def test_plain_dtensor_and_replicated_heads(pool, order, max_norm):
    """Z-44: a replicated parameter counts once, a head that two ranks hold is one head."""
    totals = pool.run(clipped, max_norm, order, torch.float64)
    assert all(torch.equal(total, totals[0]) for total in totals)


def test_bf16_gradients_are_added_in_fp32(pool):
    totals = pool.run(clipped, 0.5, 2.0, torch.bfloat16)
    assert totals[0].dtype is torch.float32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 12)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(12, 8)

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(self.norm(x))))


def mesh_whose_names_cross_a_digit():
    """Groups are named by numbers; here rank 0's dp is "999999", rank 1's "1000000"."""
    world = distributed_c10d._world
    before, world.group_count = world.group_count, 999_991
    try:
        return tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    finally:
        world.group_count = before + world.group_count - 999_991


def three_meshes(group):
    """Parameters over dp alone, over tp alone and over both: the norm, and whether dp < tp."""
    mesh = mesh_whose_names_cross_a_digit()
    parameters = []
    for position, axes in enumerate((("dp_shard", "tp"), ("tp",), ("dp_shard",))):
        dtype = torch.float64 if axes == ("tp",) else torch.float32  # a mix-up is an error
        whole = torch.full((4, 2), 10.0**position, dtype=dtype)
        placements = [Shard(dim) for dim in range(len(axes))]
        data = distribute_tensor(whole, mesh[axes], placements)
        parameters.append(with_grad(data, data.clone()))
    total = tpk.clip_grad_norm_(parameters, 1e9, 1.0)
    dp, tp = (mesh[axis].get_group().group_name for axis in ("dp_shard", "tp"))
    return total.item(), dp < tp


def mixed_meshes(group, order):
    """Tensor-parallel by 2, fully_shard by 2: the dense model's norm, and its gradients."""
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    torch.manual_seed(0)
    dense = nn.Sequential(Block(), Block()).double()
    model = copy.deepcopy(dense)
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    dense(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.01, order)

    tpk.parallelize(model, mesh["tp"])
    for block in model:
        fully_shard(block.norm, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    own = x.chunk(2)[mesh["dp_shard"].get_local_rank()]
    model(own).square().mean().backward()
    total = tpk.clip_grad_norm_(model, 0.01, order)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=0)
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-14)
    return {tuple(p.device_mesh.mesh_dim_names) for p in model.parameters()}


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf], ids=str)
def test_tensor_parallel_and_fully_shard_together(pool, order):
    """Z-45: mixed meshes give one global norm."""
    meshes = pool.run(mixed_meshes, order)[0]
    assert meshes == {("dp_shard",), ("dp_shard", "tp")}


def test_the_order_of_sums_does_not_hang_on_the_names_of_groups(pool):
    """Sorted by name, one rank adds up over dp first and its tp peer over tp."""
    results = pool.run(three_meshes)
    assert [dp_first for _, dp_first in results] == [False, True, False, True]
    assert [total for total, _ in results] == [8 * 111.0] * 4


def in_a_smaller_group(group):
    mesh = tpk.init_mesh(dp_shard=2, tp=2, device_type="cpu")
    layout = layout_from_blocks([([(0, 2), (2, 1)], 3)])
    spec = ShardSpec((3, 2), 0, layout, mesh["tp"].get_local_rank())
    parameter = nn.Parameter(ChunkedTensor.wrap(torch.ones(spec.local_shape), spec))
    parameter.grad = torch.ones(spec.local_shape)
    right = tpk.clip_grad_norm_([parameter], 100.0, group=mesh["tp"])
    try:
        tpk.clip_grad_norm_([parameter], 100.0)
    except ConfigError as error:
        return right.item(), str(error)


def test_bare_parameters_of_a_sub_group_need_the_group(pool):
    """Z-44: summed over all ranks, they would count once per replica of the group."""
    for norm, message in pool.run(in_a_smaller_group):
        assert norm == pytest.approx(math.sqrt(6))
        assert "group has 4 ranks" in message and "is split over 2" in message
        assert "group=mesh['tp']" in message


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_without_any_group_it_is_torch_s(order):
    ours, theirs = dense_parameters(2), dense_parameters(2)
    ours.append(nn.Parameter(torch.ones(2)))  # no gradient
    ours.append(with_grad(torch.ones(0, 3).double(), torch.ones(0, 3).double()))
    total = tpk.clip_grad_norm_((p for p in ours), 0.5, order)
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(theirs, 0.5, order))
    for parameter, reference in zip(ours[:5], theirs, strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
    single = dense_parameters(2)[2]
    assert tpk.clip_grad_norm_(single, 0.5, order) == pytest.approx(
        torch.linalg.vector_norm(dense_parameters(2)[2].grad, order).item()
    )


def test_no_gradients_and_numbers_that_are_not_finite():
    assert tpk.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    bad = with_grad(torch.ones(2), torch.tensor([torch.nan, 1.0]))
    assert tpk.clip_grad_norm_([bad], 1.0).isnan()
    bad = with_grad(torch.ones(2), torch.tensor([torch.inf, 1.0]))
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 of the gradients is inf"):
        tpk.clip_grad_norm_([bad], 1.0, error_if_nonfinite=True)
    assert bad.grad[1] == 1  # untouched
    with pytest.raises(ConfigError, match=r"norm_type=0.5 must be at least 1, or math.inf"):
        tpk.clip_grad_norm_([bad], 1.0, 0.5)


def nonfinite_on_one_rank(group):
    mesh = tpk.init_mesh(tp=2, device_type="cpu")["tp"]
    value = torch.inf if group.rank() == 1 else 1.0
    local = torch.full((2,), value)
    parameter = with_grad(
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)]),
        DTensor.from_local(local, mesh, [Shard(0)]),
    )
    tpk.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def test_a_bad_value_on_one_rank_raises_on_all(pools):
    with pytest.raises(RankError, match="of the gradients is inf") as caught:
        pools(2).run(nonfinite_on_one_rank)
    assert len(caught.value.failures) == 2
