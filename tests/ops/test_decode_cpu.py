"""The CPU's ways of a fused GEMM, each forced, and that the table is what serves and is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.ops.samples import ACTIVATIONS, OPS, act_of, laid_out
from tpkernels import native, ops
from tpkernels.errors import ConfigError
from tpkernels.ops import choice
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.skipif(
    native.load() is None, reason=f"the compiled kernels are not there: {native.status().reason}"
)

ROWS = (1, 2, 3, 5, 8, 16, 31, 32, 33)
DECODED = (torch.float32, torch.bfloat16, torch.float16)
BY_NAME = {op.name: op for op in OPS}
FORWARD = ("gemm_act", "gemm_act_aux", "gemm_glu", "gemm_glu_aux")


@pytest.fixture
def force() -> Iterator[object]:
    """Force a way of the compiled kernels for the test."""
    extension = native.load()
    with choice.using("cpu"):
        yield extension.force_cpu_way
        assert extension.force_cpu_way("auto")


@pytest.mark.parametrize("dtype", DECODED, ids=str)
@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("way", ["decode", "auto"])
def test_any_number_of_rows_within_twice_eager_s_error(force, way, name, dtype):
    assert force(way)
    op = BY_NAME[name]
    for m in ROWS:
        tensors = op.normals((m,), 70, 129, dtype)
        truths = op.expected([t.double() for t in tensors], "gelu")
        eager = op.expected(tensors, "gelu")
        for ours, theirs, truth in zip(op.run(tensors, "gelu"), eager, truths, strict=True):
            assert ours.dtype is dtype and ours.is_contiguous()
            assert_two_times(ours, theirs, truth, name=f"{name} {m} rows")


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
@pytest.mark.parametrize("name", FORWARD)
def test_strides_are_those_of_the_operands(force, name, layout):
    assert force("decode")
    op = BY_NAME[name]
    for m in (1, 5):
        tensors = [laid_out(t, layout) for t in op.integers((m,), 37, 21, torch.bfloat16)]
        for ours, truth in zip(op.run(tensors, "relu"), op.expected(tensors, "relu"), strict=True):
            assert torch.equal(ours, truth)


def test_rows_and_columns_of_a_larger_matrix_are_used_as_they_are(force):
    assert force("decode")
    x, weight = torch.randint(-3, 4, (9, 100)).float(), torch.randint(-3, 4, (50, 200)).float()
    ours = ops.gemm_act(x[::2, 7:60], weight[3:40, 11:64], None, "relu")
    assert torch.equal(ours, F.relu(x[::2, 7:60] @ weight[3:40, 11:64].t()))


@pytest.mark.parametrize("dtype", DECODED, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_threads_and_other_rows_change_no_bit(force, name, dtype):
    assert force("decode")
    op, before = BY_NAME[name], torch.get_num_threads()
    x, *rest = op.normals((33,), 520, 1200, dtype)  # over 1 MB of weights: both threads get some
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(op.run([x, *rest], "gelu"))
    finally:
        torch.set_num_threads(before)
    some = op.run([x[30:], *rest], "gelu")
    for one, two, last in zip(*results, some, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[30:], last)


@pytest.mark.parametrize("dtype", DECODED, ids=str)
@pytest.mark.parametrize("name", ["gemm_act", "gemm_glu"])
def test_gradients_through_the_aux_form(force, name, dtype):
    assert force("decode")
    op = BY_NAME[name]
    leaves = [t.requires_grad_() for t in op.normals((3,), 24, 40, dtype)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    plain = [t.detach().clone().requires_grad_() for t in leaves]
    for tensors, run in ((leaves, op.run), (wide, op.expected), (plain, op.expected)):
        run(tensors, "silu")[0].square().sum().backward()
    for ours, eager, truth in zip(leaves, plain, wide, strict=True):
        assert_two_times(ours.grad, eager.grad, truth.grad, name=f"gradient of {name}")
    with torch.no_grad():
        assert torch.equal(op.run(leaves, "silu")[0], op.call(*leaves, "silu").detach())


def test_a_gradient_is_recorded_only_where_one_is_needed(force):
    assert force("auto")
    x, weight, bias = OPS[0].normals((2,), 8, 16)
    assert ops.gemm_act(x, weight, bias, "gelu").grad_fn is None
    weight.requires_grad_()
    assert ops.gemm_act(x, weight, bias, "gelu").grad_fn is not None
    with torch.no_grad():
        assert ops.gemm_act(x, weight, bias, "gelu").grad_fn is None
    with torch.inference_mode():
        assert ops.gemm_act(x, weight, bias, "gelu").is_inference()


@pytest.mark.parametrize("m", [1, 65, 512, 513])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("way", ["onednn", "library", "decode", "auto"])
def test_every_way_is_within_twice_eager_s_error(force, way, act, m):
    assert force(way)
    for dtype in DECODED[:2]:
        tensors = OPS[0].normals((m,), 200, 30, dtype)
        (truth,) = OPS[0].expected([t.double() for t in tensors], act)
        (eager,) = OPS[0].expected(tensors, act)
        assert_two_times(ops.gemm_act(*tensors, act), eager, truth, name=f"{way} {act} {m}")


def test_an_unknown_way_is_refused():
    assert not native.load().force_cpu_way("fast")


def test_the_table_is_what_doctor_says(force):
    said = {op: reason for op, _, reason in choice.resolve_all()}
    table = native.load().cpu_table_summary
    for name in FORWARD:
        assert table(plain=name == "gemm_act") in said[name]
    assert "library's GEMM" in said["gemm_act"]


# --- asked for ------------------------------------------------------------------------------

with_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@with_onednn
@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act != "relu2"])
def test_onednn_can_be_asked_for(act):
    with choice.using("onednn"):
        for lead in ((), (1,), (2, 3), (0,)):
            x, weight, bias = OPS[0].normals(lead, 24, 40)
            truth = act_of(F.linear(x.double(), weight.double(), bias.double()), act)
            eager = act_of(F.linear(x, weight, bias), act)
            ours = ops.gemm_act(x, weight, bias, act)
            assert ours.shape == truth.shape
            if ours.numel():
                assert_two_times(ours, eager, truth, name=f"onednn {act}")
        x, weight = (
            torch.randint(-3, 4, (3, 4)).float().t(),
            torch.randint(-3, 4, (3, 5)).float().t(),
        )
        torch.testing.assert_close(ops.gemm_act(x, weight, None, act), act_of(x @ weight.t(), act))
    assert choice.resolve("cpu")[0] != "onednn"


@with_onednn
def test_onednn_refuses_by_name_what_it_lacks():
    x, weight, bias = OPS[0].normals((2,), 8, 16)
    serves = "it serves gemm_act, act not relu2, in float32 or bfloat16, on CPU; this is "
    with choice.using("onednn"):
        for dtype, act in (
            (torch.float64, "gelu"),
            (torch.float16, "gelu"),
            (torch.float32, "relu2"),
        ):
            with pytest.raises(ConfigError, match=f"{serves}gemm_act with a bias and act {act} in"):
                ops.gemm_act(x.to(dtype), weight.to(dtype), bias.to(dtype), act)
        with pytest.raises(ConfigError, match=f"{serves}gemm_act_aux"):
            ops.gemm_act(x, weight.requires_grad_(), bias, "gelu")
        for op in OPS[1:]:
            with pytest.raises(
                ConfigError, match=serves + "gemm|" + serves + "act_|" + serves + "glu"
            ):
                op.run(op.integers((2,), 3, 4), "relu")
        said = {op: name for op, name, _ in choice.resolve_all()}
        assert said["gemm_act"] == "onednn" and said["gemm_glu"] == "none"
