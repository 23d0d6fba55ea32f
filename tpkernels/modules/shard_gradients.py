"""Gradients of replicated parameters used on shards of the sequence: summed over ranks, once.

A layer norm between tensor-parallel regions has the same weights on every rank and sees other
tokens on each, so that each rank has a part of its gradient. Forward is the identity; backward
adds up the parts of all parameters of a block by one collective.
Source: arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tpkernels import instrument
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.collectives import all_reduce_async
from tpkernels.errors import ConfigError
from tpkernels.library import define


def _run(grads: list[Tensor], group_name: str, layer: str) -> list[Tensor]:
    with instrument.operation("sum_over_shards.backward", layer, group_name, grads[0]):
        sums: list[Tensor | None] = [None] * len(grads)
        wires = [torch.promote_types(grad.dtype, torch.float32) for grad in grads]
        for wire in dict.fromkeys(wires):  # bf16 sums are added in fp32 and rounded once
            places = [i for i, each in enumerate(wires) if each is wire]
            flat = torch.cat([grads[i].reshape(-1).to(wire) for i in places])
            parts = all_reduce_async(flat, group_name).wait()
            sizes = [grads[i].numel() for i in places]
            for i, part in zip(places, parts.split(sizes), strict=True):
                sums[i] = part.view(grads[i].shape).to(grads[i].dtype, copy=True)
    return sums  # type: ignore[return-value]


def _fake(grads: list[Tensor], group_name: str, layer: str) -> list[Tensor]:
    return [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in grads]


_sum_over_shards = define(
    "sum_over_shards",
    "(Tensor[] grads, str group_name, str layer) -> Tensor[]",
    _run,
    _fake,
    autocast=False,
)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group_name: str, layer: str, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.where = group_name, layer
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [grad for grad in grads if grad is not None]  # the same ones on every rank
        summed = iter(_sum_over_shards(given, *ctx.where) if given else [])
        return None, None, *(None if grad is None else next(summed) for grad in grads)


@torch.compiler.disable
def sum_over_shards(parameters: list[Tensor], group_name: str, *, layer: str = "") -> list[Tensor]:
    """``parameters`` themselves; in backward their gradients are summed over the group.

    Collective in backward: one all-reduce for all of them, in fp32 (fp64 for fp64 gradients);
    every rank gets the same bits. ``layer``: whose parameters they are, for errors and traces.
    """
    if not group_name or not parameters:
        return parameters
    return list(_Identity.apply(group_name, layer, *parameters))


@contextlib.contextmanager
def summed_over_shards(module: nn.Module, group_name: str, layer: str = "") -> Iterator[None]:
    """Inside, gradients of what ``module`` holds replicated are sums over the group.

    Its modules see the outputs of :func:`sum_over_shards` in place of their parameters, so that
    whoever holds those (an optimizer, ``zero``, ``fully_shard``, DDP) gets the sums and knows of
    nothing. Parts of split parameters and a row-parallel bias, whose gradient is whole on every
    rank, are left alone.

    Raises:
        ConfigError: modules inside are sharded by themselves, so that their whole parameters are
            not there yet, or were shown meanwhile (then on leaving).
    """
    if not torch.is_grad_enabled() or not group_name:
        yield
        return
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, Tensor] = {}
    what = layer or type(module).__name__
    for owner, name, parameter in _replicated(module, group_name):
        if isinstance(parameter, (DTensor, ChunkedTensor)):
            raise _missed(what, owner, name)
        places.setdefault(id(parameter), []).append((owner, name))
        parameters[id(parameter)] = parameter
    summed = sum_over_shards(list(parameters.values()), group_name, layer=layer)
    shown = [
        (owner, name, parameter, seen)
        for (key, parameter), seen in zip(parameters.items(), summed, strict=True)
        for owner, name in places[key]
    ]
    for owner, name, _, seen in shown:
        owner._parameters[name] = seen  # type: ignore[assignment]
    try:
        yield
        for owner, name, _, seen in shown:
            if owner._parameters[name] is not seen:
                raise _missed(what, owner, name)
    finally:
        for owner, name, parameter, seen in shown:
            if owner._parameters[name] is seen:
                owner._parameters[name] = parameter  # type: ignore[assignment]


def _missed(what: str, owner: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"{what}: {name!r} of a {type(owner).__name__} is gathered by itself while the block runs, "
        "so that its gradient would not be summed over the shards of the sequence. Fix: shard "
        "whole blocks (units of zero(), modules given to fully_shard), not modules inside them"
    )


def _replicated(module: nn.Module, group_name: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(owner, name, parameter) of what is trained, not split over the group, and used on shards."""
    for child in module.children():
        if not getattr(type(child), "sums_own_gradients", False):
            yield from _replicated(child, group_name)
    whole = getattr(type(module), "whole_gradients", ())
    for name, parameter in module._parameters.items():
        if parameter is None or name in whole or not parameter.requires_grad:
            continue
        if not _is_split(parameter, group_name):
            yield module, name, parameter


@torch.compiler.disable
def _is_split(parameter: Tensor, group_name: str) -> bool:
    """Whether it is this rank's part of a split over the group."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return any(mesh.get_group(dim).group_name == group_name for dim in range(mesh.ndim))
    return isinstance(parameter, ChunkedTensor) and parameter.spec.dim is not None
