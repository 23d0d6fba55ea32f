"""What Hugging Face models need beside the split itself: ``save_pretrained`` writes whole weights.

transformers is never imported here; a model that has ``save_pretrained`` brings it along.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import nn

from tpkernels.checkpoint import (
    data_group_of,
    full_state_dict,
    group_of,
    is_first_rank,
    sharing_meshes,
)


def wrap_save_pretrained(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a model, and of models in it, gather on all ranks, write on one.

    Collective over the ranks that share the model (all dimensions of its mesh).
    """
    for module in model.modules():
        if hasattr(module, "save_pretrained"):
            # A partial, not a closure: a copy of the model gets one that saves the copy.
            module.__dict__["save_pretrained"] = functools.partial(_save_pretrained, module)


def _save_pretrained(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    group, result = group_of(module) or data_group_of(module), None
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state_dict(module, cpu=True, rank0_only=True)
    if is_first_rank(group):
        # transformers lets global rank 0 alone write; it may be in another group.
        module.__dict__["should_save_on_this_rank"] = bool
        try:
            result = type(module).save_pretrained(module, *args, **kwargs)  # type: ignore[attr-defined,operator]
        finally:
            del module.__dict__["should_save_on_this_rank"]
    for each in sharing_meshes(group):
        dist.barrier(each)  # WAR: no rank may read the directory before it has been written
    return result


def restore_save_pretrained(model: nn.Module) -> None:
    """Give ``model``, and models in it, their class's ``save_pretrained`` back."""
    for module in model.modules():
        saved = module.__dict__.get("save_pretrained")
        if isinstance(saved, functools.partial) and saved.func is _save_pretrained:
            del module.__dict__["save_pretrained"]
