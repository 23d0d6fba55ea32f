"""CUDA graphs, streams and devices: the same op captured and replayed, on any stream, anywhere."""

from __future__ import annotations

import pytest
import torch

from tests.ops.samples import OPS, assert_equal
from tpkernels.modules import TPMLP, TPAttention
from tpkernels.ops import choice

pytestmark = pytest.mark.gpu

NAMES = ("gemm_act_aux", "gemm_dact_dbias", "gemm_glu", "gemm_dglu", "act_grad")
IMPLEMENTATIONS = ("triton", "reference")


def inputs_of(op, seed):
    torch.manual_seed(seed)
    return [t.cuda() for t in op.normals((130,), 72, 200, torch.bfloat16)]


def capture(call):
    """(graph, its static outputs) of ``call`` after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def assert_replays(call, static, others):
    """Replayed with other inputs in place, twice, it gives the bits of an eager call."""
    graph, outputs = capture(call)
    for fresh in (*others, *others[:1]):
        with torch.no_grad():
            for tensor, value in zip(static, fresh, strict=True):
                tensor.copy_(value)
        expected = [t.clone() for t in call()]
        for tensor in outputs:
            tensor.detach().zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_equal([t.detach() for t in outputs], [t.detach() for t in expected])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_captured_and_replayed_TP_37_TP_38_TP_39(name, implementation):
    op = next(op for op in OPS if op.name == name)
    static = inputs_of(op, 0)
    with choice.using(implementation):
        assert_replays(
            lambda: op.run(static, "silu"), static, [inputs_of(op, seed) for seed in (1, 2)]
        )


def modules():
    make = {"device": "cuda", "dtype": torch.bfloat16}
    return {
        "mlp": lambda: TPMLP(64, 192, activation="gelu", **make),
        "gated_mlp": lambda: TPMLP(64, 192, activation="silu", gated=True, **make),
        "attention": lambda: TPAttention(64, 4, 2, causal=True, fused_qkv=True, **make),
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", modules())
def test_forward_and_backward_of_a_module_are_captured_and_replayed(name, implementation):
    torch.manual_seed(0)
    module = modules()[name]()
    x = torch.randn(2, 24, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = module(x)
        grads = torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))
        return [y, *grads]

    others = [[torch.randn_like(x)] for _ in range(2)]
    with choice.using(implementation):
        assert_replays(step, [x], others)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_current_stream_is_honoured_TP_49(name, implementation):
    """Inputs are late on a side stream: an op on another stream would read the old ones."""
    op = next(op for op in OPS if op.name == name)
    fresh, late = inputs_of(op, 1), [torch.zeros_like(t) for t in inputs_of(op, 0)]
    with choice.using(implementation):
        expected = op.run(fresh, "silu")
        op.run(late, "silu")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
            for tensor, value in zip(late, fresh, strict=True):
                tensor.copy_(value)
            ours = op.run(late, "silu")
        stream.synchronize()
    assert_equal(ours, expected)


def test_backward_of_a_module_on_a_side_stream_TP_49():
    torch.manual_seed(0)
    module = modules()["mlp"]()
    x = torch.randn(2, 24, 64, device="cuda", dtype=torch.bfloat16)

    def step(source):
        leaf = source.detach().requires_grad_()
        y = module(leaf)
        return [y.detach(), *torch.autograd.grad(y.sum(), [leaf, *module.parameters()])]

    with choice.using("triton"):
        expected = step(x)
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            late.copy_(x)
            ours = step(late)
        stream.synchronize()
    assert_equal(ours, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_another_device_than_the_current_one(name):
    op = next(op for op in OPS if op.name == name)
    first = inputs_of(op, 0)
    second = [t.to("cuda:1") for t in first]
    assert torch.cuda.current_device() == 0
    with choice.using("triton"):
        ours, expected = op.run(second, "silu"), op.run(first, "silu")
    assert all(t.device == torch.device("cuda", 1) for t in ours)
    assert_equal([t.to("cuda:0") for t in ours], expected)
