"""From a model to units: parameters move into flat buffers, unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpkernels import envs
from tpkernels.chunked_tensor import local_values
from tpkernels.comm.agreement import check_agreement
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError, ConfigError, UnsupportedModuleError
from tpkernels.zero.agreed_settings import other_mesh
from tpkernels.zero.config import ZeroConfig
from tpkernels.zero.flat_buffer import FlatBuffer, Owner
from tpkernels.zero.gradients import GradientBuffer
from tpkernels.zero.layout import flat_layout
from tpkernels.zero.memory_overlap import refuse_overlaps
from tpkernels.zero.policies import FP16_REFUSED
from tpkernels.zero.transfers import Transfers
from tpkernels.zero.unit import Unit
from tpkernels.zero.units import UnitModules

Named = tuple[str, Tensor, list[Owner]]


def check_parameters(
    planned: list[UnitModules],
    group: Group,
    copies: Group | None,
    param_dtype: torch.dtype | None = None,
) -> None:
    """Refuse parameters that cannot be moved, then weights that differ between the ranks.

    ``param_dtype``: in which they will compute; None: in their own.

    Raises:
        UnsupportedModuleError, ConfigError, AgreementError: nothing was changed.
    """
    for unit in planned:
        for name, parameter, _ in unit.parameters:
            _refuse_unsupported(name, parameter)
            _refuse_fp16(name, parameter, param_dtype)
    refuse_overlaps([(each.fqn, each.parameter) for unit in planned for each in unit.parameters])
    for unit in planned:
        _check_equal_weights(unit.name, [(n, p, o) for n, p, o in unit.parameters], group, copies)


def gathered_bytes(
    planned: UnitModules, config: ZeroConfig, world: int, device: torch.device
) -> int:
    """Bytes that gathering ``planned`` takes, with what it holds while it is on its way."""
    parameters: list[Named] = [(n, p, list(o)) for n, p, o in planned.parameters]
    moves = config.offload_optimizer == "cpu" and device.type != "cpu"
    total = 0
    for (compute, master, _), these in _by_kind(parameters, config.precision.param_dtype).items():
        layout = flat_layout([local_values(p).shape for _, p, _ in these], compute.itemsize, world)
        total += layout.numel * compute.itemsize
        total += layout.shard_numel * master.itemsize if moves else 0
    return total


def build_unit(
    index: int,
    planned: UnitModules,
    group: Group,
    config: ZeroConfig,
    device: torch.device,
    transfers: Transfers,
    copies: Group | None,
) -> Unit:
    """Move the parameters of ``planned`` into flat buffers and show their shards instead.

    ``copies``: the tensor-parallel ranks that share the model, or None.
    """
    precision = config.precision
    offloads = config.offload_optimizer == "cpu"
    parameters: list[Named] = [(n, p, list(o)) for n, p, o in planned.parameters]
    buffers = []
    for (compute, master, _), these in _by_kind(parameters, precision.param_dtype).items():
        buffers.append(
            FlatBuffer(
                these,
                group,
                compute_dtype=compute,
                master_dtype=master,
                device=device,
                master_device=torch.device("cpu") if offloads else device,
                pin_memory=offloads and config.pin_memory and device.type == "cuda",
                copies=copies,
            )
        )
    gradients = [
        GradientBuffer(buffer, precision.reduce_dtype or buffer.whole.dtype, config.stage == 1)
        for buffer in buffers
        if buffer.trains
    ]
    unit = Unit(index, planned.name, list(planned.modules), buffers, gradients, transfers)
    unit.hide()
    return unit


def _by_kind(
    parameters: list[Named], param_dtype: torch.dtype | None
) -> dict[tuple[torch.dtype, torch.dtype, bool], list[Named]]:
    """By (compute dtype, master dtype, trained): each kind is a flat buffer.

    Frozen parameters keep their dtype: no optimizer steps them.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Named]] = {}
    for each in parameters:
        parameter = each[1]
        own = parameter.dtype
        floating = own.is_floating_point
        compute = param_dtype if param_dtype is not None and floating else own
        trained = parameter.requires_grad
        master = torch.promote_types(own, torch.float32) if trained else own
        kinds.setdefault((compute, master, trained), []).append(each)
    return kinds


def _refuse_unsupported(name: str, parameter: Tensor) -> None:
    if nn.parameter.is_lazy(parameter):
        raise UnsupportedModuleError(
            f"{name} is lazy and has no shape yet. Fix: run the model once before zero()"
        )
    if type(parameter) is not nn.Parameter and not getattr(parameter, "_is_param", False):
        raise UnsupportedModuleError(
            f"{name} is a {type(parameter).__name__}, whose memory cannot be moved into a flat "
            "buffer. Fix: make it an ordinary nn.Parameter, or leave its module out of the model "
            "given to zero()"
        )
    if parameter.is_sparse or parameter.layout != torch.strided:
        raise UnsupportedModuleError(
            f"{name} has layout {parameter.layout}; allowed: torch.strided. Fix: .to_dense()"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UnsupportedModuleError(
            f"{name} has hooks on its gradient, which its shard would not keep. Fix: register "
            "them on the model's parameters after zero()"
        )
    if parameter.grad is not None:
        raise ConfigError(
            f"{name} has a gradient already, which would be lost. Fix: model.zero_grad() before "
            "zero()"
        )


def _refuse_fp16(name: str, parameter: Tensor, param_dtype: torch.dtype | None) -> None:
    if parameter.requires_grad and parameter.dtype is torch.float16 and param_dtype is None:
        raise ConfigError(
            f"{name} is trained in torch.float16, which {FP16_REFUSED} Fix: model.float() or "
            "model.bfloat16() before zero(), or mp_policy='bf16'; frozen parameters may be float16"
        )


def _check_equal_weights(
    name: str, parameters: list[Named], group: Group, copies: Group | None
) -> None:
    """Every rank takes its part of its own copy: they must be equal."""
    values = {each: p.detach() for each, p, _ in parameters if not p.is_meta}
    if envs.check() == "off" or not values:
        return
    try:
        check_agreement(values, group, f"weights of {name}")
    except AgreementError as error:
        raise AgreementError(
            f"{str(error).split(' Fix: ')[0]} Fix: build the model from the same seed or "
            f"checkpoint on every rank (or on the meta device){other_mesh(copies)}; "
            "TPKERNELS_CHECK=off skips the check"
        ) from error
