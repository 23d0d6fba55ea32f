"""``gemm_reduce_scatter`` is a linear, a reduce-scatter and the bias once: exactly, however cut."""

# S rows of the scattered dimension, s_r of them for rank r, K_r in features here, N out features

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.across_ranks import assert_gradients
from tests.ops.samples import DTYPES, LAYOUTS, laid_out
from tests.overlap.carriers import CARRIERS, run_carried, use_carrier
from tests.overlap.samples import integers, normals, part
from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import gemm_reduce_scatter, sequence_sizes
from tpkernels.overlap.scattering import Scattering
from tpkernels.testing import RankError, assert_two_times, count_collectives


@dataclass(frozen=True)
class Case:
    """Rank r has ``k_sizes[r]`` features of ``lead`` rows, and keeps ``sizes[r]`` of ``dim``."""

    lead: tuple[int, ...]
    k_sizes: tuple[int, ...]
    n: int
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    with_bias: bool = True
    dtype: torch.dtype = torch.float32
    chunks: int | None = 2
    layout: str = "contiguous"


def scatter_case(group, case):
    """Value and gradients against the dense layer, without tolerance; what was sent."""
    name, rank, k = resolve_group(group).name, group.rank(), sum(case.k_sizes)
    x, weight, bias = integers(1, *case.lead, k), integers(2, case.n, k), 3 * integers(3, case.n)
    dy = laid_out(integers(4, *case.lead, case.n), case.layout)
    dense = [t.double().requires_grad_() for t in (x, weight, bias)][: 2 + case.with_bias]
    y = F.linear(*dense)
    truths = torch.autograd.grad(y, dense, dy.double())
    dim = case.dim % y.dim()
    kept = case.sizes or sequence_sizes(y.shape[dim], group.size())

    swap = "contiguous" if case.layout == "expanded" else case.layout
    own = [part(x, case.k_sizes, -1, rank), part(weight, case.k_sizes, 1, rank)]
    ours = [laid_out(t.to(case.dtype), swap).detach().requires_grad_() for t in own]
    ours += [bias.to(case.dtype).requires_grad_()] * case.with_bias
    copies = [t.detach().clone() for t in ours]
    own_dy = part(dy, kept, dim, rank).to(case.dtype)

    def run():
        return gemm_reduce_scatter(
            ours[0],
            ours[1],
            ours[2] if case.with_bias else None,
            name,
            dim=case.dim,
            sizes=case.sizes and list(case.sizes),
            chunks=case.chunks,
        )

    with count_collectives() as forward:
        result = run()
    with count_collectives() as backward:
        gradients = torch.autograd.grad(result, ours, own_dy, retain_graph=True)
    again = torch.autograd.grad(result, ours, own_dy)
    with torch.no_grad():
        second = run()

    expected = part(y.detach(), kept, dim, rank).to(case.dtype)
    torch.testing.assert_close(result, expected, atol=0, rtol=0)
    assert torch.equal(result, second)
    assert result.is_contiguous() and second._base is None
    split = [part(truths[0], case.k_sizes, -1, rank), part(truths[1], case.k_sizes, 1, rank)]
    for mine, repeated, truth in zip(gradients, again, [*split, *truths[2:]], strict=True):
        torch.testing.assert_close(mine, truth.to(case.dtype), atol=0, rtol=0)
        assert torch.equal(mine, repeated)
    assert all(torch.equal(t, copy) for t, copy in zip(ours, copies, strict=True))
    if group.size() == 1 or y.numel() == 0:
        assert forward.total.calls == backward.total.calls == 0
        return
    assert (list(forward), list(backward)) == (["reduce_scatter"], ["all_gather"])
    for counted in (forward.total, backward.total):
        assert 1 <= counted.calls <= (case.chunks or 4)
        if len(set(kept)) == 1:
            assert counted.bytes == y.numel() * case.dtype.itemsize


def scatter_cases(group, cases, overlap="auto"):
    os.environ["TPKERNELS_OVERLAP"] = overlap
    for case in cases:
        try:
            scatter_case(group, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


FEATURES = {1: (4,), 2: (3, 1), 3: (2, 0, 2), 4: (1, 2, 1, 1)}
UNEVEN = {1: (5,), 2: (1, 4), 3: (2, 0, 3), 4: (0, 2, 1, 2)}


def shapes(world):
    """The first, a middle and the last dimension; batches that are put together and not."""
    k, rows = FEATURES[world], UNEVEN[world]
    base = Case((5,), k, 3, sizes=rows)
    yield from (replace(base, chunks=chunks) for chunks in range(1, 9))
    yield from (replace(base, dtype=dtype, with_bias=False, sizes=None) for dtype in DTYPES)
    yield from (replace(base, lead=(2, 5), dim=1, layout=layout) for layout in LAYOUTS)
    yield replace(base, lead=(3, 5, 2), dim=-3, chunks=4)
    yield replace(base, lead=(2, 3), n=5, dim=-1, chunks=3)
    yield replace(base, lead=(5, 2, 3), chunks=5)
    yield Case((3, 70 + world, 1), k, 2, dim=1, chunks=2)
    yield replace(base, lead=(7,), n=6, sizes=None, chunks=3)
    yield replace(base, lead=(1,), sizes=None)
    for lead, n in (((0,), 3), ((0, 5), 3), ((5,), 0), ((5, 0), 3)):
        yield Case(lead, k, n, dim=len(lead) - 1 if lead[0] == 0 else 0)
    yield Case((5,), (0,) * world, 3)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_exact_in_any_chunks(pool, world, carrier):
    """TP-1, TP-2: a sum, the bias once and its gradient whole; TP-13: dim 1, on two ranks too."""
    run_carried(pool, carrier, scatter_cases, list(shapes(world)), world_size=world)


@pytest.mark.parametrize("overlap", ["off", "chunked"])
def test_exact_as_the_plan_says(pool, overlap):
    cases = [replace(case, chunks=None) for case in shapes(3)]
    run_carried(pool, "gloo", scatter_cases, cases, overlap, world_size=3)


def test_the_group_of_one_is_a_linear(pool):
    """TP-54."""
    pool.run(scatter_cases, list(shapes(1)), world_size=1)


CASE = st.builds(
    Case,
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(0, 3), min_size=4, max_size=4).map(tuple),
    st.integers(0, 5),
    st.integers(0, 3),
    st.none(),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.none() | st.integers(1, 8),
    st.sampled_from(LAYOUTS),
)


@st.composite
def drawn_cases(draw, world):
    cases = []
    for case in draw(st.lists(CASE, min_size=1, max_size=8)):
        dim = case.dim % (len(case.lead) + 1)
        size = (*case.lead, case.n)[dim]
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
        cases.append(replace(case, k_sizes=case.k_sizes[:world], dim=dim, sizes=sizes))
    return cases


@pytest.mark.parametrize("carrier", CARRIERS)
def test_any_shape_and_split(pool, carrier):
    @settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(st.integers(2, 4).flatmap(lambda world: st.tuples(st.just(world), drawn_cases(world))))
    def check(drawn):
        world, cases = drawn
        run_carried(pool, carrier, scatter_cases, cases, world_size=world)

    check()


def gradients_of(group, dim, chunks):
    name, rank, k = group.group_name, group.rank(), [2, 1, 0]
    assert_gradients(
        group,
        lambda x, w, b: torch.sin(
            gemm_reduce_scatter(torch.sin(x), w, b, name, dim=dim, chunks=chunks)
        ),
        [normals(10 + rank, 2, 3, k[rank]), normals(20 + rank, 2, k[rank]), normals(3, 2)],
        shared=[False, False, True],
        replicated_output=False,
    )


@pytest.mark.parametrize("carrier", CARRIERS)
def test_gradcheck_one_rank_perturbed_at_a_time(pool, carrier):
    run_carried(pool, carrier, gradients_of, 1, 2, world_size=2)
    run_carried(pool, carrier, gradients_of, 0, 3, world_size=3)


def test_gradcheck_of_scattered_features_and_without_overlap(pool):
    for dim in (1, 2):
        run_carried(pool, "gloo", gradients_of, dim, None, world_size=2)


def rounded(group, dtype):
    """Beside PyTorch's own linear and reduce-scatter, as in TP-11, of 63 rows."""
    name, rank, sizes = group.group_name, group.rank(), [40, 30, 20]
    x, weight = normals(1, 63, 90).to(dtype), normals(2, 24, 90).to(dtype)
    bias = normals(3, 24).to(dtype)
    own = (part(x, sizes, -1, rank), part(weight, sizes, 1, rank), bias)
    eager = F.linear(*own[:2])
    dist.all_reduce(eager, group=group)
    truth = F.linear(x.double(), weight.double(), bias.double())
    cut = [part(t, [21] * 3, 0, rank) for t in (eager + bias, truth)]
    for reduce_dtype in (None, torch.float32):
        for chunks in (None, 1, 3):
            options = {"reduce_dtype": reduce_dtype, "chunks": chunks}
            results = [gemm_reduce_scatter(*own, name, **options) for _ in range(2)]
            assert results[0].dtype is dtype
            assert_two_times(results[0], *cut, name=str(options))
            assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_rounding(pool, carrier, dtype):
    """TP-11: with the partial sums in their own dtype and in fp32."""
    run_carried(pool, carrier, rounded, dtype, world_size=3)


def wide_range(group):
    """Partial sums of 257 (bf16 holds 256), 1 and 1; and the bytes on the wire."""
    first = torch.tensor([[256.0, 1.0]]) if group.rank() == 0 else torch.tensor([[1.0, 0.0]])
    x, weight = first.bfloat16().expand(3, 2), torch.ones(1, 2).bfloat16()
    seen = []
    for reduce_dtype in (None, torch.float32):
        for chunks in (1, 2):
            options = {"reduce_dtype": reduce_dtype, "chunks": chunks}
            with count_collectives() as counts:
                y = gemm_reduce_scatter(x, weight, None, group.group_name, **options)
            seen.append((y.item(), counts.total.bytes))
    return seen


@pytest.mark.parametrize("carrier", CARRIERS)
def test_sums_are_rounded_once(pool, carrier):
    """TP-33: 256 + 1 + 1 is 258; rounded after each addition, it stays 256.

    In fp32 on the wire 257 is not rounded to 256 before the sum: 259, which bf16 rounds to 260.
    """
    seen = [(258.0, 6), (258.0, 6), (260.0, 12), (260.0, 12)]
    assert run_carried(pool, carrier, wide_range, world_size=3) == [seen] * 3


def order(group):
    """The owners of the rows in the order in which their partial sums are computed."""
    scattering = Scattering([12, 2], 0, [4] * 3, torch.ones(1), group.group_name, 2)
    owners = []
    with scattering:
        for cut, place in scattering.cuts():
            place.fill_(1)
            owners.append(cut.owner)
        total = scattering.finish(torch.empty(4, 2))
    assert bool((total == 3).all())
    return owners


def test_own_rows_come_last(pool):
    for rank, owners in enumerate(run_carried(pool, "gloo", order, world_size=3)):
        ring = [(rank + 1) % 3, (rank + 2) % 3]
        assert owners == [*ring, *ring, rank]
    for rank, owners in enumerate(run_carried(pool, "lanes", order, world_size=3)):
        ring = [(rank + 1) % 3, (rank + 2) % 3]
        assert owners == [*ring, *ring, rank, rank]


def repeated(group, calls):
    """TP-10: new data and another M at every call."""
    name, rank, world = group.group_name, group.rank(), group.size()
    for call in range(calls):
        m = (5, 64, 1, 17)[call % 4]
        x, weight = integers(call, m, 6 * world), integers(100 + call, 3, 6 * world)
        mine = [t[:, 6 * rank : 6 * rank + 6].clone().requires_grad_() for t in (x, weight)]
        y = gemm_reduce_scatter(*mine, None, name, chunks=2)
        assert torch.equal(y, part(F.linear(x, weight), sequence_sizes(m, world), 0, rank))
        y.sum().backward()
        assert torch.equal(mine[0].grad, mine[1].sum(0).expand(m, 6))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_calls_one_to_many_with_other_data_and_rows(pool, carrier):
    run_carried(pool, carrier, repeated, 8, world_size=3)


def overlapping_groups(group, carrier):
    """TP-44: two groups that share rank 1, in turns; a message of one never serves the other."""
    rank = group.rank()
    members = ([0, 1], [1, 2])
    groups = [dist.new_group(ranks) for ranks in members]
    sums = []
    for step in range(4):
        for made, ranks in zip(groups, members, strict=True):
            if rank not in ranks:
                continue
            if step == 0:
                use_carrier(made, carrier)
            x = torch.full((4, 1), 10.0**rank * (step + 1), requires_grad=True)
            y = gemm_reduce_scatter(x, torch.ones(2, 1), None, made.group_name, chunks=2)
            (dx,) = torch.autograd.grad(y.sum() * (rank + 1), x)
            expected = torch.tensor([r + 1.0 for r in ranks]).repeat_interleave(2) * 2
            assert torch.equal(dx[:, 0], expected)
            sums.append((step, ranks, y[0, 0].item()))
    return sums


@pytest.mark.parametrize("carrier", ["gloo", "lanes"])
def test_two_groups_that_overlap(pool, carrier):
    for sums in pool.run(overlapping_groups, carrier):
        for step, ranks, value in sums:
            assert value == sum(10.0**r for r in ranks) * (step + 1)


def bad_call(group, kind):
    name, x, weight = group.group_name, torch.ones(2, 3), torch.ones(4, 3)
    calls = {
        "shape": lambda: gemm_reduce_scatter(x, torch.ones(4, 5), None, name),
        "bias": lambda: gemm_reduce_scatter(x, weight, torch.ones(3), name),
        "dtype": lambda: gemm_reduce_scatter(x, weight.double(), None, name),
        "reduce_dtype": lambda: gemm_reduce_scatter(
            x, weight, None, name, reduce_dtype=torch.int32
        ),
        "dim": lambda: gemm_reduce_scatter(x, weight, None, name, dim=-3),
        "sizes": lambda: gemm_reduce_scatter(x, weight, None, name, sizes=[1, 2]),
        "chunks": lambda: gemm_reduce_scatter(x, weight, None, name, chunks=0),
    }
    with count_collectives() as counts:
        try:
            calls[kind]()
        finally:
            assert counts.total.calls == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", r"gemm_reduce_scatter: x must be \[\.\.\., K\] with K=5"),
        ("bias", r"gemm_reduce_scatter: bias must be \[N\] with N=4, got \(3,\)"),
        ("dtype", r"weight is torch\.float64 but x is torch\.float32.*Fix:"),
        ("reduce_dtype", r"reduce_dtype=torch\.int32 cannot hold the sums; allowed: None, "),
        ("dim", r"dim=-3 is not a dimension of x \(2, 4\); allowed: -2 to 1"),
        ("sizes", r"sizes=\[1, 2\] must name the rows of each of 2 ranks .* which has 2"),
        ("chunks", r"chunks=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_raises_before_communication(pool, kind, message):
    with pytest.raises(RankError, match=message) as caught:
        pool.run(bad_call, kind, world_size=2)
    assert isinstance(caught.value.__cause__, ConfigError)
