"""CUDA graphs whose collectives overlap: captured, replayed with other data, eager calls between.

Each strategy that the backend captures gives the bits of the eager call, in any order of replays.
"""

# M rows, K in features, N out features

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from ranks import checked, finish, integers, start
from torch import Tensor

from tpkernels.comm.group import resolve_group
from tpkernels.overlap import gemm_all_reduce

M, N, K = 1536, 1024, 512
STRATEGIES = ("off", "chunked", "signaled")


def main() -> int:
    """0 if every strategy's graphs are right on every rank."""
    device = start("cuda")
    results = []
    for strategy in STRATEGIES:
        os.environ["TPKERNELS_OVERLAP"] = strategy
        results.append(checked(f"{strategy}: two graphs", partial(_graphs, device), device))
    return finish(results, "graphs")


def _graphs(device: torch.device) -> None:
    weight = integers(1, N, K, device=device, dtype=torch.bfloat16)
    name = resolve_group(None).name
    inputs = [integers(2 + i, M >> i, K, device=device, dtype=torch.bfloat16) for i in range(2)]

    def call(x: Tensor) -> Tensor:
        return gemm_all_reduce(x, weight, None, name)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the counters and the communicators are made here
        for x in inputs:
            call(x)
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(x)
        graphs.append((graph, x, y))
    for turn in range(3):
        for graph, x, y in graphs if turn % 2 else graphs[::-1]:
            fresh = integers(10 * turn, *x.shape, device=device, dtype=torch.bfloat16)
            x.copy_(fresh)
            y.fill_(torch.nan)
            graph.replay()
            expected = dist.get_world_size() * (x.float() @ weight.float().t())
            if not torch.equal(y, expected.bfloat16()):
                raise AssertionError(f"replay of turn {turn} differs, {tuple(x.shape)}")
            if not torch.equal(call(x), expected.bfloat16()):
                raise AssertionError(f"eager call after the replay of turn {turn} differs")


if __name__ == "__main__":
    raise SystemExit(main())
