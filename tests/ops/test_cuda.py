"""The local ops on a GPU, by every implementation that could serve there."""

from __future__ import annotations

import pytest
import torch

from tests.ops.samples import LAYOUTS, OPS, assert_equal, laid_out
from tpkernels.ops import choice

pytestmark = pytest.mark.gpu
by_name = pytest.mark.parametrize("op", OPS, ids=str)


def on_gpu(tensors):
    return [t.to("cuda") for t in tensors]


def each_implementation(op, act, dtype=torch.float32):
    bias = bool(op.optional)
    found = choice.candidates(op.name, torch.device("cuda", 0), dtype, act, bias)
    assert "reference" in found and ("triton" in found) == (dtype is not torch.float64)
    return found


# Nearly all of the time is compilation: one activation and dtype in this file, whose kernels the
# tests share, and relu2 contains relu; tests/gpu has the others.
@by_name
@pytest.mark.parametrize(("dtype", "act"), [(torch.float64, "none"), (torch.float32, "relu2")])
def test_integers_are_exact(op, act, dtype):
    for lead, k, n in (((33,), 5, 70), ((2, 3), 5, 17), ((), 4, 5), ((0,), 4, 5), ((4,), 0, 3)):
        tensors = op.integers(lead, k, n, dtype)
        expected = op.expected([t.double() for t in tensors], act)
        for name in each_implementation(op, act, dtype):
            with choice.using(name):
                results = op.run(on_gpu(tensors), act)
            assert all(y.is_contiguous() and y.dtype is dtype for y in results)
            assert_equal([y.cpu().double() for y in results], expected)


@by_name
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_contiguous(op, layout):
    tensors = [laid_out(t, layout) for t in on_gpu(op.integers((6,), 5, 7))]
    for name in each_implementation(op, "relu2"):
        with choice.using(name):
            plain = op.run([t.contiguous() for t in tensors], "relu2")
            assert_equal(op.run(tensors, "relu2"), plain)


@by_name
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_backward_on_autograd_s_threads(op, name):
    tensors = op.integers((9,), 8, 6)

    def gradients(given):
        inputs = [t.detach().requires_grad_() for t in given]
        outputs = op.run(inputs, "relu2")
        return torch.autograd.grad([y.sum() for y in outputs], inputs, materialize_grads=True)

    expected = gradients(tensors)
    with choice.using(name):
        assert_equal([g.cpu() for g in gradients(on_gpu(tensors))], expected)


@by_name
def test_captured_and_replayed(op):
    for name in ("reference", "triton"):
        with choice.using(name):
            tensors = on_gpu(op.integers((16,), 32, 48))
            op.run(tensors, "relu2")  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = op.run(tensors, "relu2")
            for tensor in tensors:
                tensor.neg_()
            graph.replay()
            assert_equal(results, op.run(tensors, "relu2"))


def test_automatic_choice_serves_whatever_the_table_says():
    x, weight, bias = on_gpu(OPS[0].integers((64,), 32, 16))
    expected = OPS[0].expected([x.cpu(), weight.cpu(), bias.cpu()], "relu2")
    assert_equal([y.cpu() for y in OPS[0].run([x, weight, bias], "relu2")], expected)
    assert choice.summary(x.device)
