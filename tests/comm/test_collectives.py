"""Collectives on any layout and any uneven sizes equal their definition, and write nobody's input.

Every collective here runs on Gloo, which reads strided memory wrongly: TP-16, TP-17, TP-19.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.samples import DTYPES, LAYOUTS, laid_out
from tpkernels.comm import collectives
from tpkernels.comm.group import resolve_group
from tpkernels.testing import count_collectives


def of_rank(rank, shape, dtype):
    """Integers that every rank can compute for every other."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def run_all(group, shape, dtype, layout, dim, sizes):
    """Each collective of this rank's tensor beside its definition from all ranks' tensors."""
    name, rank, world = resolve_group(group).name, group.rank(), group.size()
    whole = list(shape)
    whole[dim] = sum(sizes)
    parts = [list(shape) for _ in range(world)]
    for part, size in zip(parts, sizes, strict=True):
        part[dim] = size
    full = [laid_out(of_rank(r, whole, dtype), layout) for r in range(world)]
    held = [laid_out(of_rank(r, p, dtype), layout) for r, p in enumerate(parts)]
    total = sum(t.clone() for t in full)
    before = (full[rank].clone(), held[rank].clone())
    pairs = {
        "all_reduce": (collectives.all_reduce(full[rank], name), total),
        "all_reduce_max": (
            collectives.all_reduce_max(full[rank], name),
            torch.stack(full).amax(0) if total.numel() else total,
        ),
        "all_gather": (
            collectives.all_gather(held[rank], sizes, dim, name),
            torch.cat(held, dim),
        ),
        "reduce_scatter": (
            collectives.reduce_scatter(full[rank], sizes, dim, name),
            total.narrow(dim, sum(sizes[:rank]), sizes[rank]),
        ),
    }
    for operation, (ours, expected) in pairs.items():
        assert torch.equal(ours, expected), operation
        assert ours.is_contiguous() and ours.dtype is dtype, operation
        inputs = {full[rank].data_ptr(), held[rank].data_ptr()} - {0}  # 0: an empty tensor's
        assert ours.data_ptr() not in inputs, operation
    assert torch.equal(full[rank], before[0]) and torch.equal(held[rank], before[1])


def run_cases(group, cases):
    for case in cases:
        try:
            run_all(group, *case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_and_empty_parts(pool, world):
    """TP-5, TP-6: 5 over 2 is 3 + 2, 5 over 4 is 2 + 2 + 1 + 0, and the whole is 5 again."""
    sizes = [max(0, min(-(-5 // world), 5 - r * -(-5 // world))) for r in range(world)]
    cases = [((4, 3), torch.float32, "contiguous", dim, sizes) for dim in (0, 1, -1, -2)]
    cases += [((0, 3), torch.float32, "contiguous", 1, sizes)]
    cases += [((2, 3), torch.float32, "contiguous", 0, [0] * world)]
    pool.run(run_cases, cases, world_size=world)


def test_layouts_that_gloo_misreads(pool):
    """TP-16: arange(24).reshape(4, 3, 2).transpose(1, 2) on 4 ranks; TP-17: x.t(); TP-19."""
    cases = [
        ((4, 2, 3), torch.float32, layout, dim, [1, 1, 1, 1])
        for layout in LAYOUTS
        for dim in (0, 1, 2)
    ]
    cases += [((6, 4), torch.float32, "transposed", 0, [2, 1, 2, 1])]
    pool.run(run_cases, cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(pool, dtype):
    cases = [((4, 3), dtype, "strided", 0, [2, 2]), ((4, 3), dtype, "contiguous", 1, [3, 0])]
    pool.run(run_cases, cases, world_size=2)


@st.composite
def a_case(draw):
    world = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 4), min_size=world, max_size=world))
    return (
        world,
        (tuple(shape), draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS)), dim, sizes),
    )


@given(cases=st.lists(a_case(), min_size=1, max_size=8))
@settings(max_examples=15)
def test_any_shape_layout_and_split(pool, cases):
    for world in {world for world, _ in cases}:
        pool.run(run_cases, [case for w, case in cases if w == world], world_size=world)


def wire_bytes(group):
    name = resolve_group(group).name
    x = torch.ones(4, 3)
    with count_collectives() as counts:
        collectives.all_reduce(x, name)
        collectives.all_gather(x[: 4 - 2 * group.rank()], [4, 2], 0, name)
        collectives.all_reduce(x[:0], name)
        collectives.all_gather(x[:, :0], [0, 0], 1, name)
        collectives.reduce_scatter(x[:0], [0, 0], 0, name)
    return {kind: (counts[kind].calls, counts[kind].bytes) for kind in counts}


def test_nothing_is_sent_for_nothing(pool):
    """Uneven parts are padded to the largest; empty tensors start no collective."""
    seen = pool.run(wire_bytes, world_size=2)
    assert seen == [{"all_reduce": (1, 48), "all_gather": (1, 96)}] * 2


def asynchronous(group):
    name = resolve_group(group).name
    tensors = [torch.full((3,), float(10 * i + group.rank())) for i in range(3)]
    pending = [collectives.all_reduce_async(t, name) for t in tensors]
    results = [p.wait() for p in reversed(pending)]
    again = [p.wait() for p in reversed(pending)]  # a second wait is free
    assert all(a is b for a, b in zip(results, again, strict=True))
    assert results[0] is tensors[2]
    return [r[0].item() for r in results]


def test_an_asynchronous_sum_is_in_place_and_waited_for_once(pool):
    assert pool.run(asynchronous, world_size=3) == [[63.0, 33.0, 3.0]] * 3
