"""ZeRO stage 3 on one GPU: trains as plain PyTorch, and its time beside FSDP2's and plain's.

A world of one rank: what is timed is the cost of gathering, freeing and hooks, not of a wire.
"""

# D width, L blocks, T tokens

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from lifeline import tie_to_parent
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tpkernels as tpk
from tpkernels.zero import ZeroConfig

SIZES = {"cuda": (1024, 12, 4096), "cpu": (32, 3, 16)}  # D, L, T
REPEATS = {"cuda": 15, "cpu": 2}
LIMIT = 1e-2  # of the loss after 3 steps in bf16: a wrong weight, not a rounding, is looked for


class Block(nn.Module):
    """Norm and a gated MLP: 12 D^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


def main(device: str = "cuda") -> int:
    """0 if losses and gradients are as plain PyTorch has them, within :data:`LIMIT`."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    width, blocks, tokens = SIZES[device]
    x = torch.randn(tokens, width, device=device, generator=torch.Generator(device).manual_seed(1))
    unit = 2 * sum(p.numel() for p in Block(width).parameters())  # bytes, gathered in bf16
    steps: dict[str, Callable[[], Tensor]] = {"plain": _plain(width, blocks, device, x)}
    for ahead in (0, 2):
        steps[f"zero stage 3, {ahead} units ahead"] = _ours(width, blocks, device, x, ahead * unit)
    steps["zero stage 3, optimizer on the CPU"] = _ours(
        width, blocks, device, x, 2 * unit, offload="cpu"
    )
    steps["fsdp2"] = _fsdp2(width, blocks, device, x)
    losses = {name: [float(step()) for _ in range(3)] for name, step in steps.items()}
    wrong = []
    for name, found in losses.items():
        error = max(abs(a - b) / abs(b) for a, b in zip(found, losses["plain"], strict=True))
        print(f"{name}: losses {', '.join(f'{loss:.5f}' for loss in found)}, off by {error:.1e}")
        if not error <= LIMIT:
            wrong.append(name)
    medians = _timed(steps, device)
    for name, seconds in medians.items():
        print(f"{name}: {seconds * 1e3:.3f} ms a step, {seconds / medians['plain']:.3f} of plain")
    print(f"wrong: {', '.join(wrong)}" if wrong else _summary(medians))
    dist.destroy_process_group()
    return int(bool(wrong))


def _summary(medians: dict[str, float]) -> str:
    ours = min(value for name, value in medians.items() if "ahead" in name)
    return f"trains as plain; {ours / medians['fsdp2']:.3f} of fsdp2's time, one rank"


def _model(width: int, blocks: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks))).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plain(width: int, blocks: int, device: str, x: Tensor) -> Callable[[], Tensor]:
    """Master weights in fp32, compute in bf16 by autocast."""
    model = _model(width, blocks, device)
    inner = _step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), x)

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return inner()

    return step


def _ours(
    width: int, blocks: int, device: str, x: Tensor, prefetch: int, offload: str = "none"
) -> Callable[[], Tensor]:
    model = _model(width, blocks, device)
    config = ZeroConfig(
        prefetch_bytes=prefetch, units=[Block], mp_policy="bf16", offload_optimizer=offload
    )
    manager = tpk.zero(model, config=config)
    return _step(model, manager.optimizer(torch.optim.AdamW, lr=1e-3), x)


def _fsdp2(width: int, blocks: int, device: str, x: Tensor) -> Callable[[], Tensor]:
    model = _model(width, blocks, device)
    mesh = dist.init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), x)


def _timed(steps: dict[str, Callable[[], Tensor]], device: str) -> dict[str, float]:
    """Medians in seconds, the variants one after the other in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS[device]):
        for name, step in steps.items():
            _synchronize(device)
            begin = time.perf_counter()
            step()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    tie_to_parent()
    raise SystemExit(main(*sys.argv[1:]))
