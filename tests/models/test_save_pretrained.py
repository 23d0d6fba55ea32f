"""``save_pretrained`` of a split model: one whole checkpoint, as the dense model would write."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from tests.models.zoo import build, outputs
from tpkernels.checkpoint import full_state_dict
from tpkernels.parallelize import parallelize, unparallelize

NAMES = ("bert", "bert_mlm", "gpt2", "llama_mqa_tied", "llama_uneven")


def save_task(group, directory):
    for name in NAMES:
        dense = build(name, torch.float32)
        model = copy.deepcopy(dense)
        parallelize(model, group)
        path = os.path.join(directory, name)
        model.save_pretrained(path)
        loaded = type(dense).from_pretrained(path).eval()
        assert list(loaded.state_dict()) == list(dense.state_dict())
        for key, value in dense.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), f"{name}: {key}"
        for key, value in outputs(name, dense).items():
            assert torch.equal(outputs(name, loaded)[key], value), f"{name}: {key}"
        if group.rank() == 0:
            dense.save_pretrained(os.path.join(directory, f"{name}-dense"))
        if name == "gpt2":
            # a part of the model, and a copy of it, write themselves and not another
            model.transformer.save_pretrained(os.path.join(directory, "part"))
            copied = copy.deepcopy(model)
            with torch.no_grad():
                model.transformer.ln_f.weight.zero_()
            copied.save_pretrained(os.path.join(directory, "copy"))
            part = type(dense.transformer).from_pretrained(os.path.join(directory, "part"))
            for key, value in dense.transformer.state_dict().items():
                assert torch.equal(part.state_dict()[key], value), key
            copy_loaded = type(dense).from_pretrained(os.path.join(directory, "copy"))
            assert torch.equal(copy_loaded.transformer.ln_f.weight, dense.transformer.ln_f.weight)
        unparallelize(model)
        assert "save_pretrained" not in vars(model)


def test_saved_directories_are_those_of_the_dense_model(pool, tmp_path):
    pool.run(save_task, str(tmp_path), world_size=2, timeout=90)
    for name in NAMES:
        ours, theirs = (tmp_path / name, tmp_path / f"{name}-dense")
        files = sorted(p.name for p in theirs.iterdir())
        assert sorted(p.name for p in ours.iterdir()) == files
        for file in files:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), f"{name}/{file}"


def state_dict_task(group, directory):
    """Values that a caller gathered are taken as they are."""
    model = build("bert", torch.float32)
    parallelize(model, group)
    whole = full_state_dict(model)
    model.save_pretrained(directory, state_dict=whole)
    loaded = type(model).from_pretrained(directory)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in whole.items())


def test_a_state_dict_may_be_given(pool, tmp_path):
    pool.run(state_dict_task, str(tmp_path), world_size=2, timeout=60)


def foreign_writer_task(group, directory, name):
    """safetensors reads raw memory: it must not write one rank's part as the whole."""
    from safetensors.torch import save_file

    model = build(name, torch.float32)
    parallelize(model, group)
    for key, value in model.state_dict().items():
        path = f"{directory}/{key}-{group.rank()}"
        part = hasattr(value, "placements") or hasattr(value, "spec")
        try:
            save_file({key: value}, path)
        except RuntimeError:
            assert part, key
        else:
            assert not part, f"{key}: a part was written as the whole"


@pytest.mark.parametrize("name", ["gpt2", "llama_uneven"])
def test_safetensors_does_not_write_a_part_silently(pool, tmp_path, name):
    pool.run(foreign_writer_task, str(tmp_path), name, world_size=2)
