"""What the recogniser says, taken at its word: split a model over ranks in one process.

For every rank a copy of the model gets that rank's rows and columns of the layers of one
structure, and its ``width_attributes``. The layer that ends the structure (``out``, ``down``) then
gives a partial result in each copy, and their sum must be what the dense layer gives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tpkernels.recognise import AttentionStructure, Found, MLPStructure

Run = Callable[[nn.Module], object]


def dense_and_summed(model: nn.Module, found: Found, run: Run, ranks: int) -> tuple[Tensor, Tensor]:
    """The last layer's output in ``run(model)``: dense, and summed over ``ranks`` split copies."""
    structure = found.structure
    assert isinstance(structure, AttentionStructure | MLPStructure)
    last = structure.out if isinstance(structure, AttentionStructure) else structure.down
    path = f"{found.path}.{last}".lstrip(".")
    dense = _output_of(model, path, run)
    parts = []
    for rank in range(ranks):
        part = copy.deepcopy(model)
        module = part.get_submodule(found.path)
        if isinstance(structure, AttentionStructure):
            _split_attention(module, structure, rank, ranks)
        else:
            _split_mlp(module, structure, rank, ranks)
        bias = part.get_submodule(path).bias
        if rank > 0 and bias is not None:
            bias.data.zero_()
        parts.append(_output_of(part, path, run))
    return dense, sum(parts, torch.zeros(()))


def _output_of(model: nn.Module, path: str, run: Run) -> Tensor:
    outputs: list[Tensor] = []
    leaf = model.get_submodule(path)
    handle = leaf.register_forward_hook(lambda _m, _i, output: outputs.append(output))
    try:
        with torch.no_grad():
            run(model)
    finally:
        handle.remove()
    return outputs[0]


def _split_attention(module: nn.Module, s: AttentionStructure, rank: int, ranks: int) -> None:
    widths = {"q": s.num_heads * s.head_dim, "k": s.num_kv_heads * s.head_dim}
    widths["v"] = widths["k"]
    part = {role: slice(rank * w // ranks, (rank + 1) * w // ranks) for role, w in widths.items()}
    for role, path in (("q", s.q), ("k", s.k), ("v", s.v)):
        if path is not None:
            _keep_rows(module.get_submodule(path), torch.arange(widths[role])[part[role]])
    if s.qkv is not None:
        blocks, start = [], 0
        for role, rows in s.qkv_blocks:
            blocks.append(torch.arange(start, start + rows)[part[role]])
            start += rows
        _keep_rows(module.get_submodule(s.qkv), torch.cat(blocks))
    _keep_columns(module.get_submodule(s.out), part["q"])
    local = {
        "q_heads": s.num_heads // ranks,
        "kv_heads": s.num_kv_heads // ranks,
        "q_width": widths["q"] // ranks,
        "kv_width": widths["k"] // ranks,
        "kv_groups": s.num_heads // s.num_kv_heads,
    }
    core = module.get_submodule(s.core)
    for attribute, meaning in s.width_attributes.items():
        setattr(core, attribute, local[meaning])


def _split_mlp(module: nn.Module, s: MLPStructure, rank: int, ranks: int) -> None:
    down = module.get_submodule(s.down)
    hidden = down.weight.shape[1] if isinstance(down, nn.Linear) else down.weight.shape[0]
    part = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)
    _keep_columns(down, part)
    rows = torch.arange(hidden)[part]
    if s.kind == "gated_fused":
        rows = torch.cat([rows, hidden + rows])
    for path in (s.up, s.gate):
        if path is not None:
            _keep_rows(module.get_submodule(path), rows)


def _keep_rows(leaf: nn.Module, rows: Tensor) -> None:
    """Keep some output features; transformers' Conv1D has them in the second dimension."""
    linear = isinstance(leaf, nn.Linear)
    weight = leaf.weight[rows] if linear else leaf.weight[:, rows]
    leaf.weight = nn.Parameter(weight.detach().clone())
    if leaf.bias is not None:
        leaf.bias = nn.Parameter(leaf.bias[rows].detach().clone())
    if not linear:
        leaf.nf = len(rows)


def _keep_columns(leaf: nn.Module, columns: slice) -> None:
    weight = leaf.weight[:, columns] if isinstance(leaf, nn.Linear) else leaf.weight[columns]
    leaf.weight = nn.Parameter(weight.detach().clone())
