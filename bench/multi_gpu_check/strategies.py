"""Every op by every strategy on every rank, forward and backward, without tolerance.

    strategies.py cuda|cpu [--quick]

Inputs are -1, 0 and 1, so that sums are exact in every dtype: a result that differs in one bit from
the dense layer is wrong. One rank is late on purpose, which may change nothing but time.
"""

# M rows, K in features, N out features, R ranks

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import checked, finish, integers, say, start, synchronize
from torch import Tensor

from tpkernels.comm.group import resolve_group
from tpkernels.errors import ConfigError
from tpkernels.overlap import (
    all_gather_gemm,
    column_gemm_act,
    gemm_all_reduce,
    gemm_reduce_scatter,
    sequence_sizes,
)

STRATEGIES = ("off", "chunked", "signaled")
SIZES = {"cuda": [(2048, 1024, 512), (1000, 1600, 264)], "cpu": [(48, 24, 16)]}  # M, N, K in all
LATE_SECONDS = {"cuda": 2.0, "cpu": 0.3}
CALLS = 3  # of each, with other data and rows: nothing of one call may be left for the next

Compared = Iterator[tuple[str, Tensor, Tensor]]


def main() -> int:
    """0 if every check passed on every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="one size")
    options = parser.parse_args()
    device = start(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = SIZES[options.device][: 1 if options.quick else None]
    results = []
    for strategy in STRATEGIES:
        os.environ["TPKERNELS_OVERLAP"] = strategy
        for op in (_all_reduce, _reduce_scatter, _all_gather, _column):
            for shape in sizes:
                check = partial(_exactly, op, shape, device, dtype)
                name = f"{strategy} {op.__name__.strip('_')} {'x'.join(map(str, shape))} {dtype}"
                results.append(checked(name, check, device))
        late = partial(_with_one_late, sizes[0], device, dtype)
        results.append(checked(f"{strategy} with a rank that is late", late, device))
    return finish(results, "strategies")


def _exactly(
    op: Callable[..., Compared],
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    try:
        for call in range(CALLS):
            for name, ours, expected in op(call, *shape, device, dtype):
                _same(f"call {call}: {name}", ours, expected)
    except ConfigError as refused:  # by name, and on every rank: that is no wrong number
        if "cannot serve" not in str(refused):
            raise
        say(f"  not served: {refused}")


def _same(name: str, ours: Tensor, expected: Tensor) -> None:
    if ours.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(ours.shape)}, expected {tuple(expected.shape)}")
    if not torch.equal(ours, expected.to(ours.dtype)):
        wrong = (ours != expected.to(ours.dtype)).nonzero()
        raise AssertionError(f"{name}: {len(wrong)} of {ours.numel()} differ, from {wrong[0]} on")


def _part(tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    return tensor.split(list(sizes), dim)[dist.get_rank()].clone().requires_grad_()


def _uneven(total: int) -> list[int]:
    """Parts of the summed features: the first rank has twice as many as the others."""
    world = dist.get_world_size()
    each = total // (world + 1)
    return [total - each * (world - 1)] + [each] * (world - 1)


def _all_reduce(
    call: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype
) -> Compared:
    rows = M + 7 * call
    whole = [
        integers(seed, *s, device=device, dtype=dtype) for seed, s in _shapes(call, rows, N, K)
    ]
    x, weight, bias, dy = whole
    own_x, own_weight = (_part(t, _uneven(K), 1) for t in (x, weight))
    y = gemm_all_reduce(own_x, own_weight, bias, resolve_group(None).name)
    yield "y", y.detach(), F.linear(x.float(), weight.float(), bias.float())
    dx, dweight = torch.autograd.grad(y, (own_x, own_weight), dy)
    yield "dx", dx, dy.float() @ own_weight.detach().float()
    yield "dweight", dweight, dy.float().t() @ own_x.detach().float()


def _reduce_scatter(
    call: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype
) -> Compared:
    rows = M + 7 * call
    x, weight, bias, dy = [
        integers(seed, *s, device=device, dtype=dtype) for seed, s in _shapes(call, rows, N, K)
    ]
    sizes = sequence_sizes(rows, dist.get_world_size())
    own_x, own_weight = (_part(t, _uneven(K), 1) for t in (x, weight))
    own_dy = _part(dy, sizes, 0).detach()
    y = gemm_reduce_scatter(own_x, own_weight, bias, resolve_group(None).name, dim=0, sizes=sizes)
    whole = F.linear(x.float(), weight.float(), bias.float())
    yield "y", y.detach(), _part(whole, sizes, 0).detach()
    dx, dweight = torch.autograd.grad(y, (own_x, own_weight), own_dy)
    yield "dx", dx, dy.float() @ own_weight.detach().float()
    yield "dweight", dweight, dy.float().t() @ own_x.detach().float()


def _all_gather(
    call: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype
) -> Compared:
    rows, world = M + 7 * call, dist.get_world_size()
    x, weight, bias, dy = [
        integers(seed, *s, device=device, dtype=dtype) for seed, s in _shapes(call, rows, N, K)
    ]
    sizes, columns = sequence_sizes(rows, world), sequence_sizes(N, world)
    own_x, own_weight = _part(x, sizes, 0), _part(weight, columns, 0)
    own_bias, own_dy = _part(bias, columns, 0), _part(dy, columns, 1).detach()
    name = resolve_group(None).name
    gathered, (y,) = all_gather_gemm(
        own_x, [own_weight], [own_bias], "none", name, dim=0, sizes=sizes
    )
    yield "gathered x", gathered.detach(), x.float()
    whole = F.linear(x.float(), own_weight.detach().float(), own_bias.detach().float())
    yield "y", y.detach(), whole
    dx, dweight = torch.autograd.grad(y, (own_x, own_weight), own_dy)
    yield "dx", dx, _part(dy.float() @ weight.float(), sizes, 0).detach()
    yield "dweight", dweight, own_dy.float().t() @ x.float()


def _column(
    call: int, M: int, N: int, K: int, device: torch.device, dtype: torch.dtype
) -> Compared:
    x, weight, bias, dy = [
        integers(seed, *s, device=device, dtype=dtype) for seed, s in _shapes(call, M, N, K)
    ]
    columns = sequence_sizes(N, dist.get_world_size())
    own_weight, own_bias = _part(weight, columns, 0), _part(bias, columns, 0)
    own_dy, x = _part(dy, columns, 1).detach(), x.requires_grad_()
    (y,) = column_gemm_act(x, [own_weight], [own_bias], "none", resolve_group(None).name)
    with torch.no_grad():
        yield "y", y, F.linear(x.float(), own_weight.float(), own_bias.float())
    dx, dweight = torch.autograd.grad(y, (x, own_weight), own_dy)
    yield "dx", dx, dy.float() @ weight.float()
    yield "dweight", dweight, own_dy.float().t() @ x.detach().float()


def _shapes(call: int, M: int, N: int, K: int) -> list[tuple[int, tuple[int, ...]]]:
    """Seed and shape of x, weight, bias and dy."""
    return [(call, (M, K)), (10 + call, (N, K)), (20 + call, (N,)), (30 + call, (M, N))]


def _with_one_late(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    """The last rank sleeps before one of its calls: the others wait, and nothing is wrong."""
    seconds = LATE_SECONDS[device.type]
    began = time.monotonic()
    for call in range(CALLS):
        if call == 1 and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(seconds)
        for name, ours, expected in _all_reduce(call, *shape, device, dtype):
            _same(f"call {call}: {name}", ours, expected)
    synchronize(device)
    spent = time.monotonic() - began
    if spent < seconds:
        raise AssertionError(f"{spent:.1f} s were enough though a rank slept for {seconds} s")
    say(f"  a rank was {seconds} s late: {spent:.1f} s in all")


if __name__ == "__main__":
    raise SystemExit(main())
