"""``state_dict`` gives shards whatever is gathered; ``load_state_dict`` takes what fits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import tpkernels as tpk
from tests.models.zoo import build
from tests.zero import samples
from tests.zero.checkpoints import MODELS, groups_of, held, train
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import AgreementError, CommunicationError, ConfigError
from tpkernels.testing import RankError


def right_after(group, stage):
    """What is saved is the shards, whatever ran or is gathered."""
    kind, dtype, compute = MODELS["tied"]
    model = samples.language(kind, dtype)
    manager = tpk.zero(model, group, stage=stage, mp_policy=compute)
    optimizer = manager.optimizer(torch.optim.AdamW, groups_of(model))
    train(model, optimizer, range(1), group.rank(), group.size())
    expected = {key: value.plain().clone() for key, value in model.state_dict().items()}

    def check(module=model, prefix=""):
        for keep in (False, True):
            state = module.state_dict(keep_vars=keep)
            assert list(state) == [k.removeprefix(prefix) for k in expected if k.startswith(prefix)]
            for key, value in state.items():
                assert isinstance(value, ChunkedTensor) and value.spec.dim is None
                assert isinstance(value, nn.Parameter) is keep
                assert torch.equal(value.plain(), expected[prefix + key])

    with torch.no_grad():
        model(samples.batch(0)[0])
    check()
    inside = []
    handle = model.blocks[1].register_forward_hook(lambda *_: inside.append(check()))
    model(samples.batch(0)[0])
    handle.remove()
    with manager.gathered(model):
        assert model.blocks[0].fc1.weight.dim() == 2
        check()
        check(model.blocks[0], "blocks.0.")
        check(model.blocks[0].fc1, "blocks.0.fc1.")
        assert model.blocks[0].fc1.weight.dim() == 2
        with pytest.raises(ConfigError, match=r"'\(root\)' is gathered.*Fix: .*outside"):
            get_optimizer_state_dict(model, optimizer)
        with pytest.raises(ConfigError, match=r"'\(root\)' is gathered.*Fix: load outside"):
            model.load_state_dict(model.state_dict())
        with pytest.raises(ConfigError, match=r"'blocks\.0' is gathered"):
            model.blocks[0].fc1.load_state_dict(model.blocks[0].fc1.state_dict())
    manager.unshard(model.blocks[0])
    check()
    whole = tpk.full_state_dict(model)
    manager.reshard(model.blocks[0])
    model.load_state_dict(whole)
    check()
    return len(inside)


@pytest.mark.parametrize("stage", [2, 3])
def test_right_after_a_forward_and_while_gathered_Z_31(pool, stage):
    assert pool.run(right_after, stage, world_size=2) == [1, 1]


def misfits(group):
    model, _ = held(group, "tied", 3)
    plain = samples.language("tied", torch.float32, seed=1)
    before = samples.full(model)
    state = plain.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight"):
        model.load_state_dict({k: v for k, v in before.items() if k != "head.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        model.load_state_dict({**before, "other": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"norm.bias must be whole, of shape \(8,\), got \(4,\)"):
        model.load_state_dict({**state, "norm.bias": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"assign=True\).*Fix: "):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ConfigError, match=r"assign=True\).*Fix: "):
        model.blocks[0].load_state_dict(plain.blocks[0].state_dict(), assign=True)
    found = samples.full(model)
    assert all(torch.equal(found[key], value) for key, value in before.items())
    model.blocks[0].load_state_dict(plain.blocks[0].state_dict())
    model.blocks[1].fc1.load_state_dict(plain.blocks[1].fc1.state_dict())
    model.head.load_state_dict(plain.head.state_dict())
    found = samples.full(model)
    for key, value in state.items():
        new = key.startswith(("blocks.0.", "blocks.1.fc1.", "head.", "embedding."))
        assert torch.equal(found[key], value if new else before[key]), key
    with pytest.raises(ConfigError, match=r"fc1.bias must be whole, of shape \(16,\), got \(3,\)"):
        model.blocks[0].load_state_dict({"fc1.bias": torch.ones(3)}, strict=False)
    return {key: (value.plain(), value.spec) for key, value in model.state_dict().items()}


def load_parts_of(group, parts):
    model, _ = held(group, "tied", 3)
    theirs = parts[(group.rank() + 1) % len(parts)]
    model.load_state_dict({key: ChunkedTensor.wrap(*part) for key, part in theirs.items()})


def test_model_states_that_do_not_fit(pool):
    parts = pool.run(misfits, world_size=2)
    for world in (2, 3):  # the other rank's, another world's
        with pytest.raises(RankError, match=r"holds another part.*Fix: .*checkpoint, which resh"):
            pool.run(load_parts_of, parts, world_size=world)


def load_unlike(group):
    """Ranks that load other files would gather a mixture."""
    model = samples.language("tied")
    tpk.zero(model, group)
    before = samples.full(model)
    other = samples.language("tied", seed=group.rank())
    for load, what in (
        (lambda: model.load_state_dict(other.state_dict()), "load_state_dict"),
        (lambda: model.head.load_state_dict(other.head.state_dict()), "load_state_dict"),
        (lambda: tpk.load_full_state_dict(model, other.state_dict()), "load_full_state_dict"),
    ):
        told = rf"{what} of whole tensors: '.*' differs in values.*Fix: load the same file on every"
        with pytest.raises(AgreementError, match=told):
            load()
    found = samples.full(model)
    assert all(torch.equal(found[key], value) for key, value in before.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPKERNELS_CHECK", "off")
        model.load_state_dict(other.state_dict())
    part = model.head.weight.detach()
    return torch.equal(part.plain(), part.spec.take(other.head.weight.detach()))


def test_whole_tensors_that_differ_between_ranks_are_refused(pool):
    assert pool.run(load_unlike, world_size=2) == [True, True]


def test_a_load_that_other_ranks_do_not_make_says_so(monkeypatch):
    def alone(*_):
        raise CommunicationError("all_gather failed.")

    model = samples.language()
    whole = model.state_dict()
    tpk.zero(model)
    monkeypatch.setattr("tpkernels.checkpoint.check_agreement", alone)
    with pytest.raises(CommunicationError, match=r"failed\. This was load_state_dict.*every rank"):
        model.load_state_dict(whole)


def test_what_is_no_model_or_state_is_refused():
    model = samples.language()
    manager = tpk.zero(model)
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    for use, told in (
        (lambda: tpk.full_state_dict(5), r"full_state_dict: model=5 \(int\) must be an nn.Module"),
        (lambda: tpk.load_full_state_dict(model, 5), r"state_dict=5 \(int\) must be a dict"),
        (lambda: tpk.load_full_state_dict({}, {}), r"model={} \(dict\) must be an nn.Module"),
        (lambda: tpk.full_optimizer_state_dict(model, 5), r"optimizer=5 \(int\) must be a torch"),
        (lambda: tpk.full_optimizer_state_dict(5, optimizer), r"model=5 \(int\) must be an nn"),
        (
            lambda: tpk.load_full_optimizer_state_dict(optimizer, model, {}),
            r"must be an nn.Module\. Fix: pass the model first",
        ),
        (
            lambda: manager.optimizer(torch.optim.SGD, model, lr=1),
            r"a Language; .*Fix: .*model\.pa",
        ),
        (lambda: manager.optimizer(torch.optim.SGD, 3, lr=1), r"param_groups is a int; .*Fix: "),
    ):
        with pytest.raises(ConfigError, match=told):
            use()


# --- Hugging Face ---


def save_pretrained(group, path, name, names):
    """The directory is the dense model's; of a part of the model too."""
    mesh = None
    if len(names) == 2:
        mesh = tpk.init_mesh(**dict.fromkeys(names, 2), device_type="cpu")[names]
    dense = build(name, torch.float32)
    model = copy.deepcopy(dense)
    manager = tpk.zero(model, group if mesh is None else mesh)
    model.save_pretrained(f"{path}/ours")
    with manager.gathered(model):
        model.save_pretrained(f"{path}/gathered")
    model.base_model.save_pretrained(f"{path}/part")
    if group.rank() == 0:
        dense.save_pretrained(f"{path}/dense")
        dense.base_model.save_pretrained(f"{path}/dense-part")


@pytest.mark.parametrize(
    ("name", "names"),
    [("gpt2", ("dp_replicate", "dp_shard")), ("llama_mqa_tied", ("dp_shard",))],
    ids=lambda each: str(each),
)
def test_save_pretrained_writes_whole_weights_once(pool, tmp_path, name, names):
    pool.run(save_pretrained, str(tmp_path), name, names, world_size=2 ** len(names), timeout=60)
    for ours, theirs in (("ours", "dense"), ("gathered", "dense"), ("part", "dense-part")):
        files = sorted(each.name for each in (tmp_path / theirs).iterdir())
        assert sorted(each.name for each in (tmp_path / ours).iterdir()) == files
        for file in files:
            assert (tmp_path / ours / file).read_bytes() == (tmp_path / theirs / file).read_bytes()
