"""Arguments that do not fit: each error names the op, the parameter, what was given and the fix."""

from __future__ import annotations

import pytest
import torch

from tests.ops.samples import OPS
from tpkernels import ops
from tpkernels.errors import ConfigError

pytestmark = pytest.mark.usefixtures("implementation")
by_name = pytest.mark.parametrize("op", OPS, ids=str)
FORWARD = pytest.mark.parametrize("op", [op for op in OPS if op.optional], ids=str)
BACKWARD = pytest.mark.parametrize("op", [op for op in OPS if not op.optional], ids=str)


def x(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@by_name
def test_unknown_activation(op):
    with pytest.raises(
        ConfigError, match=r"act='swish' is not known; allowed: none, gelu, .*relu2"
    ):
        op.run(op.integers((2,), 3, 4), "swish")


@by_name
def test_dtypes_that_differ(op):
    tensors = op.integers((2,), 3, 4)
    for position in range(1, len(tensors)):
        given = [t.double() if i == position else t for i, t in enumerate(tensors)]
        message = rf"{op}\w*: .* is torch\.float64 but \w+ is torch\.float32.*Fix: .*\.to\("
        with pytest.raises(ConfigError, match=message):
            op.run(given, "gelu")


@FORWARD
def test_an_input_of_another_dtype_is_to_be_cast(op):
    tensors = op.integers((2,), 3, 4)
    tensors[0] = tensors[0].double()
    message = (
        rf"{op}\w*: (weight|w_gate) is torch\.float32 but x is torch\.float64; .*"
        r"Fix: x\.to\(torch\.float32\), module\.to\(torch\.float64\), or run under torch\.autocast"
    )
    with pytest.raises(ConfigError, match=message):
        op.run(tensors, "gelu")


@by_name
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_without_kernels(op, dtype):
    tensors = [t.to(dtype) for t in op.integers((2,), 3, 4)]
    message = rf"has dtype {dtype}; allowed: float64, float32, bfloat16, float16"
    with pytest.raises(ConfigError, match=message):
        op.run(tensors, "gelu")


@by_name
def test_devices_that_differ(op):
    tensors = op.integers((2,), 3, 4)
    tensors[1] = tensors[1].to("meta")
    with pytest.raises(ConfigError, match=r"is on (meta|cpu) but \w+ is on (cpu|meta).*Fix: "):
        op.run(tensors, "gelu")


@FORWARD
def test_shapes_of_a_gemm(op):
    good = op.integers((2,), 3, 4)
    weights = [i for i in range(1, len(good)) if i not in op.optional]

    def run(position, tensor):
        op.run([tensor if i == position else t for i, t in enumerate(good)], "gelu")

    with pytest.raises(ConfigError, match=r"x must be \[\.\.\., K\] with K=3 .*got \(2, 5\)"):
        run(0, x(2, 5))
    with pytest.raises(ConfigError, match=r"x must be \[\.\.\., K\] with K=3 .*got \(\)"):
        run(0, x())
    for position in weights:
        with pytest.raises(ConfigError, match=r"(weight|w_gate|w_up) must .*\(3,\)"):
            run(position, x(3))
    for position in op.optional:
        name = {2: "bias", 3: "b_gate", 4: "b_up"}[position]
        with pytest.raises(ConfigError, match=rf"{name} must be \[N\] with N=4, got \(5,\)"):
            run(position, x(5))
        with pytest.raises(ConfigError, match=r"must be \[N\] with N=4, got \(1, 4\)"):
            run(position, x(1, 4))


@BACKWARD
def test_shapes_of_a_gradient(op):
    good = op.integers((2,), 3, 4)
    for position in range(1, len(good)):  # broadcasting would hide a wrong shape
        bad = [t[:1] if i == position else t for i, t in enumerate(good)]
        with pytest.raises(ConfigError, match=rf"{op}: .* got |has the shape of"):
            op.run(bad, "gelu")


def test_gate_and_up_weights_must_match():
    with pytest.raises(ConfigError, match=r"gemm_glu: w_up must .*\(4, 3\), got \(5, 3\)"):
        ops.gemm_glu(x(2, 3), x(4, 3), x(5, 3))


def test_gemm_gelu_names_its_own_argument():
    with pytest.raises(ConfigError, match="approximate='erf' is not known; allowed: none, tanh"):
        ops.gemm_gelu(x(2, 3), x(4, 3), approximate="erf")


@by_name
def test_errors_come_with_gradients_and_compiled_too(op):
    bad = [t.requires_grad_() for t in op.integers((2,), 3, 4)]
    bad[1] = bad[1].detach().double()
    with pytest.raises(ConfigError, match="float64"):
        op.run(bad, "gelu")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: op.run(t, "gelu"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="float64"):
        compiled(*bad)
