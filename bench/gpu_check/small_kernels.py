"""Every Triton kernel on few small sizes, for compute-sanitizer; values are looked at too.

Odd sizes, by the tiles that serve those; and multiples of 16, by the largest tiles that are tuned
on this GPU, which move by its copy engine where it has one.

Run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``, so that each tensor ends where its allocation does.
"""

# M tokens, K in features, N out features

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from lifeline import tie_to_parent
from torch import Tensor

from tpkernels.kernels.act_grad import act_grad, glu_grad
from tpkernels.kernels.config import configs
from tpkernels.kernels.gemm_act import gemm_act, gemm_signaled
from tpkernels.kernels.gemm_dact import gemm_dact
from tpkernels.kernels.gemm_dglu import gemm_dglu
from tpkernels.kernels.gemm_glu import gemm_glu
from tpkernels.kernels.launch import capability_of
from tpkernels.kernels.row_chunks import RowChunks
from tpkernels.kernels.tile_counters import TileCounters

ODD = (67, 133, 71)  # M, N, K
ALIGNED = (144, 272, 144)  # more than one of the largest tiles each way, each with a tail
LIMIT = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # a wrong index, not a rounding, is looked for


def main(device: str = "cuda") -> int:
    """0 if all is as plain PyTorch has it, within :data:`LIMIT`."""
    torch.manual_seed(0)
    wrong = [
        name for dtype in LIMIT for sizes in (ODD, ALIGNED) for name in _wrong(dtype, sizes, device)
    ]
    for name in wrong:
        print(f"wrong: {name}")
    print(f"{'some kernels are wrong' if wrong else 'all kernels ran'}")
    return int(bool(wrong))


def _wrong(dtype: torch.dtype, sizes: tuple[int, int, int], device: str) -> list[str]:
    M, N, K = sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).mul_(0.5).to(dtype)

    def tiled(launcher: Any, op: str) -> Any:
        if sizes == ODD:
            return launcher
        largest = configs(op, dtype, capability_of(torch.device(device)))[0]
        print(f"{op} {dtype}: {largest}", flush=True)
        return partial(launcher, config=largest)

    act, dact = tiled(gemm_act, "gemm_act"), tiled(gemm_dact, "gemm_dact")
    act_glu, dglu = tiled(gemm_glu, "gemm_glu"), tiled(gemm_dglu, "gemm_dglu")
    x, weight, second, bias = draw(M, K), draw(N, K), draw(N, K), draw(N)
    dy, down, pre, up = draw(M, K), draw(K, N), draw(M, N), draw(M, N)
    leaf, gate = pre.float().requires_grad_(), pre.float().requires_grad_()
    up_leaf = up.float().requires_grad_()
    dh = dy.float() @ down.float()
    product = torch.nn.functional.silu(gate) * up_leaf
    (dpre,) = torch.autograd.grad(torch.nn.functional.gelu(leaf), leaf, dh)
    d_gate, d_up = torch.autograd.grad(product, (gate, up_leaf), dh)
    (element,) = torch.autograd.grad(torch.nn.functional.gelu(leaf), leaf, up.float())
    glu = torch.nn.functional.silu(gate) * up_leaf
    elements = torch.autograd.grad(glu, (gate, up_leaf), leaf.detach())
    z = x.float() @ weight.float().t() + bias.float()
    z_up = x.float() @ second.float().t()
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    pairs: dict[str, tuple[Any, Any]] = {
        "gemm_act": (act(x, weight, bias, "gelu"), gelu(z)),
        "gemm_act_aux": (act(x, weight, bias, "gelu", aux=True), (gelu(z), z)),
        "gemm_act, transposed": (act(x, weight.t().contiguous().t(), bias, "gelu"), gelu(z)),
        "gemm_dact": (dact(dy, down, pre, "gelu"), dpre),
        "gemm_dact_dbias": (dact(dy, down, pre, "gelu", dbias=True), (dpre, dpre.sum(0))),
        "gemm_glu": (act_glu(x, weight, second, bias, None, "silu"), silu(z) * z_up),
        "gemm_dglu": (dglu(dy, down, pre, up, "silu"), (d_gate, d_up)),
        "gemm_signaled": (_counted(x, weight), x.float() @ weight.float().t()),
        "act_grad": (act_grad(up, pre, "gelu"), element),
        "glu_grad": (glu_grad(pre, pre, up, "silu"), elements),
    }
    return [
        f"{name} {dtype} {M}x{N}x{K}"
        for name, (ours, truth) in pairs.items()
        if any(_error(o, t) > LIMIT[dtype] for o, t in zip(_all(ours), _all(truth), strict=True))
    ]


def _counted(x: Tensor, weight: Tensor) -> Tensor:
    """The GEMM that counts its tiles, from its second chunk on, each chunk waited for twice."""
    out, counters = x.new_empty(x.shape[0], weight.shape[0]), TileCounters(x.device)
    chunks = RowChunks(40, 1, 29)
    gemm_signaled(x, weight, out, counters, chunks, first_row=40)
    counts = counters.finished.tolist()
    for chunk, count in enumerate(counts):
        counters.wait_until(chunk, count)
        counters.wait_for_more(chunk, count)
    return out


def _all(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


if __name__ == "__main__":
    tie_to_parent()  # compute-sanitizer
    raise SystemExit(main(*sys.argv[1:]))
