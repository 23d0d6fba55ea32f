"""Flat shards: a range of a flattened parameter is kept, stepped, and never taken for it."""

from __future__ import annotations

import copy
import io
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from tests.test_chunked_tensor import KEEPS, OPTIMIZERS
from tests.test_shard_spec import numbered
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.modules.parameters import local_tensor
from tpkernels.shard_spec import (
    Chunk,
    ShardSpec,
    attach_spec,
    copied_spec,
    layout_from_flat_buffer,
    layout_from_sizes,
    spec_from_dtensor,
)

LAYOUT = layout_from_flat_buffer(2, 24, 9, 4)  # 7, 9 and 8 elements, and none
SPEC = ShardSpec((12, 2), None, LAYOUT, 0, "dp_shard", group_name="7")
FULL = numbered((12, 2))
OUTER = ShardSpec((24, 2), 0, layout_from_sizes([12, 12]), 1)


def part(rank=0, within=None):
    spec = replace(SPEC, rank=rank, within=within)
    return ChunkedTensor.wrap(spec.take(FULL), spec)


@given(start=st.integers(0, 9), numel=st.integers(0, 30), shard=st.integers(1, 12), rank=st.data())
def test_the_layout_of_a_flat_buffer(start, numel, shard, rank):
    world = -(-(start + numel) // shard) + 1  # the last rank has none
    buffer = torch.full((world * shard,), -1.0)
    buffer[start : start + numel] = torch.arange(float(numel))
    layout = layout_from_flat_buffer(start, numel, shard, world)
    spec = ShardSpec((numel,), None, layout, rank.draw(st.integers(0, world - 1)))
    own = buffer[spec.rank * shard : (spec.rank + 1) * shard]
    assert torch.equal(spec.take(torch.arange(float(numel))), own[own >= 0])
    assert layout[-1] == () and sum(map(spec.rows_of, range(world))) == spec.rows == numel


def test_parts_put_back_are_the_whole():
    restored = torch.full_like(FULL, -1.0)
    for rank, length in enumerate([7, 9, 8, 0]):
        spec = replace(SPEC, rank=rank)
        assert spec.local_shape == SPEC.local_shape_of(rank) == (length,)
        SPEC.put(spec.take(FULL.t().contiguous().t()), restored, rank)
    assert torch.equal(restored, FULL)
    assert SPEC.owners(6) == [0] and SPEC.owners(7) == [1] and not SPEC.is_replicated
    assert not SPEC.is_copied and ShardSpec((3,), None, ((Chunk(0, 3, 0),),), 0).is_copied


def test_the_name_of_a_group_belongs_to_a_run():
    """It is no part of what a spec says, and another run must not take it for its own."""
    other = replace(SPEC, group_name="8")
    assert other == SPEC and hash(other) == hash(SPEC) and "group_name" not in repr(SPEC)
    for kept in (copy.deepcopy(SPEC), copy.deepcopy(part()).spec, part().double().spec):
        assert kept.group_name == "7"
    nested = replace(SPEC, within=replace(OUTER, group_name="9"))
    loaded = pickle.loads(pickle.dumps(nested))
    assert loaded == nested and loaded.group_name == loaded.within.group_name == ""
    assert nested.group_name == "7" and nested.within.group_name == "9"


def test_a_part_of_a_part_fits_in_it():
    with pytest.raises(ConfigError, match=r"global_shape=\(12, 2\) must be within.*\(11, 2\)"):
        replace(SPEC, within=replace(OUTER, layout=layout_from_sizes([13, 11])))
    assert replace(SPEC, within=OUTER).whole_shape == (24, 2) and SPEC.whole_shape == (12, 2)
    assert copied_spec((), 2, 0) is None


@pytest.mark.parametrize("how", KEEPS)
@pytest.mark.parametrize("rank", [0, 3], ids=["part", "empty"])
def test_what_keeps_the_spec(how, rank):
    if how == "foreach":
        result = torch._foreach_add([torch.ones(3), part(rank)], [torch.ones(3), part(rank)])[1]
    else:
        result = KEEPS[how](part(rank))
    assert isinstance(result, ChunkedTensor) and result.spec == replace(SPEC, rank=rank)
    assert tuple(result.shape) == result.spec.local_shape


class Layer(nn.Module):
    """A rank's parts of two parameters, one of them empty."""

    def __init__(self):
        super().__init__()
        for name, rank in (("weight", 1), ("nothing", 3)):
            parameter = nn.Parameter(part(rank))
            attach_spec(parameter, replace(SPEC, rank=rank))
            setattr(self, name, parameter)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_dense_parameter(name, wrapped):
    cls, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    layer, dense = Layer(), nn.Parameter(FULL.clone())
    optimizer, reference = cls(layer.parameters(), **options), cls([dense], **options)
    for _ in range(2):
        gradient = torch.randn_like(FULL)
        dense.grad = gradient
        for parameter in layer.parameters():
            own = parameter.spec.take(gradient)
            parameter.grad = ChunkedTensor.wrap(own, parameter.spec) if wrapped else own
        reference.step()
        optimizer.step()
    for parameter in layer.parameters():
        assert torch.equal(parameter.plain(), parameter.spec.take(dense.detach()))
        states = [s for s in optimizer.state[parameter].values() if getattr(s, "ndim", 0)]
        assert states and all(s.spec == parameter.spec for s in states)
    other = cls(Layer().parameters(), **options)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ShardedSaveError, match="sharded over 'dp_shard'"):
        torch.save(optimizer.state_dict(), io.BytesIO())


def test_the_gradient_is_a_part_and_is_deleted_like_one():
    parameter = nn.Parameter(part())
    parameter.plain().sum().backward()
    assert isinstance(parameter.grad, ChunkedTensor) and parameter.grad is parameter.grad
    assert parameter.grad.spec == SPEC and not parameter.grad.is_sparse
    own = torch.ones(7)
    parameter.grad = own
    parameter.grad.mul_(2)  # the tensor that was given, wrapped
    assert torch.equal(own, torch.full((7,), 2.0))
    with pytest.raises(RuntimeError, match="size"):
        parameter.grad = torch.ones(8)
    del parameter.grad
    assert parameter.grad is None


ELEMENT_WISE = {
    "pow": lambda t: t.pow(2),
    "**": lambda t: t**2,
    "2 **": lambda t: 2**t,
    "1 -": lambda t: 1 - t,
    "1 /": lambda t: 1 / t,
    "*": lambda t: t * t,
    "square": torch.square,
    "abs": lambda t: t.abs(),
    "sqrt": torch.sqrt,
    "exp": lambda t: t.exp(),
    "log": torch.log,
    "clamp": lambda t: t.clamp(min=0.5),
    "sign": lambda t: t.sign(),
    "relu": nn.functional.relu,
    "maximum": lambda t: torch.maximum(torch.ones(t.shape), t),
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(-1),
    "flatten": torch.flatten,
    "==": lambda t: t == 2,
    "<": lambda t: t > 3,
    "ne": lambda t: t.ne(t),
    "isnan": torch.isnan,
    "isfinite": lambda t: t.isfinite(),
    "& ~": lambda t: (t > 1) & ~(t >= 5),
    "logical_or": lambda t: torch.logical_or(t > 1, t < 0),
    "round": torch.round,
    "sin": lambda t: t.sin(),
    "where": lambda t: torch.where(t > 3, t, torch.zeros(t.shape)),
    "gelu": nn.functional.gelu,
    "//": lambda t: t // 2,
    "long": lambda t: t.long(),
}


@pytest.mark.parametrize("rank", [0, 3], ids=["part", "empty"])
@pytest.mark.parametrize("how", ELEMENT_WISE)
def test_the_element_wise_result_of_a_part_is_a_part(how, rank):
    for source in (part(rank), nn.Parameter(part(rank))):
        result = ELEMENT_WISE[how](source)
        assert isinstance(result, ChunkedTensor) and result.spec == replace(SPEC, rank=rank)
        assert torch.equal(result.plain(), ELEMENT_WISE[how](source.plain()))
        for reduced in (torch.Tensor.sum, torch.max, torch.Tensor.all, torch.any):
            with pytest.raises(UnsupportedModuleError, match=r"part only\. Fix: .*clip_grad_norm_"):
                reduced(result)


def test_what_is_no_longer_flat_is_an_ordinary_tensor():
    for other in (part().view(torch.uint8), part().reshape(7, 1), part().view(1, -1)):
        assert type(other) is torch.Tensor


JOINS = {
    "torch.(concat|concatenate|cat)": lambda ts: torch.cat(ts),
    "torch.(cat|concat)": lambda ts: nn.utils.parameters_to_vector(ts),
    "torch.stack": lambda ts: torch.stack(tensors=[t.detach() for t in ts]),
    "torch.hstack": lambda ts: torch.hstack([torch.ones(3), *(t**2 for t in ts)]),
}


@pytest.mark.parametrize("name", JOINS)
def test_to_join_parts_of_several_parameters_is_refused(name):
    message = rf"rank 1's part \(9,\) of .* {name}.* would see the part only\. Fix: .*{GATHER}"
    with pytest.raises(UnsupportedModuleError, match=message):
        JOINS[name](list(Layer().parameters()))


def test_lbfgs_built_by_hand_is_refused():
    layer = Layer()
    before = layer.weight.plain().detach().clone()

    def closure():
        for parameter in layer.parameters():
            parameter.grad = torch.ones(parameter.shape)
        return torch.ones(())

    with pytest.raises(UnsupportedModuleError, match=r"Fix: .*element-wise one such as"):
        torch.optim.LBFGS(layer.parameters()).step(closure)
    assert torch.equal(layer.weight.plain(), before)


GATHER = (
    r"gathered only while its unit runs: wrap .*`with manager\.gathered\(module\):`, "
    r"call model\(x\) and not model\.forward\(x\)"
)
USES = {
    "torch.nn.functional.linear": lambda t: nn.functional.linear(torch.ones(4, 7), t),
    "torch.Tensor.(__matmul__|matmul)": lambda t: t @ torch.ones(7),
    "torch.mv": lambda t: torch.mv(torch.ones(3, 7), t),
    "torch.Tensor.t": lambda t: torch.ones(4, 7) @ t.t(),
    "torch.Tensor.T": lambda t: t.T,
    "torch.Tensor.transpose": lambda t: t.transpose(0, -1),
    "torch.nn.functional.embedding": lambda t: nn.functional.embedding(torch.tensor([1]), t),
    "torch.nn.functional.layer_norm": lambda t: nn.functional.layer_norm(torch.ones(2, 7), (7,), t),
    "torch.conv1d": lambda t: nn.functional.conv1d(torch.ones(1, 1, 9), t),
    "torch.mul": lambda t: torch.ones(4, 7) * t,
    "torch.add": lambda t: t + torch.ones(4, 7),
    "torch.Tensor.sum": lambda t: t.sum(),
    "this module's forward": local_tensor,
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("kind", [part, lambda: nn.Parameter(part())], ids=["part", "parameter"])
def test_a_weight_outside_its_unit_s_forward_is_refused(kind, name):
    message = (
        r"rank 0's part \(7,\) of a parameter of global shape \(12, 2\), sharded over 'dp_shard', "
        rf"and {name} would see the part only\. Fix: .*{GATHER}"
    )
    with pytest.raises(UnsupportedModuleError, match=message):
        USES[name](kind())


def of_two(function, **settings):
    return lambda t: function(torch.ones(7), t, **settings)


SEES_A_PART = {
    **{name: of_two(getattr(F, name)) for name in ("mse_loss", "l1_loss", "smooth_l1_loss")},
    **{name: of_two(getattr(F, name)) for name in ("huber_loss", "kl_div", "cross_entropy")},
    "binary_cross_entropy_with_logits": of_two(F.binary_cross_entropy_with_logits),
    "mse_loss ": of_two(F.mse_loss, reduction="none"),
    "dist": lambda t: t.dist(torch.ones(7)),
    "cosine_similarity": of_two(F.cosine_similarity, dim=0),
    "pairwise_distance": of_two(nn.PairwiseDistance()),
    **{name: of_two(getattr(torch, name)) for name in ("cdist", "isin", "equal", "allclose")},
    **{name: lambda t, name=name: getattr(t, name)(0) for name in ("softmax", "log_softmax")},
    "special.softmax": lambda t: torch.special.softmax(t, 0),
    **{
        name: lambda t, name=name: getattr(torch, name)(t, 0)
        for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    },
    "topk": lambda t: t.topk(2),
    "kthvalue": lambda t: t.kthvalue(1),
    **{
        name: lambda t, name=name: getattr(torch, name)(t)
        for name in (
            *("sort", "argsort", "msort", "mode", "unique", "unique_consecutive", "histc"),
            *("trapz", "trapezoid", "count_nonzero", "nonzero", "any", "all", "diff", "cov"),
            *("corrcoef", "argwhere", "gradient"),
        )
    },
    "histogram": lambda t: t.histogram(3),
    "bincount": lambda t: t.long().bincount(),
    "flip": lambda t: t.flip(0),
    "roll": lambda t: t.roll(1),
    "fft.fft": torch.fft.fft,
    "aten.sum": torch.ops.aten.sum.default,  # by what it gives, a single number
    "aten.mean": torch.ops.aten.mean.default,
}


def test_what_depends_on_other_ranks_elements_is_refused():
    for name, function in SEES_A_PART.items():
        for one in (part(), nn.Parameter(part())):
            with pytest.raises(UnsupportedModuleError, match=GATHER):
                function(one)
                pytest.fail(f"{name} took the part for the whole")
    for function in (torch.equal, F.mse_loss, torch.ops.aten.sum.default):
        with pytest.raises(UnsupportedModuleError, match=GATHER):  # of an empty part likewise
            function(part(3), *[torch.ones(0)] * (function is not torch.ops.aten.sum.default))


PICKS = {
    "[]": lambda t: t[0],
    "select": lambda t: t.select(0, 1),
    "iterate": list,
    "item": lambda t: t[1].item(),
    "squeeze": lambda t: t[:1].squeeze(),
    "take": lambda t: t.take(torch.tensor(1)),
    "new_zeros": lambda t: t.new_zeros(()),
    "new_tensor": lambda t: t.new_tensor(1.0),
    "mask": lambda t: t.detach()[t > 0],
    "set by mask": lambda t: t.detach().clone().__setitem__(t > 0, 1.0),
}


def test_to_pick_an_element_or_make_a_tensor_is_no_reduction():
    for name, pick in PICKS.items():
        for one in (part(), nn.Parameter(part())):
            assert not isinstance(pick(one), ChunkedTensor), name


def test_gradients_of_parts_come_from_backward_alone():
    weight, x = nn.Parameter(part()), torch.ones(3, requires_grad=True)
    message = r"autograd\.(grad|backward) with respect to .*\(12, 2\).*p\.grad by loss\.backward"
    for ask in (
        lambda: torch.autograd.grad(x.sum(), weight),
        lambda: torch.autograd.grad([x.sum()], [x, weight], allow_unused=True),
        lambda: torch.autograd.grad(x.sum(), [weight], allow_unused=True, materialize_grads=True),
        lambda: x.sum().backward(inputs=[weight]),
    ):
        with pytest.raises(UnsupportedModuleError, match=message):
            ask()
    assert x.grad is None and weight.grad is None
    doubled = weight * 2
    for inputs in (weight, [weight, x], doubled):
        outputs = [doubled.plain().sum(), x.sum()]
        found = torch.autograd.grad(outputs, inputs, retain_graph=True)[0]
        assert found.spec == SPEC and torch.equal(found.plain().unique(), found.plain()[:1])
    torch.autograd.grad(doubled, x, torch.ones(7), allow_unused=True, retain_graph=True)
    doubled.plain().sum().backward(inputs=[weight])
    assert torch.equal(weight.grad.plain(), torch.full((7,), 2.0))


@pytest.mark.parametrize("foreach", [False, True])
def test_a_zeroed_gradient_is_told_from_an_edited_one(foreach):
    layer = Layer()
    for parameter in layer.parameters():
        parameter.grad = torch.ones(parameter.shape)
    grads = [parameter.grad for parameter in layer.parameters()]
    assert all(each.zeroed_version != each._version for each in grads)
    torch.optim.SGD(layer.parameters(), 0.1, foreach=foreach).zero_grad(set_to_none=False)
    assert all(each.zeroed_version == each._version > 0 for each in grads)
    grads[0].add_(1)
    assert grads[0].zeroed_version != grads[0]._version
    for zero in (torch.zero_, torch.Tensor.zero_, lambda t: torch._foreach_zero_([t])):
        zero(grads[0])
        assert grads[0].zeroed_version == grads[0]._version
        grads[0].add_(1)


def test_a_bias_of_one_element_is_not_broadcast():
    spec = ShardSpec((3,), None, layout_from_sizes([1, 2]), 0, "dp_shard")
    bias = ChunkedTensor.wrap(torch.ones(1), spec)
    with pytest.raises(UnsupportedModuleError, match=GATHER):
        torch.zeros(4, 3) + bias
    assert (bias * 2).spec == spec and (bias / torch.tensor(2.0)).spec == spec


@pytest.mark.parametrize("rank", [0, 3], ids=["part", "empty"])
def test_its_norm_is_refused(rank):
    parameter = nn.Parameter(part(rank))
    parameter.grad = torch.zeros(parameter.shape)
    for foreach in (False, True):
        with pytest.raises(UnsupportedModuleError, match=r"Fix: tpkernels\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_([parameter], 1.0, foreach=foreach)


def test_messages_give_the_shape_of_the_outermost_whole():
    nested = part(1, within=OUTER)
    assert repr(nested) == "ChunkedTensor(rank 1 holds (9,) of (24, 2), flattened)"
    with pytest.raises(UnsupportedModuleError, match=r"\(9,\) of a parameter of .*\(24, 2\)"):
        nested.sum()
    with pytest.raises(ShardedSaveError, match=r"part \(9,\) .* shape \(24, 2\), sharded over"):
        torch.save({"weight": nested}, io.BytesIO())


def test_fully_shard_over_it_is_refused():
    with pytest.raises(UnsupportedModuleError, match=r"already sharded over 'dp_shard'.*Fix: use"):
        torch.chunk(part(), 2)


def test_a_module_of_parts_copies_moves_and_loads():
    layer = Layer()
    layer.tied = layer.weight
    copied = copy.deepcopy(layer)
    assert copied.tied is copied.weight is not layer.weight
    with torch.no_grad():
        copied.weight.zero_()
    copied.load_state_dict(layer.state_dict())
    assert torch.equal(copied.weight.plain(), layer.weight.plain())
    assert layer.double().weight.spec.group_name == "7" and layer.weight.dtype is torch.float64
    with pytest.raises(ShardedSaveError, match=r"full_state_dict\(model\)"):
        torch.save(layer.state_dict(), io.BytesIO())


def dtensor_specs(group):
    """Specs of DTensors of a 2 x 2 mesh beside the parts the DTensors hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = numbered((5, 3))
    results = []
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate()] * 2):
        tensor = distribute_tensor(whole.clone(), mesh, placements)
        spec = spec_from_dtensor(tensor)
        right = torch.equal(spec.take(whole), tensor.to_local())
        named = spec.group_name in [str(g.group_name) for g in mesh.get_all_groups()]
        held = math.prod(len(level.layout) for level in spec.levels)
        results.append((right, spec.mesh_dim, spec.is_copied, held, named))
    flat = distribute_tensor(whole.clone(), mesh["tp"], [Replicate()])
    results.append((True, spec_from_dtensor(flat).mesh_dim, True, 2, True))
    try:
        spec_from_dtensor(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))
    except ConfigError as error:
        return results, str(error)


def test_what_a_dtensor_says(pool):
    for results, message in pool.run(dtensor_specs):
        assert results == [
            (True, "tp", False, 2, True),
            (True, "dp", False, 2, True),
            (True, "tp", True, 4, True),
            (True, "tp", True, 2, True),
        ]
        assert "(5, 3)" in message and "Shard on one of them" in message
