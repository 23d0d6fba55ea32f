"""``VocabParallelEmbedding``: an embedding table whose rows are split over ranks.

Equivalent to ``F.embedding(ids, weight)``: a rank looks up the ids it holds, zero for the rest,
and one all-reduce adds the parts up. Source: arXiv:1909.08053.
"""

# V vocabulary, D embedding dimension, V_r rows on this rank

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.comm.agreement import InputCheck
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.comm.regions import reduce_from_tensor_model_parallel_region as reduce_from_region
from tpkernels.errors import UnsupportedModuleError
from tpkernels.modules.class_swap import swap_class
from tpkernels.modules.parameters import local_part, shard_parameter_, split_spec
from tpkernels.modules.style import SwapStyle
from tpkernels.shard_spec import chunk_sizes


class VocabParallelEmbedding(nn.Module):
    """An embedding with V_r of V rows on each rank.

    Args:
        num_embeddings: V, need not divide by the ranks.
        embedding_dim: D.
        padding_idx: as for ``nn.Embedding``: this row gets no gradient.
        group: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.
        device, dtype: as for ``nn.Embedding``.

    Input: integer ids of any shape, the same on all ranks -> [..., D], the same on all ranks.
    Forward: one all-reduce; backward: none. An id outside [0, V) raises ``IndexError`` on CPU
    and a device-side assertion on CUDA, as ``nn.Embedding`` does.
    """

    group: Group
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    check: InputCheck

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: GroupLike = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dense = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.group = resolve_group(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = dense.padding_idx
        self.weight = dense.weight
        self.check = InputCheck()
        self._split_parameters()

    @classmethod
    def shard_(cls, module: nn.Module, group: GroupLike, *, name: str = "embedding") -> None:
        """Turn an ``nn.Embedding`` into this, in place."""
        if not isinstance(module, nn.Embedding):
            raise UnsupportedModuleError(
                f"{name}: expected nn.Embedding, got {type(module).__name__}"
            )
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise UnsupportedModuleError(
                    f"{name}: nn.Embedding with {option}={getattr(module, option)!r} cannot be "
                    "split over the vocabulary. Fix: leave it out of the plan or unset the option"
                )
        swap_class(module, cls, group=resolve_group(group), check=InputCheck())
        module._split_parameters()  # type: ignore[operator]

    @classmethod
    def style(cls, **options: Any) -> SwapStyle:
        """A ``ParallelStyle``; options as for ``shard_``."""
        return SwapStyle(cls, cls.shard_, options)

    def _split_parameters(self) -> None:
        sizes = chunk_sizes(self.num_embeddings, self.group.size)
        spec = split_spec(self.weight.shape, 0, self.group, sizes)
        shard_parameter_(self, "weight", spec, self.group)

    def forward(self, input: Tensor) -> Tensor:
        self.check({"ids": input}, self.group, "VocabParallelEmbedding")
        weight = local_part(self.weight, self.group, "VocabParallelEmbedding.weight")
        if self.group.size == 1:
            return F.embedding(input, weight, self.padding_idx)
        self._check_range(input)
        sizes = chunk_sizes(self.num_embeddings, self.group.size)
        start, count = sum(sizes[: self.group.rank]), sizes[self.group.rank]
        held = (input >= start) & (input < start + count)
        if self.padding_idx is not None:
            lookup = held & (input != self.padding_idx)
        else:
            lookup = held
        if count == 0:
            part = weight.new_zeros((*input.shape, self.embedding_dim)) + weight.sum()
        else:
            local_ids = torch.where(held, input - start, 0)
            rows = F.embedding(local_ids, weight)
            if self.padding_idx is not None:  # its value counts, its gradient does not
                rows = torch.where((held & ~lookup)[..., None], rows.detach(), rows)
            part = torch.where(held[..., None], rows, 0)
        return reduce_from_region(part, self.group.name)

    def _check_range(self, ids: Tensor) -> None:
        outside = (ids < 0) | (ids >= self.num_embeddings)
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():
            if bool(outside.any()):
                first = int(ids[outside][0])
                raise IndexError(
                    f"id {first} is outside the vocabulary of {self.num_embeddings} rows"
                )
        else:
            torch._assert_async(~outside.any())

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{padding}, "
            f"rank {self.group.rank} of {self.group.size}"
        )
