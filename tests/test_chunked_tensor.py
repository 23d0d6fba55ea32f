"""``ChunkedTensor``: the spec stays on, and one rank's part is never taken for the whole."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.shard_spec import ShardSpec, layout_from_blocks, spec_of
from tpkernels.testing import RankError

# Fused q (6 rows, uneven), k (3 rows, held by both), v (3 rows, uneven): dim 0 of [12, 2].
LAYOUT = layout_from_blocks([([(0, 4), (4, 2)], 6), ([(0, 3), (0, 3)], 3), ([(0, 1), (1, 2)], 3)])
SPEC = ShardSpec((12, 2), 0, LAYOUT, 0)
FULL = torch.arange(24.0).view(12, 2)


def part(dtype=torch.float32):
    return ChunkedTensor.wrap(SPEC.take(FULL).to(dtype), SPEC)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(part())
        self.bias = nn.Parameter(torch.zeros(3))


KEEPS = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "to dtype": lambda t: t.to(torch.float64),
    "to device": lambda t: t.to("cpu", copy=True),
    "meta": lambda t: t.to("meta"),
    "type": lambda t: t.type(torch.float16),
    "double": lambda t: t.double(),
    "bfloat16": lambda t: t.bfloat16(),
    "cpu": lambda t: t.cpu(),
    "contiguous": lambda t: t.contiguous(),
    "zeros_like": torch.zeros_like,
    "empty_like": lambda t: torch.empty_like(t, device="meta"),
    "data": lambda t: t.data,
    "deepcopy": copy.deepcopy,
    "average": lambda t: 0.9 * t + t / 10 - t.mul(2),
    "foreach": lambda t: torch._foreach_add([torch.ones(3), t], [torch.ones(3), t])[1],
    "requires_grad_": lambda t: t.requires_grad_(),
    "parameter": nn.Parameter,
}


@pytest.mark.parametrize("how", KEEPS)
def test_what_keeps_the_spec(how):
    result = KEEPS[how](part())
    assert isinstance(result, ChunkedTensor)
    assert result.spec == SPEC and tuple(result.shape) == SPEC.local_shape


def test_what_is_no_part_of_a_whole_is_an_ordinary_tensor():
    for other in (part().plain(), part()[:2], part().flatten(), part().isfinite(), part() > 1):
        assert type(other) is torch.Tensor and spec_of(other) is None
    assert type(part() + torch.ones(5, 8, 2)) is torch.Tensor  # of another shape
    assert part().type() == "torch.FloatTensor"


@pytest.mark.parametrize(
    "transpose", [torch.t, lambda t: t.T, lambda t: t.mT], ids=["t", "T", "mT"]
)
def test_a_transposed_part_is_a_part_of_the_transposed_whole(transpose):
    turned = transpose(part())
    assert turned.spec == ShardSpec((2, 12), 1, LAYOUT, 0)
    assert torch.equal(turned.plain(), turned.spec.take(FULL.t()))
    assert transpose(turned).spec == SPEC


@pytest.mark.parametrize("how", ["to dtype", "double", "clone", "contiguous"])
def test_a_cast_stays_on_the_graph(how):
    weight = nn.Parameter(part())
    KEEPS[how](weight).pow(2).sum().backward()
    assert torch.equal(weight.grad.plain(), 2 * SPEC.take(FULL))


def test_plain_is_differentiable_and_shares_storage():
    weight = nn.Parameter(part())
    (weight.plain() * 3).sum().backward()
    assert torch.equal(weight.grad.plain(), torch.full(SPEC.local_shape, 3.0))
    weight.detach().plain().zero_()
    assert weight.abs().sum() == 0


def test_the_gradient_is_a_part_too_and_accumulates():
    weight = nn.Parameter(part())
    for step in (1, 2):
        weight.plain().sum().backward()
        assert isinstance(weight.grad, ChunkedTensor) and weight.grad.spec == SPEC
        assert torch.equal(weight.grad.plain(), torch.full(SPEC.local_shape, float(step)))
    weight.grad.mul_(2)
    assert torch.equal(weight.grad.plain(), torch.full(SPEC.local_shape, 4.0))
    weight.grad = None
    assert weight.grad is None


def test_a_module_moves_copies_and_loads_with_its_spec():
    layer = Layer()
    for moved in (layer.double(), layer.to(torch.bfloat16), layer.float(), copy.deepcopy(layer)):
        assert isinstance(moved.weight, nn.Parameter) and moved.weight.requires_grad
        assert moved.weight.spec == SPEC
        assert torch.equal(moved.weight.plain().float(), SPEC.take(FULL))
    copied = copy.deepcopy(layer)
    assert copied.weight.data_ptr() != layer.weight.data_ptr()
    with torch.no_grad():
        copied.weight.zero_()
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied.weight.plain(), layer.weight.plain())


def test_deepcopy_keeps_ties():
    layer = Layer()
    layer.tied = layer.weight
    copied = copy.deepcopy(layer)
    assert copied.tied is copied.weight is not layer.weight


def stepped(cls, **options):
    """A layer and its optimizer after two steps, beside the dense ones."""
    torch.manual_seed(0)
    layer, dense = Layer(), nn.Parameter(FULL.clone())
    optimizer, dense_optimizer = cls(layer.parameters(), **options), cls([dense], **options)
    for _ in range(2):
        gradient = torch.randn_like(FULL)
        dense.grad = gradient
        dense_optimizer.step()
        optimizer.zero_grad()
        (layer.weight.plain() * SPEC.take(gradient)).sum().backward()
        optimizer.step()
    return layer, optimizer, dense


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD foreach": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True, "foreach": True},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_dense_parameter(name):
    cls, options = OPTIMIZERS[name]
    layer, optimizer, dense = stepped(cls, **options)
    assert torch.equal(layer.weight.plain(), SPEC.take(dense.detach()))
    states = [s for s in optimizer.state[layer.weight].values() if getattr(s, "ndim", 0)]
    assert states and all(isinstance(s, ChunkedTensor) and s.spec == SPEC for s in states)
    other = cls(Layer().parameters(), **options)
    other.load_state_dict(optimizer.state_dict())
    (loaded, *_) = other.state.values()
    assert all(isinstance(s, ChunkedTensor) for s in loaded.values() if getattr(s, "ndim", 0))


SAVES = {
    "state_dict": lambda: Layer().state_dict(),
    "module": Layer,
    "tensor": part,
    "parameter": lambda: nn.Parameter(part()),
    "data": lambda: {"weight": Layer().weight.data},
    "gradient": lambda: stepped(torch.optim.SGD, lr=0.1)[0].weight.grad,
    **{
        f"{name} state": lambda name=name: stepped(OPTIMIZERS[name][0], **OPTIMIZERS[name][1])[
            1
        ].state_dict()
        for name in OPTIMIZERS
    },
}


@pytest.mark.parametrize("what", SAVES)
def test_saving_one_rank_s_part_as_the_whole_is_refused(what):
    value = SAVES[what]()
    message = r"rank 0's part \(8, 2\) of a parameter of shape \(12, 2\).*full_state_dict\(model\)"
    with pytest.raises(ShardedSaveError, match=message):
        torch.save(value, io.BytesIO())
    with pytest.raises(ShardedSaveError, match=message):
        pickle.dumps(value)


def test_a_part_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match=r"rank 0 holds \(8, 2\) of \(12, 2\), got .*\(7, 2\)"):
        ChunkedTensor.wrap(torch.ones(7, 2), SPEC)


def with_gradient():
    layer = Layer()
    layer.weight.plain().pow(2).sum().backward()
    return layer


WANTS_ALL = {
    "torch.Tensor.norm": lambda t: t.norm(),
    "torch.norm": torch.norm,
    "torch.linalg.vector_norm": torch.linalg.vector_norm,
    "torch.linalg.norm": torch.linalg.norm,
    "torch._foreach_norm": lambda t: torch._foreach_norm([torch.ones(3), t]),
    "torch.Tensor.sum": lambda t: t.sum(),
    "torch.sum": lambda t: torch.sum(input=t),
    "torch.Tensor.mean": lambda t: t.mean(0),
    "torch.Tensor.max": lambda t: t.max(),
    "torch.mm": lambda t: torch.mm(torch.ones(3, 8), t),
    "torch.matmul": lambda t: torch.matmul(t, torch.ones(2)),
    "torch.Tensor.(__matmul__|matmul)": lambda t: t @ t.t(),
    "torch.Tensor.(__rmatmul__|__matmul__|matmul)": lambda t: torch.ones(3, 8) @ t,
    "torch.einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "torch.nn.functional.linear": lambda t: nn.functional.linear(torch.ones(4, 2), t),
}


@pytest.mark.parametrize("name", WANTS_ALL)
@pytest.mark.parametrize("kind", [part, lambda: nn.Parameter(part())], ids=["part", "parameter"])
def test_what_would_take_the_part_for_the_whole_is_refused(kind, name):
    fix = "clip_grad_norm_" if "norm" in name else r"full_state_dict\(model\).*element-wise"
    message = rf"rank 0's part .* global shape \(12, 2\), and {name} would see .*Fix: .*{fix}"
    with pytest.raises(UnsupportedModuleError, match=message):
        WANTS_ALL[name](kind())


@pytest.mark.parametrize("foreach", [False, True])
def test_the_norm_of_a_part_s_gradient_is_refused(foreach):
    layer = with_gradient()
    with pytest.raises(UnsupportedModuleError, match=r"Fix: tpkernels\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=foreach)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_that_mixes_rows_is_refused():
    layer = with_gradient()
    with pytest.raises(UnsupportedModuleError, match=r"global shape \(2, 12\)"):
        torch.optim.Muon([layer.weight]).step()


def test_it_is_shown_by_what_it_is():
    assert "ChunkedTensor(rank 0" in str([*Layer().parameters()]) + f"{part()}"
    assert repr(part()) == "ChunkedTensor(rank 0 holds (8, 2) of (12, 2), dim 0)"


def shard_with_fsdp(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    fully_shard(Layer(), mesh=mesh)


def test_fully_shard_over_it_is_refused_by_name(pool):
    message = (
        r"\(12, 2\) is split by heads .*fully_shard cannot express.*Fix: leave this module out"
    )
    with pytest.raises(RankError, match=message) as caught:
        pool.run(shard_with_fsdp, world_size=2)
    assert isinstance(caught.value.__cause__, UnsupportedModuleError)
