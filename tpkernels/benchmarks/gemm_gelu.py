"""Forward GEMM + GELU: `F.gelu(F.linear(x, w, b))` against its fused forms.

eager      F.gelu(F.linear(x, w, b)): a GEMM with bias, then a pass for the GELU
compile    torch.compile of it
cublaslt   torch._addmm_activation: the library's own epilogue; CUDA, tanh form
ours       tpkernels.ops.gemm_act by automatic choice, and each implementation asked for
"""

# M tokens, K d_model, N this rank's d_ff

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.benchmarks import variants as ways
from tpkernels.benchmarks.ceilings import Work
from tpkernels.benchmarks.gate import Truth, sample
from tpkernels.benchmarks.harness import Case, Inputs, Variant
from tpkernels.benchmarks.shapes import Shard
from tpkernels.ops import gemm_act

OP = "gemm_gelu"
ACTS = ("gelu_tanh", "gelu")  # of the measured GEMM, whatever the model's own is
_TRUTH_ROWS, _TRUTH_COLUMNS = 32, 4096


def case(
    shard: Shard, act: str, dtype: torch.dtype, device: torch.device, *, compile: bool = True
) -> Case:
    """One shape: all variants, eager first."""
    approximate = "tanh" if act == "gelu_tanh" else "none"

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    found = [Variant(ways.EAGER, lambda inputs: (plain(*inputs),))]
    if compile:
        fast = ways.compiled(plain)
        found.append(Variant(ways.COMPILE, lambda inputs: (fast(*inputs),)))
    found.append(Variant(ways.CUBLASLT, _cublaslt, cannot=_no_cublaslt(act, device)))
    found += ways.ours(
        ["gemm_act"],
        lambda inputs: (gemm_act(inputs[0], inputs[1], inputs[2], act),),
        device,
        dtype,
        (shard.m, shard.n, shard.k),
        act,
        True,
        make_inputs(replace(shard, m=1, n=1, k=1), dtype, device),
    )
    return Case(
        OP,
        f"{OP} {shard}",
        lambda: make_inputs(shard, dtype, device),
        found,
        lambda inputs: _truths(inputs, act),
        work(shard),
    )


def work(shard: Shard) -> Work:
    """One GEMM; unfused, the GELU reads and writes the result once more."""
    return Work(((shard.m, shard.n, shard.k),), 2 * shard.m * shard.n)


def make_inputs(shard: Shard, dtype: torch.dtype, device: torch.device) -> Inputs:
    """x [M, K], weight [N, K], bias [N]; normal, the results' variance about 1."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    weight = normal(shard.n, shard.k).mul_(max(shard.k, 1) ** -0.5)
    return normal(shard.m, shard.k), weight, normal(shard.n)


def _cublaslt(inputs: Inputs) -> tuple[Tensor]:
    x, weight, bias = inputs  # see tpkernels.ops.cublaslt for what it is relied on
    return (torch._addmm_activation(bias, x, weight.t(), use_gelu=True),)


def _no_cublaslt(act: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "needs CUDA"
    return None if act == "gelu_tanh" else f"its GELU is gelu_tanh, asked for is {act}"


def _truths(inputs: Inputs, act: str) -> list[Truth]:
    x, weight, bias = inputs
    rows = sample(x.shape[0], _TRUTH_ROWS, x.device)
    columns = sample(weight.shape[0], _TRUTH_COLUMNS, x.device)
    approximate = "tanh" if act == "gelu_tanh" else "none"
    pre = F.linear(x[rows].double(), weight[columns].double(), bias[columns].double())
    return [
        Truth("y", lambda y: y[rows][:, columns], F.gelu(pre, approximate=approximate)),
    ]
