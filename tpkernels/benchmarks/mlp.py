"""The whole MLP on one rank's shard, group of one: forward, and forward + backward.

    eager      F.linear, activation, F.linear (gated: act(gate) * up), and PyTorch's autograd
    compile    torch.compile of it
    ours       tpkernels.overlap.mlp.mlp by automatic choice, and each implementation asked for

Forward runs without autograd, as in inference; forward + backward gives the gradients of x and of
every parameter.
"""

# M tokens, K d_model, N this rank's d_ff

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.benchmarks import variants as ways
from tpkernels.benchmarks.ceilings import Work
from tpkernels.benchmarks.gate import Truth, sample
from tpkernels.benchmarks.harness import Case, Inputs, Variant
from tpkernels.benchmarks.shapes import Shard
from tpkernels.overlap.mlp import mlp
from tpkernels.reference.activation import activation

FORWARD, FORWARD_BACKWARD = "mlp_forward", "mlp_forward_backward"
_TRUTH_ROWS, _TRUTH_FEATURES = 32, 64

Network = Callable[..., Tensor]  # (x, w_up, b_up, w_gate, w_down, b_down) -> y


def case(
    op: str, shard: Shard, dtype: torch.dtype, device: torch.device, *, compile: bool = True
) -> Case:
    """One shape: all variants, eager first. `op` is FORWARD or FORWARD_BACKWARD."""
    run = forward_backward if op == FORWARD_BACKWARD else forward
    plain = _plain(shard.act)
    found = [Variant(ways.EAGER, lambda inputs: run(plain, inputs, shard))]
    if compile:
        fast = ways.compiled(plain)
        found.append(Variant(ways.COMPILE, lambda inputs: run(fast, inputs, shard)))
    found += ways.ours(
        local_ops(op, shard),
        lambda inputs: run(_ours(shard.act), inputs, shard),
        device,
        dtype,
        (shard.m, shard.n, shard.k),
        shard.act,
        shard.bias,
        make_inputs(replace(shard, m=1, n=1, k=1), dtype, device, grad=op == FORWARD_BACKWARD),
    )
    return Case(
        op,
        f"{op} {shard}",
        lambda: make_inputs(shard, dtype, device, grad=op == FORWARD_BACKWARD),
        found,
        lambda inputs: _truths(op, inputs, shard),
        work(op, shard),
    )


def local_ops(op: str, shard: Shard) -> list[str]:
    """Those that `tpkernels.overlap.mlp.mlp` calls."""
    first = "gemm_glu" if shard.gated else "gemm_act"
    if op == FORWARD:
        return [first]
    backward = "gemm_dglu" if shard.gated else "gemm_dact_dbias" if shard.bias else "gemm_dact"
    return [f"{first}_aux", backward]


def work(op: str, shard: Shard) -> Work:
    """The GEMMs, and what the unfused form moves beside them, in elements of [M, N].

    Forward: plain writes pre, reads it, writes h, where fused writes h: 2. Gated writes gate and
    up, reads gate, writes act(gate), reads both factors, writes h, where fused writes h: 6.
    With backward, fused writes pre too, and gate and up: 1 and 4 are left. Then dh is written;
    plain: read with pre to write dpre, which is read for the bias' gradient, where fused reads pre
    and writes dpre: 3 more. Gated: three passes that read two and write one, where fused reads
    gate and up and writes two: 1 + 9 - 4 = 6 more.
    """
    m, n, k = shard.m, shard.n, shard.k
    up, down = ((m, n, k),) * (2 if shard.gated else 1), ((m, k, n),)
    if op == FORWARD:
        return Work(up + down, (6 if shard.gated else 2) * m * n)
    # dh and dW_down of the second layer; dx and dW of each GEMM of the first
    backward = ((m, n, k), (k, n, m)) + ((m, k, n), (n, k, m)) * len(up)
    passes = 10 if shard.gated else 4 if shard.bias else 3
    return Work(up + down + backward, passes * m * n)


def make_inputs(shard: Shard, dtype: torch.dtype, device: torch.device, *, grad: bool) -> Inputs:
    """x, [dy,] w_up, [b_up,] [w_gate,] w_down, [b_down]; with `grad`, dy is there, and all others
    require a gradient."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        tensor = torch.randn(size, generator=generator, device=device, dtype=dtype)
        return tensor.mul_(max(fan_in, 1) ** -0.5).requires_grad_(grad)

    m, n, k = shard.m, shard.n, shard.k
    inputs = [normal(m, k)] + ([normal(m, k).requires_grad_(False)] if grad else [])
    inputs += [normal(n, k, fan_in=k)] + ([normal(n)] if shard.bias else [])
    inputs += [normal(n, k, fan_in=k)] if shard.gated else []
    return (*inputs, normal(k, n, fan_in=n), *([normal(k)] if shard.bias else []))


def _arguments(leaves: Sequence[Tensor], shard: Shard) -> list[Tensor | None]:
    """x, w_up, b_up, w_gate, w_down, b_down; None for what the MLP has not."""
    given = iter(leaves)
    has = (True, True, shard.bias, shard.gated, True, shard.bias)
    return [next(given) if there else None for there in has]


def forward(network: Network, inputs: Inputs, shard: Shard) -> tuple[Tensor, ...]:
    """(y,)"""
    with torch.no_grad():
        return (network(*_arguments(inputs, shard)),)


def forward_backward(network: Network, inputs: Inputs, shard: Shard) -> tuple[Tensor, ...]:
    """(y, dx, dw_up, [db_up,] [dw_gate,] dw_down, [db_down])"""
    x, dy, *parameters = inputs
    leaves = (x, *parameters)
    y = network(*_arguments(leaves, shard))
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def _plain(act: str) -> Network:
    def network(
        x: Tensor,
        w_up: Tensor,
        b_up: Tensor | None,
        w_gate: Tensor | None,
        w_down: Tensor,
        b_down: Tensor | None,
    ) -> Tensor:
        up = F.linear(x, w_up, b_up)
        h = activation(up, act) if w_gate is None else activation(F.linear(x, w_gate), act) * up
        return F.linear(h, w_down, b_down)

    return network


def _ours(act: str) -> Network:
    return lambda x, w_up, b_up, w_gate, w_down, b_down: mlp(
        x, w_up, b_up, w_down, b_down, act=act, w_gate=w_gate
    )


def _truths(op: str, inputs: Inputs, shard: Shard) -> list[Truth]:
    """y and dx on some rows, where they need all features; parameters' gradients on some features,
    where they need all rows."""
    network = _plain(shard.act)
    rows = sample(shard.m, _TRUTH_ROWS, inputs[0].device)
    if op == FORWARD:
        x, *parameters = (tensor.double() for tensor in inputs)
        (y,) = forward(network, (x[rows], *parameters), shard)
        return [Truth("y", lambda y: y[rows], y)]
    x, dy, *parameters = (tensor.detach().double() for tensor in inputs)
    x_rows = x[rows].requires_grad_()
    y = network(*_arguments((x_rows, *parameters), shard))
    (dx,) = torch.autograd.grad(y, x_rows, dy[rows])
    truths = [
        Truth("y", lambda y: y[rows], y.detach()),
        Truth("dx", lambda dx: dx[rows], dx),
    ]
    features = sample(shard.n, _TRUTH_FEATURES, x.device)
    names = [name for name, there in _names(shard) if there]
    picks = [_pick(name, features) for name in names]
    leaves = [pick(p).requires_grad_() for pick, p in zip(picks, parameters, strict=True)]
    grads = torch.autograd.grad(network(*_arguments((x, *leaves), shard)), leaves, dy)
    return truths + [
        Truth(f"d{name}", pick, grad) for name, pick, grad in zip(names, picks, grads, strict=True)
    ]


def _names(shard: Shard) -> list[tuple[str, bool]]:
    return [
        ("w_up", True),
        ("b_up", shard.bias),
        ("w_gate", shard.gated),
        ("w_down", True),
        ("b_down", shard.bias),
    ]


def _pick(name: str, features: Tensor) -> Callable[[Tensor], Tensor]:
    if name == "b_down":
        return lambda tensor: tensor.clone()
    if name == "w_down":
        return lambda tensor: tensor[:, features]
    return lambda tensor: tensor[features]
