"""Flat shards in checkpoints: from any number of ranks and any sharding to any other, bitwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tpkernels as tpk
from tests.flat_sharding import SHAPES, OddShapes, shard_flat_
from tpkernels.checkpoint import DATA_GROUP, data_group_of
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.group import Group, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.modules.parameters import gather_full
from tpkernels.shard_spec import (
    ShardSpec,
    layout_from_blocks,
    layout_from_sizes,
)
from tpkernels.testing import RankError, count_collectives

DTYPES = [torch.bfloat16]  # fp32 and fp64: tests/zero/test_checkpoint.py


def odd_model(seed, dtype, kind, group):
    """The same numbers held in another way."""
    model = OddShapes(dtype, seed)
    if kind == "flat":
        return shard_flat_(model, group)
    if kind == "fully_shard":
        model.requires_grad_(True)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh, ignored_params={model.scalar})  # it takes none of 0 dims
    return model


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gather_full(value, None) if isinstance(value, ChunkedTensor) else value


def load_check_and_save(group, kind, dtype, source, target):
    """Load what ``source`` holds, compare with it, and save it on to ``target``."""
    model = odd_model(9, dtype, kind if source else "flat", group)
    if source:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=source, process_group=group)
        model.load_state_dict(state)
    else:
        model = odd_model(0, dtype, kind, group)
    expected = OddShapes(dtype, 0).state_dict()
    values = {key: whole(value) for key, value in model.state_dict().items()}
    assert list(values) == list(expected)
    for key, value in values.items():
        assert value.dtype is expected[key].dtype
        assert torch.equal(value, expected[key]), key
    if target:
        dcp.save(model.state_dict(), checkpoint_id=target, process_group=group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_4_to_2_to_3_to_1_Z_25(pool, tmp_path, dtype):
    source = ""
    for world in (4, 2, 3, 1):
        target = str(tmp_path / str(world))
        pool.run(load_check_and_save, "flat", dtype, source, target, world_size=world)
        source = target
    pool.run(load_check_and_save, "flat", dtype, source, "", world_size=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", ["plain", "fully_shard"])
def test_to_and_from_other_ways_to_hold_a_model(pool, tmp_path, other, dtype):
    for saved, loaded in (("flat", other), (other, "flat")):
        path = str(tmp_path / saved)
        pool.run(load_check_and_save, saved, dtype, "", path, world_size=4)
        pool.run(load_check_and_save, loaded, dtype, path, "", world_size=2)


def metadata(path):
    return dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata


def test_the_checkpoint_holds_the_whole_once(pool, tmp_path):
    pool.run(load_check_and_save, "flat", torch.float32, "", str(tmp_path), world_size=3)
    for name, shape in SHAPES.items():
        saved = metadata(tmp_path)[name]
        assert tuple(saved.size) == shape
        assert sum(chunk.sizes.numel() for chunk in saved.chunks) == saved.size.numel()


def save_while_it_changes(group, path):
    model = odd_model(0, torch.float32, "flat", group)
    future = dcp.async_save(model.state_dict(), checkpoint_id=path, process_group=group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-100)
    future.result()


def test_async_save_is_a_snapshot_Z_23(pool, tmp_path):
    pool.run(save_while_it_changes, str(tmp_path), world_size=2)
    pool.run(load_check_and_save, "flat", torch.float32, str(tmp_path), "", world_size=3)


def optimizer_states(group, path, save):
    """AdamW's states, keyed by name: what one world size saves, another loads."""
    model = odd_model(0, torch.float32, "flat", group)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    for step in range(2 if save else 1):
        for parameter in model.parameters():
            spec = parameter.spec
            everything = torch.arange(float(spec.rows)).view(spec.global_shape) / (step + 1.0)
            parameter.grad = spec.take(everything if save else torch.zeros_like(everything))
        optimizer.step()
    states = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
    (dcp.save if save else dcp.load)(states, checkpoint_id=path, process_group=group)
    return {
        f"{name}.{key}": whole(value)
        for name, state in states.items()
        for key, value in state.items()
    }


def test_optimizer_states_travel_too_Z_25(pool, tmp_path):
    (saved, *_) = pool.run(optimizer_states, str(tmp_path), True, world_size=4)
    assert len(saved) == 18 and saved["cube.exp_avg"].shape == (3, 4, 5)
    for loaded in pool.run(optimizer_states, str(tmp_path), False, world_size=3):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)


# --- whole state dicts ---


def whole_state_dicts(group, dtype):
    model = odd_model(0, dtype, "flat", group)
    reference = OddShapes(dtype, 0)
    state = tpk.full_state_dict(model, cpu=True)
    assert list(state) == list(reference.state_dict())
    assert state["tied"] is state["cube"]  # Z-29
    assert state["matrix"].shape == (5, 7)  # Z-30: frozen, and whole
    for key, value in reference.state_dict().items():
        assert torch.equal(state[key], value) and state[key].dtype is value.dtype, key
    kept = tpk.full_state_dict(model, rank0_only=True)
    assert len(kept) == (len(state) if group.rank() == 0 else 0)
    other = OddShapes(dtype, 5)
    assert tpk.load_full_state_dict(model, other.state_dict()) == ([], [])
    for key, value in tpk.full_state_dict(model).items():
        assert torch.equal(value, other.state_dict()[key]), key
    assert model.tied is model.cube and not model.matrix.requires_grad
    wrong = {**other.state_dict(), "two": torch.ones(3)}
    with pytest.raises(ConfigError, match=r"two must be \(2,\), got \(3,\)"):
        tpk.load_full_state_dict(model, wrong)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_state_dict_and_back(pool, world, dtype):
    """Z-29, Z-30: tied and frozen entries are whole and right."""
    pool.run(whole_state_dicts, dtype, world_size=world)


def kept_by(group):
    """Two pipeline stages of two ranks: how many tensors this rank keeps of its stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))["dp_shard"]
    model = shard_flat_(OddShapes(), mesh.get_group())
    setattr(model, DATA_GROUP, resolve_group(mesh))
    assert data_group_of(nn.Sequential(model)).mesh_dim == "dp_shard"
    return len(tpk.full_state_dict(model, rank0_only=True))


def test_the_first_rank_of_each_stage_keeps_its_layers(pool):
    every = len(OddShapes().state_dict())
    assert pool.run(kept_by) == [every, 0, every, 0]


def gathered(group, sizes):
    """A parameter cut into ``sizes``, of numbers that only copying bits keeps; and the bytes."""
    numbers = torch.tensor([-0.0, torch.nan, torch.inf, 1.5, -2.0, 0.0, 1e-45]).repeat(3)
    numbers.view(torch.int32)[1] |= 1  # a NaN with something in it
    spec = ShardSpec(
        (7, 3), None, layout_from_sizes(sizes), group.rank(), group_name=str(group.group_name)
    )
    tensor = ChunkedTensor.wrap(spec.take(numbers.view(7, 3)), spec)
    with count_collectives() as counts:
        result = gather_full(tensor, None)
    assert torch.equal(result.view(torch.int32), numbers.view(7, 3).view(torch.int32))
    return counts["all_reduce"].calls, counts["all_gather"].calls


@pytest.mark.parametrize("sizes", [[21, 0, 0], [6, 7, 8], [0, 1, 20], [0, 21, 0]], ids=str)
def test_gathering_copies_bits_however_uneven(pool, sizes):
    """A parameter that lies on one rank is not sent as many times as there are ranks."""
    expected = (1, 0) if max(sizes) > 14 else (0, 1)
    assert pool.run(gathered, sizes, world_size=3) == [expected] * 3


def without_a_group(group, case):
    layout = layout_from_sizes([2, 1])
    spec = ShardSpec((3,), None, layout, group.rank(), "dp_shard")
    tensor = ChunkedTensor.wrap(torch.ones(spec.local_shape), spec)
    given = {
        "none": None,
        "tp": Group(group, None, "tp"),
        "own": Group(group, None, "dp_shard"),
    }[case]
    return gather_full(tensor, given).tolist()


def test_a_group_is_not_guessed(pool):
    """The model's group is that of tensor parallelism, even where it is as large."""
    assert pool.run(without_a_group, "own", world_size=2) == [[1.0] * 3] * 2
    with pytest.raises(RankError, match=r"no group is known, .* split over 2.*mesh\['dp_shard'\]"):
        pool.run(without_a_group, "none", world_size=2)
    with pytest.raises(RankError, match="sharded over 'dp_shard', but the given group is 'tp'"):
        pool.run(without_a_group, "tp", world_size=2)
    with pytest.raises(RankError, match=r"group has 3 ranks, but .* is split over 2"):
        pool.run(without_a_group_of_2, world_size=3)


def without_a_group_of_2(group):
    spec = ShardSpec((3,), None, layout_from_sizes([2, 1]), group.rank() % 2)
    gather_full(ChunkedTensor.wrap(torch.ones(spec.local_shape), spec), Group(group, None, "tp"))


# --- split over tp, then sharded over dp ---

# 3 query heads of 2 rows as (2, 1), one key head of 4 rows on both: unlike sizes on the tp ranks.
HEADS = layout_from_blocks([([(0, 4), (4, 2)], 6), ([(0, 4), (0, 4)], 4)])


def two_levels(seed, mesh=None):
    """A fused projection, a plain split weight and a norm; on a mesh, this rank's parts."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for name, shape in (("down", (2, 5)), ("norm", (40,)), ("qkv", (10, 3)), ("scale", ())):
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
    if mesh is None:
        return model
    tp, dp = mesh["tp"], mesh["dp_shard"]
    spec = ShardSpec((10, 3), 0, HEADS, tp.get_local_rank())
    model.qkv = nn.Parameter(ChunkedTensor.wrap(spec.take(model.qkv.detach()), spec))
    model.down = nn.Parameter(distribute_tensor(model.down.detach(), tp, [Shard(1)]))
    model._tpkernels_group = Group(tp.get_group(), tp, "tp")
    return shard_flat_(model, dp.get_group(), tp.get_group())


def two_levels_task(group, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model, reference = two_levels(0, mesh), two_levels(0).state_dict()
    cuts = {key: model.get_parameter(key).spec.layout for key in reference}
    state = tpk.full_state_dict(model)
    assert all(torch.equal(state[key], reference[key]) for key in reference)
    dcp.save(model.state_dict(), checkpoint_id=path)
    other = two_levels(1, mesh)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(v.plain(), model.state_dict()[k].plain()) for k, v in state.items())
    tpk.load_full_state_dict(model, two_levels(2).state_dict())
    expected = two_levels(2, mesh).state_dict()
    assert all(torch.equal(v.plain(), expected[k].plain()) for k, v in model.state_dict().items())
    return cuts


def load_plain(group, path):
    state = two_levels(3).state_dict()
    dcp.load(state, checkpoint_id=path, process_group=group)
    return all(torch.equal(state[key], value) for key, value in two_levels(0).state_dict().items())


def test_split_over_tp_then_sharded_over_dp(pool, tmp_path):
    """Parts of parts, cut unlike on the tp ranks, are one whole to everyone else."""
    cuts = pool.run(two_levels_task, str(tmp_path))
    assert cuts[0]["norm"] != cuts[1]["norm"]  # else this shows nothing
    for name, saved in metadata(tmp_path).items():
        assert sum(chunk.sizes.numel() for chunk in saved.chunks) == saved.size.numel(), name
    assert pool.run(load_plain, str(tmp_path), world_size=3) == [True] * 3
