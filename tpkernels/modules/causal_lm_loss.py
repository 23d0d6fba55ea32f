"""The loss of Hugging Face's causal language models, computed from each rank's part of the logits.

``loss_function`` is handed the whole logits. Where they are exactly what the split head gathered,
their gradient is taken from the parts instead: the softmax of the whole vocabulary in fp32, the
largest activation of a small model, is then never made.
"""

# B sequences, S tokens, V vocabulary, V_r this rank's part

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.comm.group import Group
from tpkernels.modules.class_swap import set_attributes
from tpkernels.modules.cross_entropy import vocab_parallel_cross_entropy
from tpkernels.modules.linear import ColumnParallelLinear
from tpkernels.shard_spec import chunk_sizes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # fp64: its rounding to fp32 is kept


class VocabParallelLoss:
    """transformers' ``ForCausalLMLoss``, on parts of the logits where that is the same."""

    def __init__(self, whole: Callable[..., Tensor], group: Group) -> None:
        self.whole, self.group = whole, group

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of logits [B, S, V] whose next tokens are the labels [B, S].

        Equivalent to: ``F.cross_entropy(logits.float().view(-1, V), shifted labels)``, the mean
        over tokens that count, or their sum over ``num_items_in_batch``.
        """
        part = self._part(logits, vocab_size)
        if part is None:
            return self.whole(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            part.flatten(0, -2),
            shift_labels.reshape(-1).to(part.device),
            group=self.group,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch

    def _part(self, logits: Tensor, vocab_size: int) -> Tensor | None:
        """This rank's part of ``logits`` if nothing has happened to them since the gather."""
        part, version = getattr(logits, "tpkernels_part", (None, None))
        if part is None or version != logits._version or part.dtype not in _DTYPES:
            return None
        if logits.shape[-1] != vocab_size:
            return None
        held = chunk_sizes(vocab_size, self.group.size)[self.group.rank]
        return part if part.shape[-1] == held else None


def split_loss_(model: nn.Module, head: nn.Module, group: Group) -> None:
    """Let ``model.loss_function`` work on what its split output ``head`` brings, in place.

    Does nothing for a model without one, or with another loss than ``ForCausalLMLoss``.
    """
    known: Any = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    loss: Any = getattr(model, "loss_function", None)
    if loss is None or loss is not known or group.size == 1:
        return
    if isinstance(head, ColumnParallelLinear):
        set_attributes(model, _loss_function=VocabParallelLoss(loss, group))
        set_attributes(head, keeps_part=True)
