"""The ``fused`` strategy on CPU: a GEMM of few rows and its all-reduce in one native call.

    rank 0:  [x w^T -> own slot][publish][wait][sum of all slots + bias -> y]
    rank 1:  [x w^T -> own slot][publish][wait][sum of all slots + bias -> y]

The kernel writes its partial sums, in fp32, into memory that all ranks of the group read: they are
neither copied nor rounded before they are summed, in rank order. ``mlp_fused`` has the MLP's first
half in the same call. Equivalent to the ops without the suffix.
"""

# M rows (tokens), N columns of the output, K_r this rank's part of the summed dimension

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpkernels import envs, native
from tpkernels.comm.direct import has_peers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NATIVE: Any = native.load()
_MOST_COLUMNS = 0 if _NATIVE is None else _NATIVE.PeerMemory.slot_bytes // 4  # of fp32 sums


@lru_cache
def most_rows(dtype: torch.dtype) -> int:
    """Rows up to which one native call is measured to be faster; 0 where nothing is known."""
    return 0 if _NATIVE is None else _NATIVE.decode_rows(str(dtype).removeprefix("torch."))


def rows_served(device: torch.device, dtype: torch.dtype, group_name: str) -> int:
    """Up to how many rows automatic choice takes the fused ops there, for a report; 0: never."""
    return most_rows(dtype) if device.type == "cpu" and has_peers(group_name) else 0


def refusal(
    x: Tensor,
    weights: Sequence[Tensor | None],
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the fused ops cannot serve ``x`` [..., K] on the group, or None if they can.

    The same on every rank: nothing is looked at in which ranks may differ.
    """
    if _NATIVE is None:
        return f"the compiled extension is off: {native.status().reason}"
    if not x.is_cpu:
        return f"its kernels are for CPU tensors, this one is on {x.device}"
    if x.dtype not in DTYPES:
        return f"its kernels have no {x.dtype}"
    if reduce_dtype not in (None, x.dtype, torch.float32):
        return f"it sums in float32, not in {reduce_dtype}"
    if not all(weight is None or weight.stride(-1) == 1 for weight in weights):
        return "its kernels read weights by rows, these are transposed"
    columns = next(weight.shape[0] for weight in reversed(weights) if weight is not None)
    if columns > _MOST_COLUMNS:
        return f"a row of {columns} sums is more than the {_MOST_COLUMNS} that ranks share"
    if not has_peers(group_name):
        return "the ranks share no memory: the group's backend is not tpshm, or it spans hosts"
    return None


def chosen(
    x: Tensor,
    weights: Sequence[Tensor | None],
    group_name: str,
    reduce_dtype: torch.dtype | None = None,
) -> bool:
    """Whether the plan for ``x`` [..., K_r] on the group is ``fused``, at little expense."""
    if not group_name or not x.is_cpu or x.dim() == 0:
        return False
    asked = envs.overlap()
    if asked == "auto":
        few = 0 < x.numel() <= most_rows(x.dtype) * x.shape[-1]
    else:
        few = asked == "fused"
    return few and refusal(x, weights, group_name, reduce_dtype) is None


def gemm_all_reduce_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str
) -> Tensor:
    """``gemm_all_reduce`` in one native call; no gradient, operands as there."""
    return torch.ops.tpkernels.gemm_all_reduce_fused(x, weight, bias, group_name)


def mlp_fused(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    act: str,
    group_name: str,
) -> Tensor:
    """``mlp`` in one native call; no gradient, operands as there."""
    return torch.ops.tpkernels.mlp_fused(
        x, w_up, b_up, w_gate, b_gate, w_down, b_down, act, group_name
    )


def _fake_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_mlp(
    x: Tensor,
    w_up: Tensor,
    b_up: Any,
    w_gate: Any,
    b_gate: Any,
    w_down: Tensor,
    b_down: Any,
    act: str,
    group_name: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], w_down.shape[0]))


if _NATIVE is not None:
    torch.library.register_fake("tpkernels::gemm_all_reduce_fused", _fake_gemm)
    torch.library.register_fake("tpkernels::mlp_fused", _fake_mlp)
