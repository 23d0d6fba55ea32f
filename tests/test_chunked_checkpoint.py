"""``torch.distributed.checkpoint`` of head-split parameters: any number of ranks to any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.shard_spec import ShardSpec, balanced_sizes, layout_from_blocks
from tpkernels.testing import RankError

# [in, out] of a fused projection: 6 query rows split unevenly, one key head of 3 rows that every
# rank holds, 3 value rows of which the last ranks hold fewer (on 4 ranks, none).
FULL = torch.arange(36.0).view(3, 12)


def spec(group):
    world = group.size()

    def spans(total):
        sizes = balanced_sizes(total, world)
        return [(sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]

    layout = layout_from_blocks([(spans(6), 6), ([(0, 3)] * world, 3), (spans(3), 3)])
    return ShardSpec((3, 12), 1, layout, group.rank())


def state(group, scale):
    """A state dict as a model's and an optimizer's together: parts, plain tensors, numbers."""
    part = ChunkedTensor.wrap(spec(group).take(FULL) * scale, spec(group))
    weight = nn.Parameter(part)
    nested = {"exp_avg": weight.detach() * -1, "step": torch.tensor(7.0 * scale)}
    return {"weight": weight, "bias": torch.ones(4) * scale, "state": nested, "lr": 0.5}


def save(group, path):
    dcp.save(state(group, 1.0), checkpoint_id=path, process_group=group)


def save_async(group, path, how):
    """Save, and change every value while the writing goes on."""
    options = {
        "checkpoint_id": lambda: {"checkpoint_id": path},
        "writer": lambda: {"storage_writer": dcp.FileSystemWriter(path)},
        "stager": lambda: {
            "checkpoint_id": path,
            "async_stager": DefaultStager(StagingOptions(False, False, True, False)),
        },
    }
    values = state(group, 1.0)
    future = dcp.async_save(values, process_group=group, **options[how]())
    if hasattr(future, "staging_completion"):  # until then the values must stay
        future.staging_completion.result()
    with torch.no_grad():
        for tensor in (values["weight"], values["bias"], values["state"]["exp_avg"]):
            tensor.fill_(-100)
    getattr(future, "upload_completion", future).result()


def load(group, path):
    """Load into zeros; whether every value is right."""
    values = state(group, 0.0)
    dcp.load(values, checkpoint_id=path, process_group=group)
    expected = state(group, 1.0)
    assert values["weight"].spec == expected["weight"].spec
    return [
        torch.equal(values["weight"].plain(), expected["weight"].plain()),
        torch.equal(values["state"]["exp_avg"].plain(), expected["state"]["exp_avg"].plain()),
        torch.equal(values["bias"], expected["bias"]),
        values["state"]["step"].item() == 7,
    ]


def load_and_save(group, path, other):
    values = state(group, 0.0)
    dcp.load(values, checkpoint_id=path, process_group=group)
    dcp.save(values, checkpoint_id=other, process_group=group)


def test_saved_on_2_loaded_on_3_on_1_and_on_4(pool, tmp_path):
    pool.run(save, str(tmp_path / "2"), world_size=2)
    pool.run(load_and_save, str(tmp_path / "2"), str(tmp_path / "3"), world_size=3)
    for path in ("2", "3"):
        for world in (1, 2, 3, 4):
            for right in pool.run(load, str(tmp_path / path), world_size=world):
                assert all(right), (path, world, right)


def metadata(path):
    return dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata


@pytest.mark.filterwarnings("ignore:.*no_dist.*", "ignore:.*assuming.*")
def test_the_checkpoint_holds_the_whole_once(pool, tmp_path):
    """A dense reader sees one tensor; rows held by several ranks are written once."""
    pool.run(save, str(tmp_path), world_size=3)
    saved = metadata(tmp_path)["weight"]
    assert tuple(saved.size) == (3, 12)
    assert sum(chunk.sizes.numel() for chunk in saved.chunks) == FULL.numel()
    dense = {"weight": torch.zeros(3, 12)}
    dcp.load(dense, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(dense["weight"], FULL)


@pytest.mark.parametrize("how", ["checkpoint_id", "writer", "stager"])
def test_async_save_writes_the_whole_as_it_was(pool, tmp_path, how):
    """Z-23: a snapshot; and on no way of staging is one rank's part written as the whole."""
    pool.run(save_async, str(tmp_path), how, world_size=2)
    assert tuple(metadata(tmp_path)["weight"].size) == (3, 12)
    for right in pool.run(load, str(tmp_path), world_size=3):
        assert all(right), right


def save_other_shape(group, path):
    dcp.save({"weight": torch.ones(3, 11)}, checkpoint_id=path, process_group=group)


def load_weight(group, path):
    dcp.load({"weight": state(group, 0.0)["weight"]}, checkpoint_id=path, process_group=group)


def test_a_checkpoint_of_another_shape_is_refused(pool, tmp_path):
    pool.run(save_other_shape, str(tmp_path), world_size=2)
    with pytest.raises(RankError, match=r"Size mismatch between saved .*3, 11.*current: .*3, 12"):
        pool.run(load_weight, str(tmp_path), world_size=2)
