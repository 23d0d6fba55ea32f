"""Does a block compute the same on shards of the sequence? Shown on the user's own call.

A block may mix tokens outside its attention (a mean over the sequence, a convolution, a shift),
which no look at its modules tells. So one block of each class runs twice in its first forward,
on shards and on the whole sequence, and the results must agree up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tpkernels import envs
from tpkernels.comm.agreement import control_device
from tpkernels.comm.collectives import all_gather, all_gather_bytes
from tpkernels.errors import CommunicationError, UnsupportedModuleError
from tpkernels.modules.class_swap import original_class
from tpkernels.modules.sequence import SEQUENCE
from tpkernels.modules.sequence_region import FIX, SequenceRegion, in_backward, recorded

_ROUNDINGS = 16  # relative error of a whole result allowed, in units of its dtype's rounding


class SequenceProof:
    """The check of the blocks of one stack (``TPKERNELS_CHECK``: off, first, always)."""

    def __init__(self) -> None:
        self._proved: set[type] = set()

    @torch.compiler.disable
    def __call__(
        self,
        block: nn.Module,
        run: Callable[..., Any],
        region: SequenceRegion,
        sizes: list[int],
        x: Tensor,
        keyword: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Compare ``run``, the block's own forward, on this rank's shard ``x`` and on the whole.

        With noise added to x, so that tokens differ; without gradients, in evaluation mode, with
        nothing drawn and nothing written to a cache. The results are dropped. Collective.

        Raises:
            UnsupportedModuleError: on every rank, if they differ on any.
        """
        kind, mode = original_class(block), envs.check()
        if in_backward() or mode == "off":
            return
        if (kind in self._proved and mode != "always") or recorded() or _is_capturing(x):
            return
        args, kwargs = tuple(map(_without_cache, args)), dict(kwargs)
        kwargs = {key: _without_cache(value) for key, value in kwargs.items()}
        if any(map(_is_cache, (*args, *kwargs.values()))):
            return
        rank = region.group.rank
        whole = _varied(all_gather(x.detach(), sizes, SEQUENCE, region.group.name))
        part = whole.split(sizes, SEQUENCE)[rank].contiguous()
        calls = [
            ((each, *args[1:]), kwargs) if keyword is None else (args, kwargs | {keyword: each})
            for each in (whole, part)
        ]
        with _quietly(block, x.device):
            try:
                with region.shards.using(None):
                    expected = run(*calls[0][0], **calls[0][1])
            except CommunicationError:
                raise
            except Exception:  # so does the user's call, or it was for want of the cache
                return
            why: str | None
            try:
                with region.shards.using(sizes):
                    result = run(*calls[1][0], **calls[1][1])
                why = _difference(result, expected, sizes, rank, x)
            except CommunicationError:
                raise
            except Exception as error:  # whatever user code raises where tokens are missing
                why = f"on a shard it raises {type(error).__name__}: {error}"
        self._agree(why, kind, region)

    def _agree(self, why: str | None, kind: type, region: SequenceRegion) -> None:
        """Raise on all ranks if one has found a difference; ``why``: this rank's."""
        mine = torch.tensor([int(why is not None)], device=control_device(region.group))
        differ = all_gather_bytes(mine, region.group.name).flatten().tolist()
        if any(differ):
            ranks = [rank for rank, each in enumerate(differ) if each]
            raise UnsupportedModuleError(
                f"{kind.__name__} in {region.name} does not compute on shards of the sequence what "
                f"it computes on the whole (ranks {ranks} of the group; this is rank "
                f"{region.group.rank}{f': {why}' if why else ''}): something in it beside the "
                f"split attention reads other tokens. Fix: {FIX}"
            )
        self._proved.add(kind)


def _difference(result: Any, expected: Any, sizes: list[int], rank: int, x: Tensor) -> str | None:
    """How ``result`` differs from ``expected``, of whose first tensor it has this rank's tokens."""
    ours, truth = _tensors(result), _tensors(expected)
    if len(ours) != len(truth):
        return f"{len(ours)} tensors instead of {len(truth)}"
    start = sum(sizes[:rank])
    for index, (a, b) in enumerate(zip(ours, truth, strict=True)):
        if index == 0:
            b = b.narrow(SEQUENCE, start, sizes[rank])
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if a.numel() == 0 or not a.is_floating_point():
            if not torch.equal(a, b):
                return f"other values in output {index}"
            continue
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return "other values that are not finite"
        a, b = (torch.where(finite, each, 0).double() for each in (a, b))
        error, scale = float((a - b).norm()), float(b.norm())
        if error > _ROUNDINGS * _rounding(x) * scale:
            return f"a relative difference of {error / scale if scale else 1.0:.1e}"
    return None


def _varied(whole: Tensor) -> Tensor:
    """``whole`` with noise of its own size added, the same on every rank.

    So that tokens differ: of equal ones (a first batch of zeros) any mixture is the same.
    """
    generator = torch.Generator(whole.device).manual_seed(0)
    noise = torch.randn(whole.shape, generator=generator, device=whole.device, dtype=whole.dtype)
    size = whole.float().square().mean().sqrt().to(whole.dtype)
    return whole + noise * torch.where(size.isfinite() & (size > 0), size, torch.ones_like(size))


def _rounding(x: Tensor) -> float:
    """The unit of rounding of what is computed from ``x``."""
    device, dtypes = x.device.type, [x.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    unit = max(torch.finfo(dtype).eps for dtype in dtypes)
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        unit = max(unit, 2.0**-10)  # TF32 keeps ten bits of a factor
    return unit / 4 if unit > 1e-4 else unit  # errors of many short roundings average out


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _quietly(block: nn.Module, device: torch.device) -> Iterator[None]:
    """No gradients, evaluation mode, the random state as it was, no weights left cast."""
    modes = [(module, module.training) for module in block.modules()]
    cached = torch.is_autocast_cache_enabled()
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in modes:
            module.training = False
        torch.set_autocast_cache_enabled(False)  # a cast made here would know no gradient
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, training in modes:
            module.training = training


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _without_cache(value: Any) -> Any:
    """None for an empty cache, which then changes nothing."""
    return None if _is_cache(value) and not value.get_seq_length() else value


def _is_capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
