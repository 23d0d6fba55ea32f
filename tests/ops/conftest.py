"""The implementations of the local ops that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tpkernels import native
from tpkernels.ops import choice


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serve the local ops by each implementation in turn; skip one that is not built."""
    if request.param == "cpu" and native.load() is None:
        pytest.skip(f"the compiled kernels are not there: {native.status().reason}")
    before = os.environ.get("TPKERNELS_GEMM")
    os.environ["TPKERNELS_GEMM"] = request.param
    choice.apply()
    yield request.param
    if before is None:
        del os.environ["TPKERNELS_GEMM"]
    else:
        os.environ["TPKERNELS_GEMM"] = before
    choice.apply()
