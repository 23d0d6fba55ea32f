"""Models whose parameters are cut by hand as ZeRO cuts them: ranges of one flat buffer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.modules.parameters import local_tensor
from tpkernels.shard_spec import (
    ShardSpec,
    attach_spec,
    copied_spec,
    layout_from_flat_buffer,
    spec_from_dtensor,
    spec_of,
)

SHAPES = {
    "one": (1,),
    "two": (2,),
    "scalar": (),
    "matrix": (5, 7),
    "cube": (3, 4, 5),
    "empty": (0, 3),
    "last": (11,),
}


class OddShapes(nn.Module):
    """One parameter of every odd shape, a frozen one, a tied one, and a buffer."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            setattr(self, name, nn.Parameter(values))
        self.matrix.requires_grad_(False)
        self.tied = self.cube
        self.register_buffer("steps", torch.tensor(3 + seed))


def within_of(parameter, tp):
    """The split over ``tp`` that a parameter already has; copies of it on every rank if none."""
    if isinstance(parameter, DTensor):
        return spec_from_dtensor(parameter)
    spec = spec_of(parameter)
    if spec is None and tp is not None:
        return copied_spec(parameter.shape, tp.size(), tp.rank(), "tp", tp.group_name)
    return spec if spec is None or tp is None else replace(spec, group_name=tp.group_name)


def shard_flat_(module, group, tp=None):
    """Cut every parameter of ``module`` over ``group``, within its split over ``tp``; in place."""
    unique = list(dict.fromkeys(module.parameters()))
    locals_ = [local_tensor(parameter).detach() for parameter in unique]
    shard = -(-sum(local.numel() for local in locals_) // group.size())
    start, parts = 0, {}
    for parameter, local in zip(unique, locals_, strict=True):
        layout = layout_from_flat_buffer(start, local.numel(), shard, group.size())
        spec = ShardSpec(
            tuple(local.shape),
            None,
            layout,
            group.rank(),
            "dp_shard",
            within_of(parameter, tp),
            str(group.group_name),
        )
        data = ChunkedTensor.wrap(spec.take(local), spec)
        parts[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        attach_spec(parts[parameter], spec)
        start += local.numel()
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = parts[parameter]
    return module
