"""Modules on shards of the sequence: token-wise ones, and whole blocks of a model.

Norms, dropouts and residuals between the tensor-parallel regions see the tokens of this rank only
(arXiv:2205.05198): dropout masks differ by rank, gradients of weights are summed over ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.comm.rng import rank_stream
from tpkernels.errors import UnsupportedModuleError
from tpkernels.modules.arguments import ReplacedForward
from tpkernels.modules.class_swap import set_attributes, swap_class
from tpkernels.modules.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.modules.sequence_proof import SequenceProof
from tpkernels.modules.sequence_region import FIX, SequenceRegion
from tpkernels.modules.shard_gradients import summed_over_shards
from tpkernels.modules.style import SwapStyle

# A traced block would bind the parameters themselves, and their gradients would not be summed.
_EAGER = (
    "what a sequence-parallel block does around its own forward is not traced; its forward is. "
    "Fix: torch.compile without fullgraph=True"
)


class SequenceParallel(nn.Module):
    """Mixed into a token-wise module's class (a norm, a dropout): it runs on a shard.

    Equivalent to the module on the whole sequence, of which this rank has its tokens: gradients
    of its parameters are summed over the group, random numbers come from the rank's own stream.
    """

    sums_own_gradients = True
    _tp_group: Group

    @classmethod
    def shard_(cls, module: nn.Module, group: GroupLike, *, name: str = "module") -> None:
        """Let ``module`` run on shards, in place; parameters stay whole and keep their keys."""
        swap_class(module, cls, _tp_group=resolve_group(group), _tp_layer=name)

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    @torch.compiler.disable(recursive=False, reason=_EAGER)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with on_shards(self, self._tp_group, self.__dict__["_tp_layer"], args, kwargs):
            return super().forward(*args, **kwargs)


@contextlib.contextmanager
def on_shards(
    module: nn.Module, group: Group, layer: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Inside, ``module``'s forward, called with these arguments, sees shards of the sequence."""
    x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
    own: Any = contextlib.nullcontext()
    if module.training and x is not None:
        own = rank_stream(group, x.device)
    with own, summed_over_shards(module, group.name, layer):
        yield


@dataclass
class BlockPlace:
    """Where a block stands; one attribute, so that no name of the user's is taken."""

    region: SequenceRegion
    proof: SequenceProof
    name: str
    is_first: bool
    is_last: bool
    replaced: ReplacedForward


class SequenceParallelBlock(nn.Module):
    """Mixed into the class of a repeated block: inside, activations are sharded on the sequence.

    Its tensor-parallel modules gather and scatter; everything else in it works on this rank's
    tokens, with this rank's random stream, and the gradients of what it holds replicated are
    summed by one collective. Made by :meth:`shard_`.
    """

    _tp_block: BlockPlace

    @classmethod
    def shard_(
        cls,
        block: nn.Module,
        region: SequenceRegion,
        proof: SequenceProof,
        *,
        name: str,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Make ``block`` one of ``region``, in place; its MLPs and attentions are split before.

        ``is_first``: it is given whole sequences; ``is_last``: it gives them back. The modules that
        run the blocks should have ``region.begin`` and ``region.finish`` as hooks.
        """
        for module in block.modules():
            state = module.__dict__.get("_tp")
            if state is not None and hasattr(state, "sequence"):
                state.sequence = region.shards
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                set_attributes(module, sequence=region.shards)
        replaced = ReplacedForward.of(block)
        place = BlockPlace(region, proof, name, is_first, is_last, replaced)
        swap_class(block, cls, _tp_block=place)

    @torch.compiler.disable(recursive=False, reason=_EAGER)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        place, run = self._tp_block, super().forward
        region, keyword = place.region, None if args else next(iter(place.replaced.names), None)
        x = args[0] if args else kwargs.get(keyword)  # type: ignore[arg-type]
        if not isinstance(x, Tensor):
            raise UnsupportedModuleError(
                f"{place.name}: its first argument is a {type(x).__name__}, not the activation "
                f"whose sequence is sharded. Fix: {FIX}"
            )
        sizes = region.enter(x, place.name, place.is_first)
        if sizes is None:
            result = run(*args, **kwargs)
            region.passed(result)
            return result
        if place.is_first:
            x = region.scatter(x, sizes)
        if keyword is None:
            args = (x, *args[1:])
        else:
            kwargs = kwargs | {keyword: x}
        place.proof(self, run, region, sizes, x, keyword, args, kwargs)
        with region.shards.using(sizes), on_shards(self, region.group, place.name, (x,), {}):
            result = run(*args, **kwargs)
        return region.leave(result, sizes, place.name, place.is_last)
