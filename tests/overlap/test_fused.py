"""The fused strategy on CPU: same answer as the dense layers, chosen where rows are few, one op."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.ops.samples import act_of
from tests.overlap.samples import integers, normals, part
from tpkernels import native
from tpkernels.comm import tpshm
from tpkernels.comm.group import resolve_group
from tpkernels.errors import CommunicationError, ConfigError
from tpkernels.modules import TPMLP
from tpkernels.overlap import fused, gemm_all_reduce, mlp
from tpkernels.shard_spec import chunk_sizes
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.skipif(
    not native.status().available, reason="the fused ops are compiled; this machine has none"
)


def sharing(group):
    """The name of a group of the same ranks over shared memory."""
    tpshm.register()
    ranks = dist.get_process_group_ranks(group)
    return resolve_group(dist.new_group(ranks, backend="tpshm")).name


def same_on_all(group, tensor):
    """Whether all ranks hold the same bits."""
    seen = [None] * group.size()
    dist.all_gather_object(seen, tensor, group=group)
    return all(torch.equal(tensor, other) for other in seen)


def gemm_cases(group, cases):
    name, rank, world = sharing(group), group.rank(), group.size()
    for lead, k, n, dtype, with_bias in cases:
        x, w = integers(0, *lead, k, dtype=dtype), integers(1, n, k, dtype=dtype)
        b = integers(2, n, dtype=dtype) if with_bias else None
        sizes = chunk_sizes(k, world)
        mine = part(x, sizes, -1, rank), part(w, sizes, 1, rank)
        with torch.no_grad():
            y = gemm_all_reduce(*mine, b, name)
            asked = torch.ops.tpkernels.gemm_all_reduce_fused(*mine, b, name)
        expected = F.linear(x.float(), w.float(), None if b is None else b.float()).to(dtype)
        assert torch.equal(y, expected), (lead, k, n, dtype)
        assert torch.equal(asked, expected), (lead, k, n, dtype)
        assert y.is_contiguous() and y._base is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gemm_all_reduce_is_exact_on_integers(pools, world):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = [
        (lead, k, n, dtype, with_bias)
        for lead, k, n in [
            ((1,), 7, 5),
            ((2, 3), 64, 33),
            ((16,), 40, 500),
            ((), 9, 4),
            ((32,), 2, 1),
        ]
        for dtype in dtypes
        for with_bias in (True, False)
    ]
    # Between more than two ranks so large a result is summed in parts.
    cases.append(((32,), 8, 2048, torch.bfloat16, True))
    pools(world).run(gemm_cases, cases, world_size=world, timeout=60)


def test_more_rows_than_a_slot_holds(pools):
    pools(2).run(more_rows, world_size=2, env={"TPKERNELS_OVERLAP": "fused"}, timeout=60)


def more_rows(group):
    name, columns = sharing(group), 1 << 20  # 8 rows of fp32 sums fill a slot
    x, w = integers(0, 19, 2), integers(1, columns, 2)
    with torch.no_grad():
        y = gemm_all_reduce(x[:, group.rank(), None], w[:, group.rank(), None], None, name)
    assert torch.equal(y, F.linear(x, w))


def formula(t, act):
    up = F.linear(t["x"], t["w_up"], t["b_up"])
    if t["w_gate"] is None:
        return F.linear(act_of(up, act), t["w_down"], t["b_down"])
    gate = F.linear(t["x"], t["w_gate"], t["b_gate"])
    return F.linear(act_of(gate, act) * up, t["w_down"], t["b_down"])


def mlp_cases(group, cases):
    name, rank = sharing(group), group.rank()
    for m, dtype, act, gated, with_bias in cases:
        k, f, n = 24, 37, 19
        shapes = {
            "x": (m, k),
            "w_up": (f, k),
            "w_gate": (f, k) if gated else None,
            "w_down": (n, f),
        }
        shapes |= {"b_up": (f,) if with_bias else None, "b_down": (n,) if with_bias else None}
        shapes["b_gate"] = (f,) if gated and with_bias else None
        whole = {
            key: None if shape is None else normals(i, *shape, dtype=dtype)
            for i, (key, shape) in enumerate(shapes.items())
        }
        sizes = chunk_sizes(f, group.size())
        split = {"w_up": 0, "b_up": 0, "w_gate": 0, "b_gate": 0, "w_down": 1}
        mine = {
            key: part(t, sizes, split[key], rank) if t is not None and key in split else t
            for key, t in whole.items()
        }
        x = mine.pop("x")
        with torch.no_grad():
            y = mlp(x, act=act, group_name=name, **mine)

        wide = {key: None if t is None else t.double() for key, t in whole.items()}
        truth, eager = formula(wide, act), formula(whole, act)
        assert_two_times(y, eager, truth, name=f"{m} {dtype} {act} {gated} {with_bias}")
        assert same_on_all(group, y)


@pytest.mark.parametrize("world", [2, 3])
def test_mlp_is_the_dense_mlp(pools, world):
    cases = [
        (m, dtype, act, gated, with_bias)
        for m in (1, 5, 32)
        for dtype in fused.DTYPES
        for act, gated in (("gelu", False), ("gelu_tanh", False), ("relu2", False), ("silu", True))
        for with_bias in (True, False)
    ]
    pools(world).run(mlp_cases, cases, world_size=world, timeout=60)


def served(group, call):
    """Which of our ops a call of ``mlp`` or ``gemm_all_reduce`` comes to, and its result."""
    name = sharing(group)
    x, w_up, w_down = normals(0, 4, 8), normals(1, 6, 8), normals(2, 5, 6)
    x, w_up, w_down = (t.float() for t in (x, w_up, w_down))
    seen = []

    def watched(op):
        return lambda *args: (seen.append(op.__name__), op(*args))[1]

    with pytest.MonkeyPatch.context() as patch:
        for op in (fused.mlp_fused, fused.gemm_all_reduce_fused):
            patch.setattr(fused, op.__name__, watched(op))
        if call == "grad":
            mlp(x.requires_grad_(), w_up, None, w_down, None, act="gelu", group_name=name)
        elif call == "transposed":
            with torch.no_grad():
                mlp(x, w_up.t().contiguous().t(), None, w_down, None, act="gelu", group_name=name)
        elif call == "many rows":
            with torch.no_grad():
                mlp(x.repeat(100, 1), w_up, None, w_down, None, act="gelu", group_name=name)
        elif call == "float64":
            with torch.no_grad():
                gemm_all_reduce(x.double(), w_up.double(), None, name)
        else:
            with torch.no_grad():
                mlp(x, w_up, None, w_down, None, act="gelu", group_name=name)
    return seen


@pytest.mark.parametrize(
    ("call", "env", "expected"),
    [
        ("few rows", {}, ["mlp_fused"]),
        ("few rows", {"TPKERNELS_OVERLAP": "off"}, []),
        ("few rows", {"TPKERNELS_OVERLAP": "fused"}, ["mlp_fused"]),
        ("grad", {}, ["gemm_all_reduce_fused"]),
        ("transposed", {}, ["gemm_all_reduce_fused"]),  # of the second half
        ("many rows", {}, []),
        ("many rows", {"TPKERNELS_OVERLAP": "fused"}, ["mlp_fused"]),
        ("float64", {}, []),
    ],
)
def test_when_it_is_chosen(pools, call, env, expected):
    results = pools(2).run(served, call, world_size=2, env=env)
    assert results == [expected, expected]


def refused(group, what):
    name = sharing(group) if what != "gloo" else resolve_group(group).name
    dtype = torch.float64 if what == "float64" else torch.float32
    with pytest.raises(ConfigError) as caught:
        gemm_all_reduce(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype), None, name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "reason"), [("gloo", "the ranks share no memory"), ("float64", "no torch.float64")]
)
def test_asked_for_and_impossible_raises(pools, what, reason):
    for message in pools(2).run(refused, what, world_size=2, env={"TPKERNELS_OVERLAP": "fused"}):
        assert message.startswith("TPKERNELS_OVERLAP=fused was asked for and cannot serve: ")
        assert reason in message and message.endswith("Fix: unset TPKERNELS_OVERLAP")


def repeated(group):
    name, rank = sharing(group), group.rank()
    for call, m in enumerate((1, 7, 2, 40, 1, 32, 3, 3, 64, 1)):
        x, w = integers(call, m, 10), integers(100 + call, 6 + call, 10)
        sizes = chunk_sizes(10, group.size())
        with torch.no_grad():
            y = gemm_all_reduce(part(x, sizes, 1, rank), part(w, sizes, 1, rank), None, name)
        assert torch.equal(y, F.linear(x, w)), call


def test_call_after_call_with_other_data_and_sizes(pools):
    """TP-10: nothing of an earlier call is taken for one of this."""
    pools(3).run(repeated, world_size=3)


def different(group, how):
    name, rank = sharing(group), group.rank()
    x, w = torch.ones(2 + rank if how == "rows" else 2, 4), torch.ones(5, 4)
    try:
        if how == "operation" and rank == 1:
            dist.all_reduce(x, group=dist.distributed_c10d._resolve_process_group(name))
        else:
            torch.ops.tpkernels.gemm_all_reduce_fused(x, w, None, name)
    except (CommunicationError, dist.DistBackendError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("how", "both"),
    [
        ("rows", ["gemm_all_reduce(sum) of float32 [2, 5]", "[3, 5]"]),
        (
            "operation",
            ["gemm_all_reduce(sum) of float32 [2, 5]", "all_reduce(sum) of float32 [2, 4]"],
        ),
    ],
)
def test_a_mismatch_raises_on_all_ranks_and_names_both(pools, how, both):
    for message in pools(2).run(different, how, world_size=2):
        assert all(each in message for each in both), message


def wrong_operands(group):
    name, w = sharing(group), torch.ones(6, 4)
    x, b, options = torch.ones(2, 4), torch.ones(6), {"act": "silu", "group_name": name}
    said = []
    for changed in (
        {"w_gate": w.bfloat16()},
        {"w_gate": w, "b_gate": torch.ones(1)},
        {"w_gate": w, "b_gate": b.bfloat16()},
        {"b_gate": b},
    ):
        with torch.no_grad(), pytest.raises(ConfigError) as caught:
            mlp(x, w, None, torch.ones(5, 6), None, **changed, **options)
        said.append(str(caught.value))
    with torch.no_grad(), pytest.raises(ConfigError):
        mlp(torch.tensor(1.0), w, None, torch.ones(5, 6), None, **options)
    # Nothing to sum, but gates: act(0) * b.
    empty = torch.ones(6, 0)
    with torch.no_grad():
        y = mlp(x[:, :0], empty, b, torch.ones(5, 6), None, w_gate=empty, **options)
    assert torch.equal(y, torch.zeros(2, 5))
    return said


def test_what_the_fused_mlp_refuses(pools):
    for said in pools(2).run(wrong_operands, world_size=2):
        for message, part_of_it in zip(
            said,
            ("w_gate is torch.bfloat16", "b_gate must be [N]", "b_gate is", "without w_gate"),
            strict=True,
        ):
            assert part_of_it in message


def mixed_grad_mode(group):
    name = sharing(group)
    x, w_up, w_down = torch.ones(2, 4), torch.ones(6, 4), torch.ones(5, 6)
    with torch.set_grad_enabled(group.rank() == 0):
        y = mlp(x, w_up.requires_grad_(), None, w_down, None, act="relu", group_name=name)
    assert torch.equal(y.detach(), torch.full((2, 5), 4.0 * 6 * group.size()))


def test_ranks_may_differ_in_their_grad_mode(pools):
    pools(2).run(mixed_grad_mode, world_size=2)


def more_columns(group):
    name = sharing(group)
    with torch.no_grad():
        y = gemm_all_reduce(torch.ones(1, 1), torch.ones((8 << 20) + 1, 1), None, name)
    return bool((y == group.size()).all())


def test_more_columns_than_a_slot_holds_go_another_way(pools):
    assert pools(2).run(more_columns, world_size=2, timeout=60) == [True, True]


def checked(group):
    name, x, w = sharing(group), torch.ones(2, 4), torch.ones(5, 4)
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.tpkernels
    torch.library.opcheck(ops.gemm_all_reduce_fused, (x, w, None, name), test_utils=tests)
    arguments = (x, w, None, None, None, torch.ones(3, 5), None, "gelu", name)
    torch.library.opcheck(ops.mlp_fused, arguments, test_utils=tests)


def test_opcheck(pools):
    pools(2).run(checked, world_size=2)


def compiled(group):
    name = sharing(group)
    x, w_up, w_down = normals(0, 2, 8).float(), normals(1, 6, 8).float(), normals(2, 5, 6).float()
    sizes = chunk_sizes(6, group.size())
    w_up, w_down = part(w_up, sizes, 0, group.rank()), part(w_down, sizes, 1, group.rank())

    def layer(x):
        return mlp(x, w_up, None, w_down, None, act="gelu", group_name=name)

    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(x).dtype is torch.bfloat16


def test_under_compile_and_autocast(pools):
    pools(2).run(compiled, world_size=2, timeout=90)


def module(group):
    process_group = dist.distributed_c10d._resolve_process_group(sharing(group))
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))
    split = TPMLP(16, 48, group=process_group)
    with torch.no_grad():
        sizes, rank = chunk_sizes(48, group.size()), group.rank()
        split.up_proj.local_weight().copy_(part(dense[0].weight, sizes, 0, rank))
        split.up_proj.local_bias().copy_(part(dense[0].bias, sizes, 0, rank))
        split.down_proj.local_weight().copy_(part(dense[2].weight, sizes, 1, rank))
        split.down_proj.local_bias().copy_(dense[2].bias)
        for rows in (1, 3, 64):  # both sides of the limit
            x = normals(rows, rows, 16).float()
            torch.testing.assert_close(split(x), dense(x), rtol=1e-5, atol=1e-6)
    x = normals(5, 4, 16).float().requires_grad_()
    (mine,) = torch.autograd.grad(split(x).square().sum(), x)
    (theirs,) = torch.autograd.grad(dense(x).square().sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_tpmlp_with_and_without_gradients(pools):
    pools(2).run(module, world_size=2)


def test_the_limits_are_known():
    assert fused.most_rows(torch.float32) >= 1
    assert fused.most_rows(torch.bfloat16) >= 1
    assert fused.most_rows(torch.float64) == 0
