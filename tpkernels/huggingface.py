"""What Hugging Face models need beside the split itself: ``save_pretrained`` writes whole weights.

transformers is never imported here; a model that has ``save_pretrained`` brings it along.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import nn

from tpkernels.checkpoint import full_state_dict


def wrap_save_pretrained(model: nn.Module) -> None:
    """Let ``model.save_pretrained(...)`` gather the weights (all ranks) and write on rank 0."""
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    @functools.wraps(original)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = full_state_dict(model, cpu=True)
        result = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            result = original(*args, **kwargs)
        if dist.is_initialized():
            dist.barrier()  # WAR: no rank may read the directory before rank 0 has written it
        return result

    model.__dict__["save_pretrained"] = save_pretrained


def restore_save_pretrained(model: nn.Module) -> None:
    """Give ``model`` its class's ``save_pretrained`` back."""
    model.__dict__.pop("save_pretrained", None)
