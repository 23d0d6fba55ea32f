"""``all_gather_gemm``: rows are gathered while the GEMMs that read them begin with one's own.

    compute: [own rows][rows of rank+1][rows of rank+2]
    comm:    [from rank+1][from rank+2]

Equivalent to: ``x = all_gather(x, dim); [act(F.linear(x, w, b)) for w, b in pairs]``.
Backward re-gathers x beside the dX GEMMs, and reduce-scatters dX beside the dW GEMMs.
"""

# S rows of the gathered dimension, s_r of them on rank r, K in features, N_i out features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels import instrument
from tpkernels.comm.collectives import all_gather, reduce_scatter
from tpkernels.errors import ConfigError
from tpkernels.library import check_gemm, define, needs_grad, rows
from tpkernels.ops.gemm_act import act_grad, gemm_act, gemm_act_aux
from tpkernels.overlap.sequence_parts import part_sizes, with_size
from tpkernels.reference.activation import check_activation

_NAME = "all_gather_gemm"


def _checked(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
) -> list[int]:
    """The rows of every rank, of arguments that fit each other."""
    check_activation(act)
    if not weights or len(weights) != len(biases):
        raise ConfigError(
            f"{_NAME}: needs one bias (or None) for each weight and at least one weight, got "
            f"{len(weights)} weights and {len(biases)} biases"
        )
    held = part_sizes(_NAME, x, dim, sizes, group_name)
    gathered = x.new_empty(with_size(x, dim, sum(held)), device="meta")
    for weight, bias in zip(weights, biases, strict=True):
        shape = x if dim % x.dim() != x.dim() - 1 else gathered.new_empty(gathered.shape)
        if shape is x:
            check_gemm(_NAME, x, weight, bias)
        elif weight.dim() != 2 or weight.shape[1] != gathered.shape[-1]:
            raise ConfigError(
                f"{_NAME}: weight must be [N, K] with K={gathered.shape[-1]}, the gathered "
                f"features, got {tuple(weight.shape)}"
            )
    return held


def _run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = _checked(x, weights, biases, act, group_name, dim, sizes)
    with instrument.operation(_NAME, layer, group_name, x):
        gathered = all_gather(x, held, dim, group_name)
        pairs = list(zip(weights, biases, strict=True))
        if not aux:
            return [gathered, *(gemm_act(gathered, w, b, act) for w, b in pairs)]
        outputs = [gemm_act_aux(gathered, w, b, act) for w, b in pairs]
        return [gathered, *(y for y, _ in outputs), *(pre for _, pre in outputs)]


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = _checked(x, weights, biases, act, group_name, dim, sizes)
    gathered = x.new_empty(with_size(x, dim, sum(held)))
    outputs = [gathered.new_empty((*gathered.shape[:-1], w.shape[0])) for w in weights]
    return [gathered, *outputs, *(torch.empty_like(y) for y in outputs if aux)]


# --- backward -------------------------------------------------------------------------------


def _backward_run(
    grads: list[Tensor],
    d_gathered: Tensor | None,
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    need_dx: bool,
    need_dw: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    held = part_sizes(_NAME, x, dim, sizes, group_name)
    with instrument.operation(f"{_NAME}.backward", layer, group_name, x):
        gathered = all_gather(x, held, dim, group_name) if any(need_dw) else x
        dx = x.new_empty(0)
        if need_dx:
            parts = [grad @ weight for grad, weight in zip(grads, weights, strict=True)]
            partial = torch.stack([*parts, *([] if d_gathered is None else [d_gathered])]).sum(0)
            dx = reduce_scatter(partial, held, dim, group_name)
        dws = [
            torch.mm(rows(grad).t(), rows(gathered)) if needed else x.new_empty(0)
            for grad, needed in zip(grads, need_dw, strict=True)
        ]
    return [dx, *dws]


def _backward_fake(
    grads: list[Tensor],
    d_gathered: Tensor | None,
    x: Tensor,
    weights: list[Tensor],
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    need_dx: bool,
    need_dw: list[bool],
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    contiguous = torch.contiguous_format
    return [
        torch.empty_like(x, memory_format=contiguous) if need_dx else x.new_empty(0),
        *(
            torch.empty_like(weight, memory_format=contiguous) if needed else x.new_empty(0)
            for weight, needed in zip(weights, need_dw, strict=True)
        ),
    ]


_all_gather_gemm_backward = define(
    "all_gather_gemm_backward",
    "(Tensor[] grads, Tensor? d_gathered, Tensor x, Tensor[] weights, str group_name, int dim, "
    "SymInt[]? sizes, bool need_dx, bool[] need_dw, int? chunks, str layer) -> Tensor[]",
    _backward_run,
    _backward_fake,
    autocast=False,
)


class _AllGatherGemm(torch.autograd.Function):
    """Saves this rank's rows of x, not the gathered ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        act: str,
        group_name: str,
        dim: int,
        sizes: list[int] | None,
        chunks: int | None,
        layer: str,
        *params: Tensor | None,
    ) -> Any:
        weights, biases = list(params[: len(params) // 2]), list(params[len(params) // 2 :])
        ctx.act, ctx.count = act, len(weights)
        ctx.where = (group_name, dim, sizes)
        ctx.options = (chunks, layer)
        ctx.set_materialize_grads(False)
        aux = act != "none"
        gathered, *results = _all_gather_gemm(
            x, weights, biases, act, aux, group_name, dim, sizes, chunks, layer
        )
        ctx.save_for_backward(x, *weights, *results[len(weights) :])  # type: ignore[arg-type]
        return (gathered, *results[: len(weights)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        count = ctx.count
        x, *rest = ctx.saved_tensors
        weights, pres = rest[:count], rest[count:]
        need_w = ctx.needs_input_grad[7 : 7 + count]
        need_b = ctx.needs_input_grad[7 + count :]
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        used = [i for i, dy in enumerate(dys) if dy is not None]
        if not used and d_gathered is None:  # the same on every rank: nothing downstream asked
            return (None, None, None, None, None, None, None, *dws, *dbs)
        dpres = [
            dy if ctx.act == "none" else act_grad(dy, pres[i], ctx.act)
            for i, dy in enumerate(dys)
            if dy is not None
        ]
        dx, *dw_used = _all_gather_gemm_backward(
            dpres,
            d_gathered,
            x,
            [weights[i] for i in used],
            *ctx.where,
            ctx.needs_input_grad[0],
            [need_w[i] for i in used],
            *ctx.options,
        )
        for i, dw, dpre in zip(used, dw_used, dpres, strict=True):
            dws[i] = dw if need_w[i] else None
            dbs[i] = rows(dpre).sum(0) if need_b[i] else None
        dx = dx if ctx.needs_input_grad[0] else None
        return (dx, None, None, None, None, None, None, *dws, *dbs)


def _autograd(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    act: str,
    aux: bool,
    group_name: str,
    dim: int,
    sizes: list[int] | None,
    chunks: int | None,
    layer: str,
) -> list[Tensor]:
    if needs_grad(x, *weights, *biases):
        _checked(x, weights, biases, act, group_name, dim, sizes)
        return list(
            _AllGatherGemm.apply(x, act, group_name, dim, sizes, chunks, layer, *weights, *biases)
        )
    with torch._C._AutoDispatchBelowAutograd():
        return _all_gather_gemm(x, weights, biases, act, aux, group_name, dim, sizes, chunks, layer)


_all_gather_gemm = define(
    "all_gather_gemm",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, str act, bool aux, str group_name, int dim, "
    "SymInt[]? sizes, int? chunks, str layer) -> Tensor[]",
    _run,
    _fake,
    autograd=_autograd,
)


def all_gather_gemm(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    act: str = "none",
    group_name: str = "",
    *,
    dim: int = -2,
    sizes: list[int] | None = None,
    chunks: int | None = None,
    layer: str = "",
) -> tuple[Tensor, list[Tensor]]:
    """(x gathered along ``dim``, ``[act(F.linear(x, w, b)) for w, b in zip(weights, biases)]``).

    Args:
        x: [..., s_r, ..., K], this rank's part of ``dim``.
        weights: [N_i, K] each, this rank's; biases: [N_i] or None each.
        act: as for ``gemm_act``.
        group_name: ``process_group.group_name``; ``""`` is the group of one.
        dim: the dimension that is gathered.
        sizes: s_r of every rank, the same list on all; None: all hold as many as this one.
        chunks: number of pieces each rank's rows are sent in; None: as the plan says.
        layer: the module that is served, for errors and traces.

    Returns:
        The gathered x [..., S, ..., K] and one [..., S, ..., N_i] a weight, contiguous.
        Differentiable once, both: backward reduce-scatters dX once, however many weights.

    Collective over the group, forward and backward.

    Raises:
        ConfigError: shapes, dtypes or sizes that do not fit.
        CommunicationError: a rank is missing or late; names layer, operation, group and rank.
    """
    biases = [None] * len(weights) if biases is None else biases
    gathered, *results = _all_gather_gemm(
        x, weights, biases, act, False, group_name, dim, sizes, chunks, layer
    )
    return gathered, results[: len(weights)]
