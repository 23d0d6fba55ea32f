"""The ops under ``torch.compile``, autocast, inference mode and meta tensors."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from tests.ops.samples import ACTIVATIONS, OPS, assert_equal
from tpkernels import ops
from tpkernels.testing import assert_two_times

pytestmark = pytest.mark.usefixtures("implementation")
by_name = pytest.mark.parametrize("op", OPS, ids=str)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def value_and_gradients(call, tensors):
    inputs = [t.detach().requires_grad_() for t in tensors]
    outputs = call(*inputs)
    loss = sum((y * (i + 1)).sum() for i, y in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, inputs, materialize_grads=True)]


@by_name
def test_compiled_in_one_graph_equals_eager(op):
    def call(*tensors):
        return op.run(tensors, "gelu")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    tensors = op.normals((4,), 3, 5)
    assert_equal(value_and_gradients(compiled, tensors), value_and_gradients(call, tensors))
    with torch.no_grad():
        assert_equal(compiled(*tensors), call(*tensors))


@by_name
def test_compiled_once_serves_every_batch_size(op):
    counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *tensors: op.run(tensors, "silu"), backend=counts, fullgraph=True, dynamic=True
    )
    for lead in ((4,), (7,), (9,)):
        tensors = op.normals(lead, 3, 5)
        assert_equal(compiled(*tensors), op.run(tensors, "silu"))
    assert counts.frame_count == 1


def test_compiled_by_inductor():
    def call(x, weight):
        return (ops.gemm_act(x, weight, None, "silu"),)

    tensors = OPS[0].normals((4,), 3, 5)[:2]
    compiled = torch.compile(call, fullgraph=True)
    assert_equal(value_and_gradients(compiled, tensors), value_and_gradients(call, tensors))


def test_compiled_calls_the_op_and_not_a_decomposition():
    targets = []

    def backend(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(ops.gemm_act, backend=backend, fullgraph=True)
    compiled(*OPS[0].normals((4,), 3, 5), "gelu")
    assert targets == [torch.ops.tpkernels.gemm_act.default]


@by_name
def test_autocast_casts_as_for_linear(op):
    tensors = op.normals((4,), 8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = op.run(tensors, "gelu")
    assert_equal(results, op.run([t.bfloat16() for t in tensors], "gelu"))
    wide = op.normals((4,), 8, 5, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op.run(wide, "gelu")[0].dtype is torch.float64  # as F.linear: left alone
    with torch.autocast("cpu", enabled=False):
        assert op.run(tensors, "gelu")[0].dtype is torch.float32


def test_autocast_mixes_dtypes_and_gives_gradients_in_the_parameters_dtype():
    x = torch.randn(6, 8, dtype=torch.float16)
    weight, bias = (torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.gemm_act(x, weight, bias, "gelu")
        eager = F.gelu(F.linear(x, weight, bias))
    assert y.dtype is torch.bfloat16
    truth = [t.detach().bfloat16().double().requires_grad_() for t in (x, weight, bias)]
    wide = F.gelu(F.linear(*truth))
    assert_two_times(y, eager, wide.detach())
    for ours, theirs, exact in zip(
        torch.autograd.grad(y.sum(), (weight, bias)),
        torch.autograd.grad(eager.sum(), (weight, bias)),
        torch.autograd.grad(wide.sum(), truth[1:]),
        strict=True,
    ):
        assert ours.dtype is torch.float32
        assert_two_times(ours, theirs, exact, torch.bfloat16)


@by_name
def test_inference_mode_and_meta(op):
    tensors = op.normals((4,), 3, 5)
    expected = op.run(tensors, "silu")
    with torch.inference_mode():
        assert_equal(op.run(tensors, "silu"), expected)
    shapes = [
        (y.shape, y.dtype, y.stride()) for y in op.run([t.to("meta") for t in tensors], "silu")
    ]
    assert shapes == [(y.shape, y.dtype, y.stride()) for y in expected]


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_a_parameter_frozen_or_under_no_grad_has_no_graph(act):
    x, weight, bias = OPS[0].normals((4,), 3, 5)
    assert not ops.gemm_act(x, weight, bias, act).requires_grad
    with torch.no_grad():
        assert not ops.gemm_act(x.requires_grad_(), weight, bias, act).requires_grad
