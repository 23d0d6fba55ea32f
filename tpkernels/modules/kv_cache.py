"""What a key-value cache must offer, and the plainest one that does."""

# B batch, G_r key-value heads on this rank, T keys, D head dimension

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class KVCacheLike(Protocol):
    """What ``cache`` must offer; Hugging Face's ``Cache`` classes do."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...

    def get_seq_length(self, layer_idx: int) -> int: ...


class KVCache:
    """The plainest cache: keeps each layer's keys and values [B, G_r, T, D] and appends."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Append along T and return everything held for ``layer_idx``."""
        if layer_idx in self._held:
            old_key, old_value = self._held[layer_idx]
            key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        self._held[layer_idx] = key, value
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions held for ``layer_idx``."""
        return self._held[layer_idx][0].shape[2] if layer_idx in self._held else 0
