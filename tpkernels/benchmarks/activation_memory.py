"""What a rank keeps for the backward pass: the dense model, tensor-parallel, sequence-parallel.

    python -m tpkernels.benchmarks.activation_memory --nproc 2

A stack of pre-norm encoder layers with dropout on their outputs (none on attention weights, which
would make PyTorch's CPU kernel keep all scores). Bytes are counted, not estimated: the storages
that autograd holds after a forward. Rank 0 prints a markdown table; every rank keeps as much, to a
token and a head.
"""

# B sequences of S tokens, D width, L layers, R ranks

from __future__ import annotations

import copy
import os
import sys
import weakref
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels import launch
from tpkernels.benchmarks.rows import git_commit, host_cpu
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.parallelize import parallelize

VARIANTS = ("dense", "tensor parallel", "+ sequence parallel")
_MODULE = "tpkernels.benchmarks.activation_memory"


def saved_bytes(call: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that autograd holds when ``call()`` has returned.

    Those of ``parameters`` (of a split one, its part's) are not counted, whoever keeps a view of
    them. What ``call`` returns is kept until all is counted.
    """
    held = {_storage(_plain(parameter)) for parameter in parameters}
    kept: dict[int, tuple[Any, Tensor]] = {}  # the tensors, so that no address is given anew

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(_plain(tensor))
        kept[id(saved)] = saved.alive, saved.tensor
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = call()
    sizes = {
        _storage(tensor): tensor.untyped_storage().nbytes()
        for alive, tensor in kept.values()
        if alive()
    }
    del result
    return sum(size for storage, size in sizes.items() if storage not in held)


class _Saved:
    """What autograd holds in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.alive = weakref.ref(self)


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()  # one with its graph would keep that alive
    if isinstance(tensor, ChunkedTensor):
        return tensor.plain()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    batch: int = 2
    length: int = 512

    def model(self) -> nn.Module:
        """The layers, in training; weights alike on every rank."""
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            self.width,
            self.heads,
            4 * self.width,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        layer.self_attn.dropout = layer.dropout.p = 0.0  # within the split parts
        return nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False).train()


def measure(sizes: Sizes, group: Any = None) -> dict[str, int]:
    """Bytes that this rank keeps, by variant; collective over ``group`` (None: all ranks)."""
    dense, found = sizes.model(), {}
    x = torch.randn(sizes.batch, sizes.length, sizes.width)
    for variant in VARIANTS:
        model = copy.deepcopy(dense)
        if variant != "dense":
            parallelize(model, group, sequence_parallel=variant.startswith("+"))
        model(x)  # what only a first call does
        found[variant] = saved_bytes(lambda m=model: m(x), model.parameters())  # type: ignore[misc]
    return found


def table(sizes: Sizes, world: int, found: dict[str, int]) -> str:
    """The measurement as markdown, with its origin."""
    usual = vars(Sizes())
    given = "".join(f" --{k} {v}" for k, v in vars(sizes).items() if v != usual[k])
    unit = sizes.layers * sizes.batch * sizes.length * sizes.width * 4
    lines = [
        f"{sizes.layers} pre-norm encoder layers of d={sizes.width}, {sizes.heads} heads, batch "
        f"{sizes.batch} x {sizes.length} tokens, float32, {world} ranks, {host_cpu()}; torch "
        f"{torch.__version__}; commit {git_commit()[:12]}; {datetime.now(UTC):%Y-%m-%d}. "
        f"Reproduce: `python -m {_MODULE} --nproc {world}{given}`.",
        "",
        "| variant | kept by a rank, MB | / dense | in activations [B, S, d] a layer |",
        "|---|---|---|---|",
    ]
    for variant, size in found.items():
        share = size / found["dense"]
        lines.append(f"| {variant} | {size / 1e6:.1f} | {share:.3f} | {size / unit:.2f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Start the ranks, or as one of them measure; 0, or 1 where a rank failed."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--nproc", type=int, default=2, help="ranks of this machine")
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parsed = vars(parser.parse_args(arguments))
    nproc = parsed.pop("nproc")
    if not launch.inside_rank() and nproc > 1:
        return launch.start_ranks([_MODULE, *arguments], nproc)
    if launch.inside_rank():
        launch.prepare_rank()
        dist.init_process_group("gloo")
    try:
        sizes = Sizes(**parsed)
        found = measure(sizes)
        if os.environ.get("RANK", "0") == "0":
            print(table(sizes, nproc, found))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
