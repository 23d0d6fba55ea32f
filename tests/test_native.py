"""The compiled extension: when it is loaded, when refused and in which words, and its kernels."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tpkernels import native, ops
from tpkernels.build import record
from tpkernels.build.torch_install import find_torch
from tpkernels.errors import ConfigError, TPKernelsWarning
from tpkernels.testing import assert_two_times

ACTIVATIONS = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

built = pytest.mark.skipif(
    not native.status().available, reason=f"no extension: {native.status().reason}"
)


# --- when it is loaded ------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package directory of our own, with nothing built in it."""
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    monkeypatch.delenv("TPKERNELS_NATIVE", raising=False)
    native._load.cache_clear()
    native._warn.cache_clear()
    yield tmp_path
    native._load.cache_clear()
    native._warn.cache_clear()


def pretend_built(package: Path, **changes) -> None:
    record.extension_path(package).write_bytes(b"not a library")
    record.write(package, {"native": True, **record.target(find_torch()), **changes})


def refusal(package: Path) -> native.NativeStatus:
    with pytest.warns(TPKernelsWarning) as said:
        assert native.load() is None
    assert len(said) == 1
    status = native.status()
    assert not status.available
    assert status.reason in str(said[0].message)
    assert status.fix in str(said[0].message)
    assert "\n" not in str(said[0].message)
    return status


def test_not_built_names_the_command(package):
    assert refusal(package).reason == "it was not built"
    assert native.status().fix == record.BUILD_COMMAND


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.1.0"}, "torch 2.1.0"),
        ({"torch_cuda": "11.8"}, "CUDA 11.8"),
        ({"python": "cpython-38"}, "Python cpython-38"),
        ({"machine": "z80"}, "machine z80"),
    ],
    ids=str,
)
def test_built_for_another_is_not_loaded(package, changes, words):
    pretend_built(package, **changes)
    status = refusal(package)
    assert status.reason.startswith("rebuild it: ")
    assert words in status.reason
    assert status.fix == record.BUILD_COMMAND


def test_a_missing_library_says_rebuild(package):
    pretend_built(package)
    record.extension_path(package).unlink()
    assert "rebuild it" in refusal(package).reason


def test_built_without_native_code_keeps_the_reason(package):
    why = {"native": False, "reason": "no C++ compiler", "fix": "install g++"}
    record.write(package, why)
    assert "no C++ compiler" in refusal(package).reason
    assert native.status().fix == f"install g++, then: {record.BUILD_COMMAND}"


def test_an_unreadable_record_is_as_none(package):
    (package / record.RECORD_NAME).write_text("{")
    assert refusal(package).reason == "it was not built"


def test_switched_off_is_silent(package, monkeypatch):
    monkeypatch.setenv("TPKERNELS_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load() is None
        native.warn_if_missing()
    assert native.status().reason == "TPKERNELS_NATIVE=0"


def test_warns_once_in_one_line_and_without_importing_torch(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        from tpkernels import native
        native.PACKAGE = Path({str(tmp_path)!r})
        native.warn_if_missing()
        native.warn_if_missing()
        assert "torch" not in sys.modules
        native.load()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert record.BUILD_COMMAND in done.stderr


def test_find_torch_reads_what_torch_says():
    found = find_torch()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert (found.include_directories[0] / "ATen").is_dir()


# --- its kernels ------------------------------------------------------------------------------


@built
def test_build_info():
    status = native.status()
    info = status.build_info
    assert info["torch"] == torch.__version__
    assert info["cpu_isa"] == info["cpu_isas"][0]
    assert info["cpu_isas"][-1] == "baseline"
    assert "no CUDA kernels: " in status.reason or info["cuda"]
    assert json.dumps(info)


@built
def test_registering_switches_the_kernels():
    extension = native.load()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    extension.register_cpu_kernels()
    extension.register_cpu_kernels()
    assert has_kernel("tpkernels::gemm_act", "CPU")
    extension.deregister_cpu_kernels()
    extension.deregister_cpu_kernels()
    assert not has_kernel("tpkernels::gemm_act", "CPU")
    extension.register_cpu_kernels()
    assert has_kernel("tpkernels::gemm_act", "CPU")


@pytest.fixture
def cpu_kernels():
    """The ops as the extension serves them, whatever was asked for."""
    if not native.status().available:
        pytest.skip(f"no extension: {native.status().reason}")
    native.load().register_cpu_kernels()
    yield torch.ops.tpkernels
    if not ops.choice._registered:
        native.load().deregister_cpu_kernels()


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# K is small, so that the epilogue's error is not drowned in the GEMM's; N is around the block.
@pytest.mark.parametrize(("m", "k", "n"), [(1, 2, 3), (5, 3, 513), (70, 4, 1030)])
def test_against_float64(cpu_kernels, act, dtype, m, k, n):
    torch.manual_seed(m)
    function = ACTIVATIONS[act]
    x, w, u = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(n, k, dtype=dtype)
    b, c = normal(n, dtype=dtype), normal(n, dtype=dtype)
    g, h = normal(m, n, dtype=dtype), normal(m, n, dtype=dtype)
    w2, dy2, dy = normal(k, n, dtype=dtype), normal(m, k, dtype=dtype), normal(m, n, dtype=dtype)

    def glu(gate, up):
        return function(gate) * up

    def gradients(call, dy, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(call(*leaves), leaves, dy)

    cases = {
        "gemm_act": ((x, w, b), lambda x, w, b: (function(F.linear(x, w, b)),)),
        "gemm_act_aux": (
            (x, w, b),
            lambda x, w, b: (function(F.linear(x, w, b)), F.linear(x, w, b)),
        ),
        "act_grad": ((dy, g), lambda dy, g: gradients(function, dy, g)),
        "gemm_dact": ((dy2, w2, g), lambda dy, w, g: gradients(function, dy @ w, g)),
        "gemm_glu": (
            (x, w, u, b, c),
            lambda x, w, u, b, c: (glu(F.linear(x, w, b), F.linear(x, u, c)),),
        ),
        "gemm_glu_aux": (
            (x, w, u, b, c),
            lambda x, w, u, b, c: (
                glu(F.linear(x, w, b), F.linear(x, u, c)),
                F.linear(x, w, b),
                F.linear(x, u, c),
            ),
        ),
        "glu_grad": ((dy, g, h), lambda dy, g, h: gradients(glu, dy, g, h)),
        "gemm_dglu": ((dy2, w2, g, h), lambda dy, w, g, h: gradients(glu, dy @ w, g, h)),
    }
    for name, (inputs, call) in cases.items():
        before = [t.clone() for t in inputs]
        outputs = getattr(cpu_kernels, name)(*inputs, act)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        eager = call(*inputs)
        truth = call(*(t.double() for t in inputs))
        for i, (ours, theirs, exact) in enumerate(zip(outputs, eager, truth, strict=True)):
            assert ours.is_contiguous()
            assert ours.dtype is dtype
            assert_two_times(ours, theirs, exact, name=f"{name}[{i}]")
            assert all(ours.data_ptr() != t.data_ptr() for t in inputs)
        assert all(torch.equal(t, b) for t, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_float64_is_eager_s_to_a_few_units(cpu_kernels, act):
    # Eager is no better than we are in float64; csrc/tests has the truth, in long double.
    pre = torch.linspace(-4, 40, 2001, dtype=torch.float64)
    one = torch.ones_like(pre)
    y = cpu_kernels.gemm_act(pre[:, None], one[:1, None], None, act)[:, 0]
    torch.testing.assert_close(y, ACTIVATIONS[act](pre), rtol=4e-15, atol=1e-15)
    leaf = pre.clone().requires_grad_()
    ACTIVATIONS[act](leaf).sum().backward()
    slope = torch.zeros_like(pre) + leaf.grad
    torch.testing.assert_close(cpu_kernels.act_grad(one, pre, act), slope, rtol=4e-15, atol=2e-15)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "silu"])
def test_the_tails_are_exact_where_eager_cancels(cpu_kernels, act):
    # Far below 0 the result is tiny and 1 + erf(x) or 1 + tanh(x) has lost its digits.
    pre = torch.linspace(-12, 0, 1001)
    truth = ACTIVATIONS[act](pre.double())
    ours = cpu_kernels.gemm_act(pre[:, None], torch.ones(1, 1), None, act)[:, 0]
    exact = torch.where(pre < -5, cancellation_free(pre.double(), act), truth)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=1e-36)


def cancellation_free(x: torch.Tensor, act: str) -> torch.Tensor:
    if act == "gelu":
        return x * torch.special.erfc(-x / 2**0.5) / 2
    if act == "silu":
        return x / (1 + torch.exp(-x))
    u = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-2 * u))


def test_layouts_need_no_copies_of_the_caller(cpu_kernels):
    x, w, b = normal(6, 5, 8), normal(7, 8), normal(7)
    expected = F.gelu(F.linear(x, w, b))
    transposed_weight = w.t().contiguous().t()
    strided_x = torch.randn(6, 5, 16)[..., ::2]
    strided_x.copy_(x)
    for given, weight in (
        (x, transposed_weight),
        (strided_x, w),
        (x.transpose(0, 1).contiguous().transpose(0, 1), w),
    ):
        torch.testing.assert_close(cpu_kernels.gemm_act(given, weight, b, "gelu"), expected)
    dy = torch.ones(()).expand(6, 5, 7)
    pre = normal(5, 6, 7).transpose(0, 1)
    torch.testing.assert_close(
        cpu_kernels.act_grad(dy, pre, "silu"),
        cpu_kernels.act_grad(dy.contiguous(), pre.contiguous(), "silu"),
    )


@pytest.mark.parametrize("shape", [(7,), (0, 7), (2, 0, 7), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("n", [5, 0])
def test_empty_and_one_dimensional(cpu_kernels, shape, n):
    x, w, b = normal(*shape), normal(n, shape[-1]), normal(n)
    y = cpu_kernels.gemm_act(x, w, b, "gelu")
    assert y.shape == (*shape[:-1], n)
    torch.testing.assert_close(y, F.gelu(F.linear(x, w, b)))


def test_the_same_bits_on_any_number_of_threads(cpu_kernels):
    torch.manual_seed(0)
    # K = 1: the GEMM is exact on any number of threads, what may differ is the epilogue.
    x, w, b = normal(64, 1), normal(1500, 1), normal(1500)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(cpu_kernels.gemm_act_aux(x, w, b, "gelu"))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_errors_are_those_of_the_reference(cpu_kernels):
    x, w = torch.ones(3, 7), torch.ones(5, 7)
    for arguments, words in (
        ((x, w, None, "mish"), "act='mish' is not known; allowed: none, gelu"),
        ((x, torch.ones(5, 8), None, "gelu"), "x must be .* K=8"),
        ((x, w.double(), None, "gelu"), "weight is torch.float64 but x is torch.float32"),
        ((x, w, torch.ones(7), "gelu"), "bias must be .* N=5"),
        ((x.int(), w.int(), None, "gelu"), "allowed: float64"),
    ):
        with pytest.raises(ConfigError, match=words):
            cpu_kernels.gemm_act(*arguments)
