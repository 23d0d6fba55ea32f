"""Every local op by its Triton kernel, against plain PyTorch: values, every tile, odd inputs."""

# lead: leading dimensions of x, K in features, N out features

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.samples import ACTIVATIONS, OPS, assert_equal, laid_out
from tpkernels.kernels import config as tiles
from tpkernels.ops import choice
from tpkernels.testing import assert_two_times

by_name = pytest.mark.parametrize("op", OPS, ids=str)
# NumPy's, of infinities, where the kernels are interpreted.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GEMMS = [op for op in OPS if op.name not in ("act_grad", "glu_grad")]


def usual_act(op):
    """The activation that models use there; one, since each is a kernel to compile."""
    return "silu" if "glu" in op.name else "gelu"


def moved(tensors, device):
    return [None if t is None else t.to(device) for t in tensors]


def assert_op(op, tensors, act, device, layouts=("contiguous",)):
    """Within the two-times rule; inputs untouched; the same bits again."""
    inputs = moved(tensors, device)
    inputs = [
        t if t is None else laid_out(t, layouts[i % len(layouts)]) for i, t in enumerate(inputs)
    ]
    copies = [None if t is None else t.clone() for t in inputs]
    with choice.using("triton"):
        ours, again = op.run(inputs, act), op.run(inputs, act)
    for given_tensor, copy in zip(inputs, copies, strict=True):
        assert given_tensor is None or torch.equal(given_tensor, copy), "an input was changed"
    assert_equal(ours, again)
    eager = op.expected(inputs, act)
    truth = op.expected([None if t is None else t.double() for t in inputs], act)
    for number, values in enumerate(zip(ours, eager, truth, strict=True)):
        assert values[0].is_contiguous()
        assert_two_times(*values, name=f"{op} output {number}")


@by_name
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_float64_by_the_two_times_rule(op, dtype, device):
    small = device.type == "cpu"
    if small and dtype == "fp16":
        pytest.skip("bf16 runs the same code in the interpreter")
    lead, k, n = ((3, 5), 20, 36) if small else ((3, 87), 200, 328)
    assert_op(op, op.normals(lead, k, n, DTYPES[dtype]), usual_act(op), device)


@pytest.mark.gpu
@pytest.mark.parametrize("op", GEMMS, ids=str)
def test_equals_float64_as_tf32_does(op, tf32):
    tensors = op.normals((260,), 192, 320, torch.float32)
    assert_op(op, tensors, usual_act(op), torch.device("cuda", 0))


@pytest.mark.gpu
def test_without_tf32_products_are_not_rounded():
    """As precise as PyTorch's float32, a thousand times below tf32's rounding."""
    op = OPS[0]
    tensors = op.normals((64,), 512, 64, torch.float32)
    inputs = moved(tensors, "cuda")
    with choice.using("triton"):
        (y,) = op.run(inputs, "none")
    (truth,) = op.expected([t.double() for t in tensors], "none")
    assert float((y.cpu() - truth).norm() / truth.norm()) < 1e-6


# Each kind is a kernel or two to compile: (dtype, layout, sizes of 16, optional arguments there).
KINDS = {
    "bf16 odd": ("bf16", "contiguous", False, True),
    "bf16 of 16, none optional": ("bf16", "contiguous", True, False),
    "fp16 transposed of 16": ("fp16", "transposed", True, True),
    "bf16 transposed odd": ("bf16", "transposed", False, True),
    "fp32 strided odd, none optional": ("fp32", "strided", False, False),
}


@by_name
def test_any_size_layout_and_dtype(op, device, examples):
    small = device.type == "cpu"
    most = 40 if small else 400

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def check(data):
        kind = data.draw(st.sampled_from(sorted(KINDS)), "kind")
        dtype, layout, even, optional = KINDS[kind]
        size = st.integers(2, most).filter(lambda size: size % 16)
        if even:
            size = st.integers(1, most // 16).map(lambda size: 16 * size)
        m, k, n = (data.draw(size, name) for name in "MKN")
        torch.manual_seed(m * 1009 + n)
        tensors = op.normals((m,), k, n, DTYPES[dtype])
        if not optional:
            tensors = [None if i in op.optional else t for i, t in enumerate(tensors)]
        assert_op(op, tensors, usual_act(op), device, (layout, "contiguous"))

    check()


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation(act, device):
    small = device.type == "cpu"
    for op in OPS:
        if op.name in ("gemm_act_aux", "gemm_dact", "gemm_glu", "gemm_dglu"):
            shape = ((9,), 12, 20) if small else ((130,), 72, 200)
            assert_op(op, op.normals(*shape, torch.bfloat16), act, device)


@by_name
@pytest.mark.parametrize("size", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (1, 1, 1), (1, 5, 17)], ids=str)
def test_empty_and_tiny_sizes_are_exact(op, size, device):
    if device.type == "cpu" and size[0] and size[2] and op.name not in ("gemm_act", "gemm_dact"):
        pytest.skip("the interpreter's sizes are tested with the ops")
    m, k, n = size
    tensors = moved(op.integers((m,), k, n, torch.float32), device)
    with choice.using("triton"):
        ours = op.run(tensors, "relu2")  # of kernels that tests/ops/test_cuda.py compiles as well
    assert_equal(ours, op.expected(tensors, "relu2"))


@pytest.mark.gpu
@pytest.mark.slow
@by_name
@pytest.mark.parametrize("dtype", ["bf16"])
def test_integers_are_exact(op, dtype):
    """Sums of up to 200 products of -1, 0 and 1 fit every dtype: any lost tile shows."""
    tensors = moved(op.integers((300,), 200, 520, DTYPES[dtype]), "cuda")
    with choice.using("triton"):
        ours = op.run(tensors, "none")
    expected = op.expected(tensors, "none")
    if op.name == "gemm_dact_dbias" and dtype != "fp32":
        ours, expected = ours[:1], expected[:1]  # the sum over the rows is rounded
    assert_equal(ours, expected)


CONFIGURED = ("gemm_act", "gemm_act_aux", "gemm_dact", "gemm_dact_dbias")
CONFIGURED += ("gemm_glu", "gemm_glu_aux", "gemm_dglu")


def launched(name, tensors, act, config):
    """The raw launcher of op ``name`` with these tiles."""
    from tpkernels.kernels.gemm_act import gemm_act
    from tpkernels.kernels.gemm_dact import gemm_dact
    from tpkernels.kernels.gemm_dglu import gemm_dglu
    from tpkernels.kernels.gemm_glu import gemm_glu

    launcher, options = {
        "gemm_act": (gemm_act, {}),
        "gemm_act_aux": (gemm_act, {"aux": True}),
        "gemm_dact": (gemm_dact, {}),
        "gemm_dact_dbias": (gemm_dact, {"dbias": True}),
        "gemm_glu": (gemm_glu, {}),
        "gemm_glu_aux": (gemm_glu, {"aux": True}),
        "gemm_dglu": (gemm_dglu, {}),
    }[name]
    result = launcher(*tensors, act, config=config, **options)
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURED)
def test_every_tile_configuration(name, device):
    """Each of the list that is tuned, on sizes with tails in M and N and K of several steps."""
    op = next(op for op in OPS if op.name == name)
    small = device.type == "cpu"
    capability = (9, 0) if small else torch.cuda.get_device_capability()
    listed = tiles.configs(name, torch.bfloat16, capability)
    shape = ((70,), 72, 136) if small else ((403,), 520, 776)
    tensors = moved(op.normals(*shape, torch.bfloat16), device)
    act = usual_act(op)
    eager = op.expected(tensors, act)
    truth = op.expected([t.double() for t in tensors], act)
    for config in listed[-1:] if small else listed:
        ours = launched(name, tensors, act, config)
        for number, values in enumerate(zip(ours, eager, truth, strict=True)):
            assert_two_times(*values, name=f"{name} {config} output {number}")


def test_nan_and_infinity_stay_in_their_rows_and_columns(device):
    """Infinity has its limit; eager's NaN for 0 of GELU and SiLU at -infinity is right as well."""
    op = OPS[0]
    m, k, n = (20, 24, 36) if device.type == "cpu" else (200, 96, 264)
    x, weight, bias = moved(op.normals((m,), k, n, torch.bfloat16), device)
    x[3, 2], x[7, 1] = torch.nan, torch.inf
    weight[5, 4] = torch.nan
    finite = torch.ones(m, n, dtype=torch.bool, device=device)
    finite[[3, 7]], finite[:, 5] = False, False
    up, down = weight[:, 1] > 0, weight[:, 1] < 0
    up[5] = down[5] = False
    for act in ("none", "gelu", "gelu_tanh", "silu", "relu"):
        with choice.using("triton"):
            (y,) = op.run([x, weight, bias], act)
        assert bool(y[finite].isfinite().all()), act
        assert bool(y[3].isnan().all() and y[:, 5].isnan().all()), act
        assert bool((y[7][up] == torch.inf).all()), act
        low = y[7][down]
        right = low == -torch.inf if act == "none" else (low == 0)
        if act not in ("none", "relu"):
            right |= low.isnan()
        assert bool(right.all()), act


def test_overflow_of_half_precision_becomes_infinity(device):
    op = OPS[0]
    x = torch.full((17, 32), 3e4, device=device, dtype=torch.float16)
    weight = torch.ones(24, 32, device=device, dtype=torch.float16)
    with choice.using("triton"):
        (y,) = op.run([x, weight, None], "relu")
    assert bool((y == torch.inf).all())


def gradients(call, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    second = torch.autograd.grad(y, leaves, dy)
    assert_equal(second, first)  # the second backward equals the first
    return [y.detach(), *first]


@pytest.mark.parametrize("name", ["gemm_act", "gemm_glu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_by_the_two_times_rule(name, dtype, device):
    op = next(op for op in OPS if op.name == name)
    if device.type == "cpu" and dtype != "bf16":
        pytest.skip("one dtype in the interpreter")
    shape = ((3, 5), 20, 36) if device.type == "cpu" else ((3, 87), 200, 328)
    tensors, act = moved(op.normals(*shape, DTYPES[dtype]), device), usual_act(op)
    with choice.using("triton"):
        ours = gradients(lambda *leaves: op.run(leaves, act)[0], tensors)
    eager = gradients(lambda *leaves: op.expected(leaves, act)[0], tensors)
    truth = gradients(lambda *leaves: op.expected(leaves, act)[0], [t.double() for t in tensors])
    for number, values in enumerate(zip(ours, eager, truth, strict=True)):
        assert_two_times(*values, name=f"{name} {number}")
