"""Where the tests of this folder run: on a GPU, and their bodies in small on CPU as well."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tpkernels.kernels import available

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["interpreted", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device that the Triton kernels serve: the GPU, or the CPU through the interpreter."""
    installed = available.triton_status()
    if not installed.available:
        pytest.skip(installed.reason)
    if request.param == "cuda":
        return torch.device("cuda", 0)
    if not available.interpreting():
        pytest.skip("TRITON_INTERPRET is not set: there is a GPU to test on")
    return torch.device("cpu")


@pytest.fixture(params=["cpu", CUDA])
def any_device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU or the CPU, for what needs no Triton."""
    return torch.device(request.param)


@pytest.fixture
def examples(device: torch.device) -> int:
    """Hypothesis examples of one test: 150 over the nine ops on a GPU, few where it is slow."""
    return int(os.environ.get("GPU_TESTS_EXAMPLES", 17)) if device.type == "cuda" else 2


@pytest.fixture
def tf32() -> Iterator[None]:
    """PyTorch may round float32 products to tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> None:
    """Skip where the GPU has less free memory than the mark `needs_gib` says."""
    gib = request.node.get_closest_marker("needs_gib").args[0]
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")
    yield
    torch.cuda.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_gib(n): free GPU memory, with the fixture memory")
