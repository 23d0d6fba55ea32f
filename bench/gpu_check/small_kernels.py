"""Every Triton kernel once, on sizes with tails, for compute-sanitizer; values are looked at too.

Run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``, so that each tensor ends where its allocation does.
"""

# M tokens, K in features, N out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.kernels.act_grad import act_grad, glu_grad
from tpkernels.kernels.gemm_act import gemm_act
from tpkernels.kernels.gemm_dact import gemm_dact
from tpkernels.kernels.gemm_dglu import gemm_dglu
from tpkernels.kernels.gemm_glu import gemm_glu

M, N, K = 67, 136, 72
LIMIT = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # a wrong index, not a rounding, is looked for


def main() -> int:
    """0 if all is as plain PyTorch has it, within :data:`LIMIT`."""
    torch.manual_seed(0)
    wrong = [name for dtype in LIMIT for name in _wrong(dtype)]
    for name in wrong:
        print(f"wrong: {name}")
    print(f"{'some kernels are wrong' if wrong else 'all kernels ran'}")
    return int(bool(wrong))


def _wrong(dtype: torch.dtype) -> list[str]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").mul_(0.5).to(dtype)

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
        "gemm_act": (gemm_act(x, weight, bias, "gelu"), gelu(z)),
        "gemm_act_aux": (gemm_act(x, weight, bias, "gelu", aux=True), (gelu(z), z)),
        "gemm_act, transposed": (gemm_act(x, weight.t().contiguous().t(), bias, "gelu"), gelu(z)),
        "gemm_dact": (gemm_dact(dy, down, pre, "gelu"), dpre),
        "gemm_dact_dbias": (gemm_dact(dy, down, pre, "gelu", dbias=True), (dpre, dpre.sum(0))),
        "gemm_glu": (gemm_glu(x, weight, second, bias, None, "silu"), silu(z) * z_up),
        "gemm_dglu": (gemm_dglu(dy, down, pre, up, "silu"), (d_gate, d_up)),
        "act_grad": (act_grad(up, pre, "gelu"), element),
        "glu_grad": (glu_grad(pre, pre, up, "silu"), elements),
    }
    return [
        f"{name} {dtype}"
        for name, (ours, truth) in pairs.items()
        if any(_error(o, t) > LIMIT[dtype] for o, t in zip(_all(ours), _all(truth), strict=True))
    ]


def _all(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


if __name__ == "__main__":
    raise SystemExit(main())
