"""Cross entropy on logits whose vocabulary is split over ranks; the whole row never exists.

Equivalent to ``F.cross_entropy(all_gather(logits).float(), target)``. Each rank brings its
maximum, then its sum of exponentials and the target's logit: three numbers a token on the wire
instead of V. Source: arXiv:1909.08053, section 3.
"""

# T tokens, V vocabulary, V_r this rank's part

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tpkernels.comm.collectives import all_gather_bytes, all_reduce, all_reduce_max
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import ConfigError
from tpkernels.library import define, rows
from tpkernels.shard_spec import chunk_sizes


def _forward(
    logits: Tensor, target: Tensor, start: int, vocab_size: int, smoothing: float, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, top, log of the sum of exp(logits - top)), each [T], of logits [T, V_r].

    In fp32 (fp64 for fp64). Everything is relative to the row's maximum ``top``, so that an
    offset common to a row costs no digits.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    floor = values.new_full((values.shape[0], 1), -torch.inf)
    top = all_reduce_max(torch.cat([values, floor], 1).amax(1), group_name)
    shifted = values - top[:, None]
    held = (target >= start) & (target < start + logits.shape[1])
    if logits.shape[1]:
        index = torch.where(held, target - start, 0)
        own = torch.where(held, shifted.gather(1, index[:, None]).squeeze(1), 0)
    else:
        own = torch.zeros_like(top)
    # A masked-out logit is -inf: without smoothing it has no part in the loss.
    everything = shifted.sum(1) if smoothing else torch.zeros_like(top)
    sums = torch.stack([shifted.exp().sum(1), own, everything])
    total, at_target, everything = all_reduce(sums, group_name)
    log_sum = total.log()
    loss = log_sum - (1 - smoothing) * at_target - smoothing / vocab_size * everything
    return loss, top, log_sum


def _fake(
    logits: Tensor, target: Tensor, start: int, vocab_size: int, smoothing: float, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    loss = logits.new_empty(logits.shape[:1], dtype=dtype)
    return loss, torch.empty_like(loss), torch.empty_like(loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        start: int,
        vocab_size: int,
        smoothing: float,
        group_name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, top, log_sum = _op(logits, target, start, vocab_size, smoothing, group_name)
        ctx.save_for_backward(logits, target, top, log_sum)
        ctx.start, ctx.vocab_size, ctx.smoothing = start, vocab_size, smoothing
        ctx.mark_non_differentiable(top, log_sum)
        return loss, top, log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        logits, target, top, log_sum = ctx.saved_tensors
        softmax = (logits.to(top.dtype) - top[:, None] - log_sum[:, None]).exp()
        columns = torch.arange(logits.shape[1], device=logits.device) + ctx.start
        one_hot = (target[:, None] == columns).to(softmax.dtype)
        d = softmax - (1 - ctx.smoothing) * one_hot - ctx.smoothing / ctx.vocab_size
        return ((d * grad[:, None]).to(logits.dtype), None, None, None, None, None)


def _autograd(
    logits: Tensor, target: Tensor, start: int, vocab_size: int, smoothing: float, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    args = (target, start, vocab_size, smoothing, group_name)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(logits, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return _op(logits, *args)


_op = define(
    "vocab_parallel_cross_entropy",
    "(Tensor logits, Tensor target, int start, int vocab_size, float smoothing, str group_name)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    autograd=_autograd,
    autocast=False,  # computed in fp32 whatever the logits are
)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: GroupLike = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """``F.cross_entropy`` of logits [..., V_r] whose vocabulary is split over ``group``.

    Args:
        logits: this rank's part, floating point.
        target: integer class ids [...], the same on all ranks.
        vocab_size: V of the whole, split as ``torch.chunk`` does (V need not divide by the
            ranks). None: the ranks tell each other how many columns they hold, in any split, by
            one small collective more, which the host waits for; torch.compile breaks its graph
            there, so ``fullgraph=True`` needs ``vocab_size``.
        ignore_index, label_smoothing, reduction: as for ``F.cross_entropy``
            (``"mean"`` over the tokens that count, ``"sum"``, ``"none"``).

    Returns:
        The loss in fp32 (fp64 for fp64 logits), the same on all ranks. Differentiable once.

    Raises:
        ConfigError: shapes, sizes or options that do not fit.
        IndexError: a target outside the vocabulary (CPU; a device-side assertion on CUDA).
    """
    group = resolve_group(group)
    _check(logits, target, label_smoothing, reduction)
    start, total = _place(logits, vocab_size, group)
    flat_target = target.reshape(-1)
    counts = flat_target != ignore_index
    outside = counts & ((flat_target < 0) | (flat_target >= total))
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool(outside.any()):
            raise IndexError(f"target {int(flat_target[outside][0])} is outside [0, {total})")
    else:
        torch._assert_async(~outside.any())
    safe_target = torch.where(counts, flat_target, 0)
    loss, _, _ = _op(rows(logits), safe_target, start, total, label_smoothing, group.name)
    loss = torch.where(counts, loss, 0)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / counts.sum() if reduction == "mean" else loss.sum()


def _place(logits: Tensor, vocab_size: int | None, group: Group) -> tuple[int, int]:
    if vocab_size is None:
        columns = logits.shape[-1]
        held = [columns] if group.size == 1 else _gathered(columns, logits.device, group.name)
        return sum(held[: group.rank]), sum(held)
    sizes = chunk_sizes(vocab_size, group.size)
    if sizes[group.rank] != logits.shape[-1]:
        raise ConfigError(
            f"vocab_size={vocab_size} over {group.size} ranks gives rank {group.rank} "
            f"{sizes[group.rank]} columns, but logits have {logits.shape[-1]}"
        )
    return sum(sizes[: group.rank]), vocab_size


@torch.compiler.disable(
    reason="vocab_parallel_cross_entropy without vocab_size asks the ranks how many columns they "
    "hold. Fix: pass vocab_size"
)
def _gathered(columns: int, device: torch.device, group_name: str) -> list[int]:
    """How many columns each rank holds."""
    return all_gather_bytes(torch.tensor([columns], device=device), group_name).flatten().tolist()


def _check(logits: Tensor, target: Tensor, label_smoothing: float, reduction: str) -> None:
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ConfigError(f"logits must be floating point [..., V_r], got {logits.dtype}")
    if target.shape != logits.shape[:-1] or target.is_floating_point():
        raise ConfigError(
            f"target must be integer ids of shape {tuple(logits.shape[:-1])}, got "
            f"{target.dtype} {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing={label_smoothing} must be between 0 and 1")
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r} is not known; allowed: mean, sum, none")
