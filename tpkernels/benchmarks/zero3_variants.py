"""The ways to train one model over data-parallel ranks, behind one interface.

compute             the whole model on each rank, no communication
ddp                 DistributedDataParallel
fsdp2               fully_shard of each unit and of the root
fsdp2 prefetch=2    the same, two units ahead by set_modules_to_{forward,backward}_prefetch
deepspeed           ZeRO-3 with overlap_comm and DeepSpeed's defaults, where it is installed
deepspeed regather  the same, told to free each unit after use as the others do
ours prefetch=B     tpkernels.zero(stage=3, prefetch_bytes=B, units=[Unit])
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tpkernels.benchmarks import zero3_limits
from tpkernels.benchmarks.zero3_limits import Traffic, sharded
from tpkernels.benchmarks.zero3_model import ModelShape, Transformer, Unit, make_model, sizes
from tpkernels.modules.parameters import gather_gradient

COMPUTE, DDP, FSDP2, FSDP2_PREFETCH = "compute", "ddp", "fsdp2", "fsdp2 prefetch=2"
DEEPSPEED, DEEPSPEED_REGATHER, OURS = "deepspeed", "deepspeed regather", "ours"
BASELINES = (COMPUTE, DDP, FSDP2, FSDP2_PREFETCH, DEEPSPEED, DEEPSPEED_REGATHER)
_AHEAD = 2  # units that `fsdp2 prefetch=2` gathers ahead
_LEARNING_RATE = 1e-2  # weights change between steps, by little


class NotInstalled(RuntimeError):
    """A variant that this environment cannot run."""


@dataclass(frozen=True)
class Plan:
    """Which variant, and how its model is cut into units.

    Attributes:
        kind: one of BASELINES, or OURS.
        prefetch_bytes: of OURS; `label` is how the user wrote it.
    """

    kind: str
    blocks_per_unit: int = 1
    prefetch_bytes: int | None = None
    label: str = ""

    @property
    def name(self) -> str:
        if self.kind != OURS:
            return self.kind
        units = f" blocks={self.blocks_per_unit}" if self.blocks_per_unit > 1 else ""
        return f"{OURS} prefetch={self.label}{units}"


class Trained:
    """A model that takes training steps.

    Attributes:
        model: called as `model(x, target)`, gives the loss.
        traffic: what its schedule must send at the least.
    """

    def __init__(
        self,
        model: Callable[..., Tensor],
        module: nn.Module,
        traffic: Traffic,
        optimizer: Any = None,
    ) -> None:
        self.model, self.module, self.traffic = model, module, traffic
        self.optimizer: Any = optimizer or torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE)

    def backward(self, loss: Tensor) -> None:
        """Until this rank's gradients are reduced."""
        loss.backward()

    def update(self) -> None:
        """Change the weights, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Each parameter's, whole and averaged over the ranks, in the model's order; collective."""
        return [_there(parameter) for parameter in self.module.parameters()]

    def stats(self) -> Mapping[str, Any] | None:
        """Counters of ours, since it was made."""
        return None


class _Alone(Trained):
    """Compute alone: its gradients are averaged for the check, not in a step."""

    def gradients(self) -> list[Tensor]:
        found = [gradient.clone() for gradient in super().gradients()]
        for gradient in found:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        return found


class _FSDP2(Trained):
    def gradients(self) -> list[Tensor]:
        return [gradient.full_tensor() for gradient in super().gradients()]  # type: ignore[attr-defined]


class _DeepSpeed(Trained):
    """Its engine is the model, and the optimizer."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_grad  # type: ignore[import-not-found]

        return [safe_get_full_grad(parameter) for parameter in self.module.parameters()]


class _Ours(Trained):
    def __init__(self, manager: Any, module: nn.Module, traffic: Traffic) -> None:
        optimizer = manager.optimizer(torch.optim.SGD, lr=_LEARNING_RATE)
        super().__init__(module, module, traffic, optimizer)
        self.manager = manager

    def gradients(self) -> list[Tensor]:
        found = [gather_gradient(parameter, None) for parameter in self.module.parameters()]
        if any(each is None for each in found):
            raise RuntimeError("a parameter has no gradient after backward")
        return found  # type: ignore[return-value]

    def stats(self) -> Mapping[str, Any]:
        return dict(self.manager.stats())


def build(plan: Plan, shape: ModelShape, mesh: DeviceMesh) -> Trained:
    """The variant, with the same weights as every other; collective.

    Raises:
        NotInstalled: what it needs is not here.
    """
    module = make_model(shape, plan.blocks_per_unit)
    cut, ranks = sizes(shape, plan.blocks_per_unit), mesh.size()
    if plan.kind == COMPUTE:
        return _Alone(module, module, Traffic())
    if plan.kind == DDP:
        wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        return Trained(wrapped, module, zero3_limits.ddp(sizes(shape).parameters, ranks))
    if plan.kind in (FSDP2, FSDP2_PREFETCH):
        ahead = _AHEAD if plan.kind == FSDP2_PREFETCH else 0
        traffic = sharded(cut.units, cut.root, ranks, gather_root_backward=False)
        return _FSDP2(module, _fully_shard(module, mesh, ahead), traffic)
    if plan.kind in (DEEPSPEED, DEEPSPEED_REGATHER):
        regather = plan.kind == DEEPSPEED_REGATHER
        traffic = sharded(cut.units, cut.root, ranks, gather_backward=regather)
        engine = _deepspeed(module, regather)
        return _DeepSpeed(engine, module, traffic, engine)
    assert plan.prefetch_bytes is not None, "of ours"
    manager = tpkernels.zero(
        module, mesh, stage=3, prefetch_bytes=plan.prefetch_bytes, units=[Unit]
    )
    return _Ours(manager, module, sharded(cut.units, cut.root, ranks))


def _fully_shard(module: Transformer, mesh: DeviceMesh, ahead: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    units = list(module.units)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if ahead:
        for index, unit in enumerate(units):
            before = units[max(0, index - ahead) : index][::-1]
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])  # type: ignore[operator]
            unit.set_modules_to_backward_prefetch(before)  # type: ignore[operator]
    return module


def _deepspeed(module: Transformer, regather: bool) -> Any:
    """DeepSpeed's engine, by its public API.

    By default a parameter that is used again within 1e9 elements stays gathered: models of this
    size are gathered once a step. With `regather` none stays.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise NotInstalled("deepspeed is not installed. Fix: pip install deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with _quiet():
        deepspeed = importlib.import_module("deepspeed")
        zero: dict[str, Any] = {"stage": 3, "overlap_comm": True}
        if regather:
            zero["stage3_max_reuse_distance"] = 0
        optimizer = torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints while it is imported and set up; an error still shows."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            sys.stdout.flush()


def _there(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient after backward")
    return parameter.grad


def plans(
    baselines: Sequence[str],
    budgets: Sequence[tuple[str, Callable[[int], int]]],
    units: Sequence[int],
    shape: ModelShape,
) -> list[Plan]:
    """The baselines, then ours for each number of blocks a unit and each budget.

    Args:
        budgets: (label, bytes from a unit's bytes).
    """
    found = [Plan(kind, units[0] if kind not in (COMPUTE, DDP) else 1) for kind in baselines]
    for blocks_per_unit in units:
        unit_bytes = sizes(shape, blocks_per_unit).units[0]
        for label, of_unit in budgets:
            found.append(Plan(OURS, blocks_per_unit, of_unit(unit_bytes), label))
    return found
