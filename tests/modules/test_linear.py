"""Column and row parallel linear layers against ``nn.Linear``: values, gradients, uneven, empty."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from tests.modules.comparing import Case, assert_ranks_agree, compare, exact
from tpkernels.comm.group import resolve_group
from tpkernels.comm.regions import gather_from_tensor_model_parallel_region as gather
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.modules import ColumnParallelLinear, RowParallelLinear
from tpkernels.modules.parameters import gather_full
from tpkernels.shard_spec import chunk_sizes, spec_of
from tpkernels.testing import RankError


class Pair(nn.Module):
    """Two linear layers, an activation between them."""

    def __init__(self, k, f, n, bias, act=lambda x: x):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(k, f, bias), nn.Linear(f, n, bias), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def shard_pair(module, group, activation="none"):
    ColumnParallelLinear.shard_(module.up, group, activation=activation)
    RowParallelLinear.shard_(module.down, group)
    module.act = lambda x: x


def shard_column(module, group):
    ColumnParallelLinear.shard_(module, group, gather_output=True)


def shard_row(module, group):
    RowParallelLinear.shard_(module, group, input_is_parallel=False)


def rows_of(k, *shape):
    return lambda: [torch.randn(*shape, k)]


def pair_case(k, f, n, bias, *shape, act=lambda x: x, name="none"):
    shard = functools.partial(shard_pair, activation=name)
    return Case(functools.partial(Pair, k, f, n, bias, act), shard, rows_of(k, *shape))


LINEAR = {
    # TP-5: a hidden size of 5 on 2 ranks, 3 on 4; TP-2: bias gradients
    "pair": pair_case(8, 12, 6, True, 2, 3),
    "pair_no_bias": pair_case(4, 8, 4, False, 3),
    "pair_of_5": pair_case(5, 5, 5, True, 2, 3),
    "pair_of_3": pair_case(7, 3, 2, True, 4),
    "one_row": pair_case(6, 5, 4, True, 1),
    "one_vector": pair_case(6, 5, 4, True),
    "column_gathered_5": Case(lambda: nn.Linear(4, 5), shard_column, rows_of(4, 2, 3)),
    "column_gathered_3": Case(lambda: nn.Linear(4, 3, bias=False), shard_column, rows_of(4, 3)),
    "row_whole_input_5": Case(lambda: nn.Linear(5, 4), shard_row, rows_of(5, 2, 3)),
    "row_whole_input_3": Case(lambda: nn.Linear(3, 4, bias=False), shard_row, rows_of(3, 3)),
    # TP-16, TP-17, TP-19: an input, and so a gradient, that is not contiguous
    "transposed_input": Case(
        lambda: Pair(4, 6, 4, True),
        shard_pair,
        lambda: [torch.randn(4, 5).t()],
    ),
}
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def linear_task(group, dtypes):
    outputs = [compare(group, case, dtype) for case in LINEAR.values() for dtype in dtypes]
    return torch.cat([y.flatten().double() for y in outputs])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_linear_equals_dense_TP_5_TP_54(pool, world):
    dtypes = [torch.float64, torch.float32, torch.bfloat16][:: 2 if world == 3 else 1]
    assert_ranks_agree(pool.run(linear_task, dtypes, world_size=world))


def exact_task(group):
    for case in LINEAR.values():
        exact(group, case)
    exact(group, pair_case(5, 7, 3, True, 6, act=F.relu, name="relu"))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_whole_numbers_are_exact_TP_1_TP_2_TP_15(pool, world):
    """A bias added twice, an average for a sum or a lost row would show in the last bit."""
    pool.run(exact_task, world_size=world)


def activation_task(group):
    for name, act in ACTIVATIONS.items():
        compare(group, pair_case(6, 5, 4, True, 2, 3, act=act, name=name), torch.float64)
        compare(group, pair_case(6, 5, 4, True, 2, 3, act=act, name=name), torch.bfloat16)


def test_fused_activation(pool):
    pool.run(activation_task, world_size=2)


def drawn_task(group, cases):
    for k, f, n, bias, batch in cases:
        exact(group, pair_case(k, f, n, bias, *batch))
        exact(
            group, Case(lambda k=k, n=n, b=bias: nn.Linear(k, n, b), shard_row, rows_of(k, *batch))
        )
        exact(
            group,
            Case(lambda k=k, n=n, b=bias: nn.Linear(k, n, b), shard_column, rows_of(k, *batch)),
        )


sizes = st.integers(1, 9)
shapes = st.lists(st.integers(0, 3), max_size=3)


@given(st.lists(st.tuples(sizes, sizes, sizes, st.booleans(), shapes), min_size=4, max_size=4))
@settings(max_examples=6)
@pytest.mark.parametrize("world", [2, 4])
def test_any_shape_is_exact_TP_21_TP_23(pool, world, cases):
    """Empty batches included: no rows out, zero weight gradients, no complaint."""
    pool.run(drawn_task, cases, world_size=world)


def bias_task(group):
    layer = nn.Linear(4, 3)
    RowParallelLinear.shard_(layer, group, input_is_parallel=False)
    nn.init.zeros_(layer.weight)
    y = layer(torch.randn(5, 4))
    y.backward(torch.full_like(y, 2.0))
    assert torch.equal(y, layer.bias.expand(5, 3))
    assert spec_of(layer.bias) is None and layer.bias.shape == (3,)  # TP-3: replicated
    assert torch.equal(layer.bias.grad, torch.full((3,), 10.0))
    column = nn.Linear(4, 3)
    ColumnParallelLinear.shard_(column, group)
    held = chunk_sizes(3, group.size())[group.rank()]
    assert spec_of(column.bias).local_shape == (held,)
    assert column(torch.randn(2, 4)).shape == (2, held)


def test_row_bias_is_added_once_and_replicated_TP_1_TP_2_TP_3(pool):
    pool.run(bias_task, world_size=3)


def expanded_gradient_task(group):
    module = Pair(4, 6, 4, True)
    shard_pair(module, group)
    x = torch.randn(3, 4, requires_grad=True)
    module(x).sum().backward()  # its gradient is one number, expanded
    dense = Pair(4, 6, 4, True)
    dense.load_state_dict(
        {k: gather_full(v, resolve_group(group)) for k, v in module.state_dict().items()}
    )
    x2 = x.detach().clone().requires_grad_()
    dense(x2).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(module.down.bias.grad, dense.down.bias.grad)


def test_expanded_output_gradient(pool):
    pool.run(expanded_gradient_task, world_size=2)


def reduce_dtype_task(group):
    """Partial sums 256 and -255.5 and so on: in bf16 each rounding costs up to one."""
    k, rank = 8, group.rank()
    layer = nn.Linear(k, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[256, 0.75, 256, 0.75, -256, 0.75, -256, 0.75]]))
    wide, narrow = nn.Linear(k, 1, bias=False), nn.Linear(k, 1, bias=False)
    for copied, reduce_dtype in ((wide, torch.float32), (narrow, None)):
        copied.bfloat16().load_state_dict(layer.state_dict())
        RowParallelLinear.shard_(copied, group, input_is_parallel=False, reduce_dtype=reduce_dtype)
    x = torch.ones(1, k, dtype=torch.bfloat16)
    assert wide(x).item() == 3.0
    assert wide(x).dtype is torch.bfloat16
    assert narrow(x).item() != 3.0, "the case no longer tells the two apart"
    return rank


def test_reduce_dtype_rounds_once_TP_33(pool):
    pool.run(reduce_dtype_task)


def init_task(group):
    for cls in (ColumnParallelLinear, RowParallelLinear):
        torch.manual_seed(3)
        ours = cls(5, 7, group=group)
        after = torch.rand(1)
        torch.manual_seed(3)
        dense = nn.Linear(5, 7)
        assert torch.equal(gather_full(ours.weight, ours.group), dense.weight)
        assert torch.equal(gather_full(ours.bias, ours.group), dense.bias)
        assert torch.equal(after, torch.rand(1))
        assert "rank" in repr(ours)


def test_initial_weights_are_those_of_nn_linear(pool):
    pool.run(init_task, world_size=3)


def gathered_task(group):
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 7, group=group, gather_output=True)
    local = ColumnParallelLinear(4, 7, group=group)
    local.load_state_dict(layer.state_dict())
    x = torch.randn(2, 4)
    whole = gather(local(x), local.group.name, -1, local.output_sizes())
    assert torch.equal(layer(x), whole) and layer(x).shape == (2, 7)


def test_gather_output_is_a_gather_of_the_parts(pool):
    pool.run(gathered_task)


@pytest.mark.parametrize(
    ("features", "message"), [((-1, 4), "in_features=-1"), ((4, 2.5), "out_features=2.5")]
)
def test_sizes_that_are_no_sizes(features, message):
    with pytest.raises(ConfigError, match=message):
        ColumnParallelLinear(*features)


def refused_task(group):
    ColumnParallelLinear.shard_(nn.LayerNorm(4), group, name="block.norm")


def test_a_layer_that_is_not_linear_is_refused_by_name(pool):
    with pytest.raises(RankError, match=r"block\.norm: LayerNorm") as caught:
        pool.run(refused_task, world_size=2)
    assert isinstance(caught.value.__cause__, UnsupportedModuleError)
