"""``tpk.comm.all_reduce_``: as ``dist.all_reduce``, over shared memory and over any backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels as tpk
from tests.overlap.samples import integers, normals
from tpkernels import native
from tpkernels.comm import direct, tpshm
from tpkernels.errors import CommunicationError, ConfigError
from tpkernels.testing import count_collectives

needs_native = pytest.mark.skipif(
    not native.status().available, reason="tpshm is compiled; this machine has none"
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OPS = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def sharing(group):
    """A group of the same ranks over shared memory."""
    tpshm.register()
    return dist.new_group(dist.get_process_group_ranks(group), backend="tpshm")


def of_kind(group, kind):
    return sharing(group) if kind == "tpshm" else group


def values(group, kind):
    group = of_kind(group, kind)
    assert direct.has_peers(group.group_name) is (kind == "tpshm")
    rank, world = group.rank(), group.size()
    for dtype in (*DTYPES, *INTEGERS):
        for shape in ((), (1,), (3, 5), (0,), (70_001,)):
            parts = [integers(r, *shape).to(dtype) for r in range(world)]
            for op, whole in OPS.items():
                x = parts[rank].clone()
                result = tpk.comm.all_reduce_(x, group, op)
                assert result is x
                expected = whole(torch.stack(parts), 0).to(dtype)
                assert torch.equal(x, expected), (dtype, shape, op)
    x = torch.full((4,), float(rank))
    tpk.comm.all_reduce_(x, group, "avg")
    assert torch.equal(x, torch.full((4,), (world - 1) / 2))


@needs_native
@pytest.mark.parametrize("world", [2, 3])
def test_values_over_shared_memory(pools, world):
    pools(world).run(values, "tpshm", world_size=world, timeout=60)


def test_values_over_gloo(pools):
    pools(2).run(floats_over_gloo, world_size=2)


def floats_over_gloo(group):
    assert not direct.has_peers(group.group_name)
    x = torch.full((3,), float(group.rank() + 1))
    assert torch.equal(tpk.comm.all_reduce_(x), torch.full((3,), 3.0))


def layouts(group):
    """TP-16, TP-19: a view gives what its contiguous copy would, and its neighbours stay."""
    group = sharing(group)
    base = torch.arange(24.0).reshape(4, 3, 2) * (group.rank() + 1)
    total = torch.arange(24.0).reshape(4, 3, 2) * 3
    for view in (
        lambda t: t.transpose(1, 2),
        lambda t: t[:, 1],
        lambda t: t[::2],
        lambda t: t[1:, :, 1],
    ):
        x = base.clone()
        tpk.comm.all_reduce_(view(x), group)
        expected = base.clone()
        view(expected).copy_(view(total))
        assert torch.equal(x, expected)


@needs_native
def test_any_layout(pools):
    pools(2).run(layouts, world_size=2)


def half_sums(group):
    """TP-33: fp32 accumulation in rank order, one rounding, the same bits on every rank."""
    group = sharing(group)
    rank, world = group.rank(), group.size()
    for dtype in (torch.bfloat16, torch.float16):
        for size in (100, 300_001):
            parts = [(normals(r, size) * 10.0 ** (r - 1)).to(dtype) for r in range(world)]
            expected = parts[0].float()
            for each in parts[1:]:
                expected = expected + each.float()
            x = parts[rank].clone()
            assert torch.equal(tpk.comm.all_reduce_(x, group), expected.to(dtype))


@needs_native
def test_half_types_are_rounded_once(pools):
    pools(3).run(half_sums, world_size=3)


def who(group):
    group = sharing(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    with count_collectives() as counts:
        found = [
            tpk.comm.all_reduce_(torch.ones(2), each)[0].item() for each in (group, mesh, None)
        ]
    return found, counts["all_reduce"].calls, counts["all_reduce"].bytes


@needs_native
def test_groups_meshes_and_none(pools):
    for found, calls, sent in pools(2).run(who, world_size=2):
        assert found == [2.0, 2.0, 2.0]
        assert (calls, sent) == (3, 24)  # the direct ones are counted like those of the backend


def test_a_group_of_one_keeps_the_tensor():
    x = torch.ones(3)
    assert tpk.comm.all_reduce_(x) is x and torch.equal(x, torch.ones(3))


def test_an_unknown_op_is_refused():
    with pytest.raises(ConfigError, match=r"op='prod' is not known; allowed: sum, avg, max, min"):
        tpk.comm.all_reduce_(torch.ones(3), op="prod")


def wrong_arguments(group):
    group = sharing(group)
    said = []
    for tensor, op in (([1.0], "sum"), (torch.ones(3), "prod"), (torch.ones(3), dist.ReduceOp.SUM)):
        with pytest.raises(ConfigError) as caught:
            tpk.comm.all_reduce_(tensor, group, op)
        said.append(str(caught.value))
    return said


@needs_native
def test_wrong_arguments_are_refused_with_the_fix(pools):
    for said in pools(2).run(wrong_arguments, world_size=2):
        assert "tensor must be a Tensor, got list" in said[0]
        assert all("is not known; allowed: sum, avg, max, min. Fix:" in each for each in said[1:])


def errors(group, how):
    group = sharing(group)
    x = torch.ones(3 if how == "shape" and group.rank() else 4)
    if how == "late" and group.rank():
        return "late"
    with pytest.raises(CommunicationError) as caught:
        tpk.comm.all_reduce_(x, group)
    return str(caught.value)


@needs_native
def test_a_mismatch_names_both_on_all_ranks(pools):
    for message in pools(2).run(errors, "shape", world_size=2):
        assert "[4]" in message and "[3]" in message and "all_reduce(sum) of float32" in message


@needs_native
def test_a_late_rank_is_named(pools):
    env = {"TPKERNELS_TIMEOUT": "1"}
    first, second = pools(2).run(errors, "late", world_size=2, env=env)
    assert second == "late"
    assert "rank 1" in first and ("within 1 s" in first or "has left" in first)
