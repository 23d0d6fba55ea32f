"""Every tuned tile configuration, compiled for GPUs that are not here: no spills, tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tpkernels.kernels import available

pytestmark = pytest.mark.skipif(
    not available.triton_status().available, reason=available.triton_status().reason
)
SIZE = 4096
ARCHITECTURES = ("sm_80", "sm_90")


@pytest.fixture(scope="module")
def compiled():
    """What `python -m tpkernels.kernels.compile_check` prints, a row a kernel."""
    # A process of its own: this one may run the same kernels in Triton's interpreter.
    command = [sys.executable, "-m", "tpkernels.kernels.compile_check", "--json", *ARCHITECTURES]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def name(row):
    return f"{row['architecture']} {row['op']} {row['dtype']} {row['config']} {row['sizes']}"


def gemms(compiled):
    """The kernels of large sizes that 16 divides, but for the one that waits."""
    compiled = [row for row in compiled if row["sizes"] == [SIZE] * 3]
    return [row for row in compiled if row["name"] != "_wait"]


def test_aot_compiles_every_configuration(compiled):
    import torch

    from tpkernels.kernels.config import configs

    expected = {
        (arch, op, str(dtype).removeprefix("torch."), str(config))
        for arch, capability in (("sm_80", (8, 0)), ("sm_90", (9, 0)))
        for op in ("gemm_act_aux", "gemm_dact_dbias", "gemm_glu_aux", "gemm_dglu")
        for dtype in (torch.bfloat16, torch.float32)
        for config in configs(op, dtype, capability)
    }
    found = {(r["architecture"], r["op"], r["dtype"], r["config"]) for r in compiled}
    assert expected <= found


def test_aot_spills_nothing_and_fits_shared_memory(compiled):
    assert [name(r) for r in gemms(compiled) if r["spilled_bytes"]] == []
    assert [name(r) for r in compiled if r["shared"] > r["shared_limit"]] == []
    assert [name(r) for r in gemms(compiled) if r["resident"] < r["blocks"]] == []


def test_aot_uses_tensor_cores(compiled):
    """wgmma for sm_90 tiles of 64 rows and more, mma.sync for the rest; none for fp32 as fp32."""
    for row in gemms(compiled):
        if row["dtype"] == "float32" and row["precision"] == "ieee":
            assert row["instructions"] == [] or row["instructions"] == ["tma"], name(row)
            continue
        rows = int(row["config"].split("x")[0])
        wanted = "wgmma" if row["architecture"] == "sm_90" and rows >= 64 else "mma.sync"
        assert wanted in row["instructions"], name(row)


def test_aot_moves_tiles_by_the_copy_engine_where_asked(compiled):
    for row in gemms(compiled):
        assert ("tma" in row["instructions"]) == row["config"].endswith("tma"), name(row)


def test_aot_counts_tiles_with_release_and_waits_with_acquire(compiled):
    for architecture in ARCHITECTURES:
        (gemm,) = (
            row
            for row in gemms(compiled)
            if (row["architecture"], row["op"]) == (architecture, "gemm_signaled")
        )
        wait = next(
            row for row in compiled if (row["architecture"], row["name"]) == (architecture, "_wait")
        )
        assert "release" in gemm["instructions"] and "acquire" in wait["instructions"]
        assert wait["shared"] <= 16  # so that it fits beside any other block


def test_aot_compiles_sizes_of_one_and_odd_sizes(compiled):
    """Triton takes an argument of 1 for a constant: another kernel, and other ways to fail."""
    from tpkernels.kernels.compile_check import EDGES

    found = {(r["op"], tuple(r["sizes"])) for r in compiled if r["architecture"] == "sm_90"}
    for op in ("gemm_act_aux", "gemm_dact_dbias", "gemm_glu_aux", "gemm_dglu", "gemm_signaled"):
        assert {(op, sizes) for sizes in EDGES} <= found
