"""Megatron's region functions: forward, backward and gradcheck against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.across_ranks import assert_gradients
from tests.comm.test_collectives import of_rank
from tests.ops.samples import LAYOUTS, laid_out
from tpkernels.comm import regions
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.testing import RankError, count_collectives


def _sum(parts, rank, dim, sizes):
    return sum(t.clone() for t in parts)


def _cat(parts, rank, dim, sizes):
    return torch.cat(list(parts), dim)


def _own(parts, rank, dim, sizes):
    return parts[rank].narrow(dim, sum(sizes[:rank]), sizes[rank])


def _own_sum(parts, rank, dim, sizes):
    return _sum(parts, rank, dim, sizes).narrow(dim, sum(sizes[:rank]), sizes[rank])


def _same(parts, rank, dim, sizes):
    return parts[rank]


# function, forward and backward from the tensors of all ranks, input is a part, output is a part,
# collectives forward and backward
SPLIT, WHOLE = True, False
REGIONS = {
    "copy_to_tensor_model_parallel_region": (_same, _sum, WHOLE, WHOLE, None, "all_reduce"),
    "reduce_from_tensor_model_parallel_region": (_sum, _same, WHOLE, WHOLE, "all_reduce", None),
    "gather_from_tensor_model_parallel_region": (_cat, _own, SPLIT, WHOLE, "all_gather", None),
    "scatter_to_tensor_model_parallel_region": (_own, _cat, WHOLE, SPLIT, None, "all_gather"),
    "gather_from_sequence_parallel_region": (
        _cat,
        _own_sum,
        SPLIT,
        WHOLE,
        "all_gather",
        "reduce_scatter",
    ),
    "scatter_to_sequence_parallel_region": (_own, _cat, WHOLE, SPLIT, None, "all_gather"),
    "reduce_scatter_to_sequence_parallel_region": (
        _own_sum,
        _cat,
        WHOLE,
        SPLIT,
        "reduce_scatter",
        "all_gather",
    ),
}
every_region = pytest.mark.parametrize("region", REGIONS)


def call(region, x, name, dim, sizes):
    function = getattr(regions, region)
    if region.startswith(("copy_to", "reduce_from")):
        return function(x, name)
    return function(x, name, dim, sizes)


def shapes(whole, dim, sizes, split):
    result = []
    for size in sizes:
        shape = list(whole)
        if split:
            shape[dim] = size
        result.append(shape)
    return result


def run_region(group, region, whole, dim, sizes, layout, gradient_layout):
    forward, backward, part_in, part_out, sent, sent_back = REGIONS[region]
    name, rank = resolve_group(group).name, group.rank()
    inputs = [
        laid_out(of_rank(r, shape, torch.float32), layout)
        for r, shape in enumerate(shapes(whole, dim, sizes, part_in))
    ]
    gradients = [
        laid_out(of_rank(100 + r, shape, torch.float32), gradient_layout)
        for r, shape in enumerate(shapes(whole, dim, sizes, part_out))
    ]
    x, before = inputs[rank].requires_grad_(), inputs[rank].detach().clone()
    kept = gradients[rank].clone()
    with count_collectives() as there:
        y = call(region, x, name, dim, sizes)
    with count_collectives() as back:
        (dx,) = torch.autograd.grad(y, x, gradients[rank], retain_graph=True)
    (again,) = torch.autograd.grad(y, x, gradients[rank])
    assert torch.equal(y, forward([t.detach() for t in inputs], rank, dim, sizes)), "forward"
    assert torch.equal(dx, backward(gradients, rank, dim, sizes)), "backward"
    assert torch.equal(dx, again), "second backward"
    assert torch.equal(x, before) and torch.equal(gradients[rank], kept), "inputs"
    empty = 0 in whole or sum(sizes) == 0 or group.size() == 1
    for counts, kind in ((there, sent), (back, sent_back)):
        assert list(counts) == ([] if kind is None or empty else [kind])
        assert counts.total.calls <= 1


def run_regions(group, cases):
    for case in cases:
        try:
            run_region(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@every_region
def test_forward_backward_and_what_is_sent(pool, region):
    """TP-5, TP-6: 5 rows over 2 and 4 ranks; TP-16, TP-17, TP-19: any layout, either way."""
    for world, sizes in ((1, [5]), (2, [3, 2]), (3, [0, 4, 1]), (4, [2, 2, 1, 0])):
        cases = [
            (region, (5, 2, 3), 0, sizes, layout, other)
            for layout, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True)
        ]
        cases += [
            (region, (2, 3, 5), -1, sizes, "transposed", "transposed"),
            (region, (2, 5, 0), 1, sizes, "contiguous", "contiguous"),
        ]
        pool.run(run_regions, cases, world_size=world)


@st.composite
def a_case(draw, world):
    before, after = (draw(st.lists(st.integers(0, 3), max_size=2)) for _ in range(2))
    sizes = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    region = draw(st.sampled_from(sorted(REGIONS)))
    layouts = draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)))
    return (region, (*before, sum(sizes), *after), len(before), sizes, *layouts)


@given(world=st.integers(1, 4), data=st.data())
@settings(max_examples=15)
def test_any_shape_and_split(pool, world, data):
    cases = data.draw(st.lists(a_case(world), min_size=1, max_size=5))
    pool.run(run_regions, cases, world_size=world)


def gradients_of(group, region, sizes):
    part_in = REGIONS[region][2]
    name, rank = resolve_group(group).name, group.rank()
    shape = shapes((2, sum(sizes)), 1, sizes, part_in)[rank]
    # What must be alike on all ranks is: the input of f and of scatter; a whole output.
    shared = region.startswith(("copy_to", "scatter_to"))
    generator = torch.Generator().manual_seed(7 if shared else rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    own_loss = region.startswith(("reduce_from", "gather_from_tensor"))

    def function(x):
        # Something non-linear on both sides, so that the gradient depends on the values.
        return torch.sin(call(region, x**2, name, 1, sizes))

    assert_gradients(group, function, [x], shared=[shared], replicated_output=own_loss)


@every_region
def test_gradcheck_one_rank_perturbed_at_a_time(pool, region):
    pool.run(gradients_of, region, [2, 1], world_size=2)
    pool.run(gradients_of, region, [1, 2, 0], world_size=3)


def second_gradients_of(group, region, sizes):
    name, rank = resolve_group(group).name, group.rank()
    shape = shapes((2, sum(sizes)), 1, sizes, REGIONS[region][2])[rank]
    shared = region.startswith(("copy_to", "scatter_to"))
    own_loss = region.startswith(("reduce_from", "gather_from_tensor"))
    generator = torch.Generator().manual_seed(7 if shared else rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)

    def slope(x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.sin(call(region, x**2, name, 1, sizes))
            cotangent = torch.full_like(y, 1.0 if own_loss else rank + 1.0)
            return torch.autograd.grad(y, x, cotangent, create_graph=True)[0]

    assert_gradients(group, slope, [x], shared=[shared], replicated_output=shared)


@every_region
def test_gradgradcheck_one_rank_perturbed_at_a_time(pool, region):
    """A gradient penalty: the backward of a backward communicates as the forward does."""
    pool.run(second_gradients_of, region, [2, 1], world_size=2)
    pool.run(second_gradients_of, region, [1, 0, 2], world_size=3)


def edited_in_place(group, region):
    name, rank = resolve_group(group).name, group.rank()
    shape = shapes((2, 3), 0, [1, 1], REGIONS[region][2])[rank]
    x = torch.ones(shape, requires_grad=True)
    y = call(region, x * 1, name, 0, [1, 1])
    expected = y.detach() * 2
    y = y.mul_(2)
    y.sum().backward()
    return torch.equal(y, expected) and bool((x.grad != 0).all())


@pytest.mark.parametrize("region", [region for region in REGIONS if "copy_to" not in region])
def test_a_result_may_be_edited_in_place(pool, region):
    assert pool.run(edited_in_place, region, world_size=2) == [True, True]


def test_editing_a_copy_to_region_in_place_is_refused_by_autograd(pool):
    """It is the caller's own tensor: an edit would change that too."""
    with pytest.raises(RankError, match=r"modified inplace.*cloning the output"):
        pool.run(edited_in_place, "copy_to_tensor_model_parallel_region", world_size=2)


def without_sizes(group):
    name = resolve_group(group).name
    x = torch.arange(10.0).view(5, 2)
    mine = regions.scatter_to_tensor_model_parallel_region(x, name, 0)
    equal = regions.gather_from_tensor_model_parallel_region(torch.ones(2, 1), name)
    return mine, equal


def test_sizes_default_to_torch_chunk_and_to_equal_parts(pool):
    x = torch.arange(10.0).view(5, 2)
    for rank, (mine, equal) in enumerate(pool.run(without_sizes, world_size=3)):
        assert torch.equal(mine, x.chunk(3)[rank])
        assert torch.equal(equal, torch.ones(2, 3))


def wrong_sizes(group, function, sizes):
    getattr(regions, function)(torch.ones(4, 6), resolve_group(group).name, 1, sizes)


@pytest.mark.parametrize(
    ("region", "sizes"),
    [
        ("scatter_to_tensor_model_parallel_region", [3, 2]),
        ("scatter_to_tensor_model_parallel_region", [6]),
        ("gather_from_tensor_model_parallel_region", [5, 5]),
        ("reduce_scatter_to_sequence_parallel_region", [2, 2, 2]),
    ],
)
def test_sizes_that_do_not_fit_raise_before_communication(pool, region, sizes):
    with pytest.raises(RankError, match=r"sizes=\[.*for each of 2 ranks.*which has 6") as caught:
        pool.run(wrong_sizes, region, sizes, world_size=2)
    assert isinstance(caught.value.__cause__, ConfigError)


@every_region
def test_the_group_of_one_is_the_identity(region):
    """TP-54."""
    x = torch.randn(3, 4)
    assert call(region, x, "", 0, None) is x


def opcheck_on_ranks(group):
    name = resolve_group(group).name
    x = torch.randn(3, 4, requires_grad=True)
    checks = (
        (torch.ops.tpkernels.all_reduce.default, (x.t(), name)),
        (torch.ops.tpkernels.all_gather.default, (x, [4, 4], 1, name)),
        (torch.ops.tpkernels.reduce_scatter.default, (x, [1, 2], 0, name)),
        (torch.ops.tpkernels.own_part.default, (x, None, 0, name)),
    )
    for op, args in checks:
        torch.library.opcheck(op, args)


def test_opcheck_between_ranks(pool):
    pool.run(opcheck_on_ranks, world_size=2)


def compiled_regions(group):
    name, rank = resolve_group(group).name, group.rank()

    def block(x):
        x = regions.copy_to_tensor_model_parallel_region(x, name)
        part = regions.scatter_to_tensor_model_parallel_region(x, name, 0)
        whole = regions.gather_from_sequence_parallel_region(part * (rank + 1), name)
        total = regions.reduce_from_tensor_model_parallel_region(whole, name)
        return regions.reduce_scatter_to_sequence_parallel_region(total, name)

    x = torch.arange(12.0).view(4, 3).requires_grad_()
    torch._dynamo.reset()
    results = []
    for function in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        y = function(x)
        results.append([y.detach(), *torch.autograd.grad((y * y).sum(), x)])
    return results


def test_compiled_in_one_graph_equals_eager(pool):
    for eager, compiled in pool.run(compiled_regions, world_size=2):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
