"""``parallelize`` and ``unparallelize``: a model becomes tensor-parallel in place, and back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpkernels import envs
from tpkernels.checkpoint import _GROUP, data_group_of, group_of
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.comm.agreement import InputCheck, check_agreement
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import (
    AgreementError,
    ConfigError,
    ShardedSaveError,
    TPKernelsWarning,
    UnsupportedModuleError,
)
from tpkernels.huggingface import restore_save_pretrained, wrap_save_pretrained
from tpkernels.kernels import table
from tpkernels.modules import (
    TPMLP,
    ColumnParallelLinear,
    RowParallelLinear,
    TPAttention,
    VocabParallelEmbedding,
)
from tpkernels.modules.class_swap import (
    is_changed,
    is_swapped,
    restore_class,
    set_attributes,
)
from tpkernels.modules.parameters import gather_full, gather_gradient
from tpkernels.ops import choice
from tpkernels.overlap import fused
from tpkernels.overlap.plan import plan_gemm_all_reduce, plan_sequence
from tpkernels.overlap.signaled import require_signaled
from tpkernels.plan import replacements_from_plan
from tpkernels.recognise import Recognition, recognise
from tpkernels.replace import Replacement, TiedParameters, plan_replacement
from tpkernels.report import ModuleRow, ParallelReport
from tpkernels.sequence_blocks import plan_sequence_parallel

_HOOK = "_tpkernels_input_check"
_NAMED = (ColumnParallelLinear, RowParallelLinear)  # those that keep their path themselves
_BUILT = (TPMLP, TPAttention, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


@torch.inference_mode(False)  # recognition differentiates, and parameters outlive the caller's
def parallelize(
    model: nn.Module,
    mesh: GroupLike = None,
    *,
    plan: str | Mapping[str, Any] = "auto",
    sequence_parallel: bool = False,
    strict: bool = True,
) -> ParallelReport:
    """Split a model's MLPs, attentions and vocabulary over ``mesh``, in place.

    The model keeps its identity, its module names and its state dict keys; inputs and outputs
    are those of the dense model, the same on every rank. Build the optimizer afterwards.
    :func:`unparallelize` undoes it.

    Args:
        model: dense, the same weights on every rank (checked; on the meta device not).
        mesh: a 1-D ``DeviceMesh``, a ``ProcessGroup`` or None for all ranks.
        plan: ``"auto"`` recognises structure; or a dict of module path (``*`` matches one level's
            name) -> style: one of our module classes or their ``.style(...)``, or any
            ``torch.distributed.tensor.parallel`` style.
        sequence_parallel: shard the activations between the tensor-parallel regions on the
            sequence, inside the repeated blocks: norms, dropouts and residuals work on this
            rank's tokens, and activation memory falls. Embeddings, what follows the last block,
            and calls with fewer tokens than ranks stay whole. In its first forward one block of
            each class is compared with itself on the whole sequence.
        strict: raise when an MLP or attention inside the repeated blocks cannot be split, naming
            the module, the reason and the fix; False keeps it and says so in the report.

    Collective over the group when it checks the weights. Nothing is changed if it raises.

    Raises:
        UnsupportedModuleError: no known structure, or one that cannot be split, under ``strict``.
        ConfigError: arguments that cannot work, or a model that is already split.
        AgreementError: ranks hold different weights.
    """
    group = resolve_group(mesh)
    _check_arguments(model, plan, sequence_parallel, strict)
    # What was asked for and cannot serve raises here, before anything has changed.
    choice.apply()
    implementation = _implementation(*_device_and_dtype(model), group)
    recognition: Recognition | None = None
    if plan == "auto":
        recognition = recognise(model)
        todo, kept = _auto_plan(model, recognition, group, strict)
    else:
        todo, kept = replacements_from_plan(model, plan, group), []  # type: ignore[arg-type]
    blocks, on_shards = [], ""
    if sequence_parallel and group.size > 1:
        blocks = plan_sequence_parallel(model, todo, recognition, group)
        on_shards = _on_shards(*_device_and_dtype(model), group)
    todo = [*todo, *blocks]
    _check_weights(model, group)
    _compare_tables(_device_and_dtype(model)[0], group)
    report = ParallelReport(group.size, group.rank, dense_bytes=_parameter_bytes(model))
    _apply(model, todo, group)
    _name_layers(model)
    for each in todo:
        inside = any(f"{each.name}.".startswith(f"{block.name}.") for block in blocks)
        served = on_shards if inside else implementation
        report.modules.append(ModuleRow(each.name, each.kind, each.action, served, each.detail))
    report.modules.extend(kept)
    report.parameter_bytes = _parameter_bytes(model)
    model.__dict__[_GROUP] = group
    _check_inputs_at_root(model, group)
    wrap_save_pretrained(model)
    return report


def _apply(model: nn.Module, todo: list[Replacement], group: Group) -> None:
    """Make all replacements, or none: what was done before a failure is undone (collective)."""
    tied = TiedParameters(model)
    try:
        for replacement in todo:
            replacement.apply()
            tied.rebind()
    except Exception:
        tied.rebind()
        _make_dense(model, group)
        raise


def _name_layers(model: nn.Module) -> None:
    """Tell every split module its path, for errors of communication and traces."""
    for name, module in model.named_modules():
        state = module.__dict__.get("_tp")
        if state is not None and hasattr(state, "layer"):
            state.layer = name
        elif isinstance(module, _NAMED) and is_changed(module):
            set_attributes(module, layer=name)


def _check_arguments(model: nn.Module, plan: Any, sequence_parallel: Any, strict: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(sequence_parallel, bool):
        raise ConfigError(
            f"sequence_parallel={sequence_parallel!r} is not known; allowed: True, False. Fix: "
            "True shards activations between the split modules on the sequence"
        )
    if not isinstance(strict, bool):
        raise ConfigError(
            f"strict={strict!r} is not known; allowed: True, False. Fix: strict=False keeps what "
            "cannot be split"
        )
    if plan != "auto" and not isinstance(plan, Mapping):
        raise ConfigError(f"plan must be 'auto' or a dict of path -> style, got {plan!r}")
    for name, module in model.named_modules():
        if is_changed(module):
            raise ConfigError(
                f"{name or 'model'} is already tensor-parallel. Fix: tpkernels.unparallelize first"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, (DTensor, ChunkedTensor)):
            raise ConfigError(
                f"{name} is already sharded ({type(parameter).__name__}). Fix: parallelize first, "
                "then fully_shard or tpkernels.zero"
            )


def _auto_plan(
    model: nn.Module, recognition: Recognition, group: Group, strict: bool
) -> tuple[list[Replacement], list[ModuleRow]]:
    kept = [
        ModuleRow(k.path, k.kind, "kept", "-", k.reason)
        for k in recognition.kept
        if not (strict and k.in_block)
    ]
    problems = [
        f"{k.path or 'model'}: {k.reason}" + (f". Fix: {k.fix}" if k.fix else "")
        for k in recognition.kept
        if strict and k.in_block
    ]
    todo = []
    for found in recognition.found:
        try:
            todo.append(plan_replacement(model, found, group))
        except UnsupportedModuleError as error:
            if strict:
                problems.append(str(error))
            else:
                kept.append(ModuleRow(found.path, found.kind, "kept", "-", str(error)))
    if problems:
        more = f"\n(and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UnsupportedModuleError(
            "parallelize cannot split this model as it is:\n"
            + "\n".join(problems[:3])
            + more
            + "\nFix: strict=False keeps such modules whole, or give a plan for them"
        )
    if not todo and strict:
        linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        reasons = "".join(f"\n{k.path or 'model'}: {k.reason}" for k in recognition.kept[:3])
        raise UnsupportedModuleError(
            f"parallelize found no structure it knows in {type(model).__name__} "
            f"({len(linears)} linear layers{': ' + ', '.join(linears[:3]) if linears else ''})"
            f"{':' + reasons + chr(10) if reasons else '. '}"
            "Fix: give plan={path: tpkernels.ColumnParallelLinear, ...}, or strict=False to keep it"
        )
    return todo, kept


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return torch.device("cpu"), torch.float32
    return torch.device("cpu") if parameter.is_meta else parameter.device, parameter.dtype


def _implementation(device: torch.device, dtype: torch.dtype, group: Group) -> str:
    kernel = choice.summary(device, dtype)
    if group.size == 1:
        return kernel
    fused_rows = fused.rows_served(device, dtype, group.name)
    refused = None if fused_rows else "not CPU ranks that share memory, or a dtype without kernels"
    plan = plan_gemm_all_reduce(1 << 12, 1 << 12, 2, group.name, device=device, fused=refused)
    if plan.strategy == "signaled":
        require_signaled(device, dtype)
    few = f"fused up to {fused_rows} rows, then " if fused_rows and envs.overlap() == "auto" else ""
    return f"{kernel}, overlap {few}{plan.strategy}"


def _on_shards(device: torch.device, dtype: torch.dtype, group: Group) -> str:
    """The same, inside the blocks whose sequence is sharded."""
    plan = plan_sequence(1 << 12, 1 << 13, group.name, device)
    return f"{choice.summary(device, dtype)}, sequence parallel, overlap {plan.strategy}"


def _parameter_bytes(model: nn.Module) -> int:
    total = 0
    for parameter in model.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        total += local.numel() * local.element_size()
    return total


def _check_weights(model: nn.Module, group: Group) -> None:
    if envs.check() != "off":
        weights: dict[str, Tensor | None] = dict(model.named_parameters())
        check_agreement(weights, group, f"weights of {type(model).__name__}")


def _compare_tables(device: torch.device, group: Group) -> None:
    """Warn, on all ranks, where their measured tables differ: then so may their kernels."""
    if device.type != "cuda" or envs.check() == "off":
        return
    digest = torch.tensor([table.table_of(device).digest()], device="cpu")
    try:
        check_agreement({"digest": digest}, group, "measured tables")
    except AgreementError:
        warnings.warn(
            f"the measured tables of the ranks of {group!r} differ (rank {group.rank}: "
            f"{choice.summary(device)}), so that ranks may take kernels of different speed. Fix: "
            f"give every rank the same {table.user_folder()}, from one run of {table.TUNE}",
            TPKernelsWarning,
            stacklevel=3,
        )


def _check_inputs_at_root(model: nn.Module, group: Group) -> None:
    """One check of the model's inputs in the first calls, in place of one a module."""
    for module in model.modules():
        if is_changed(module):
            check = getattr(module.__dict__.get("_tp", module), "check", None)
            if isinstance(check, InputCheck):
                check.enabled = False
    model.__dict__[_HOOK] = model.register_forward_pre_hook(_RootCheck(group), with_kwargs=True)


class _RootCheck:
    """The hook that checks a model's inputs; a split model cannot be pickled, and this says so."""

    def __init__(self, group: Group) -> None:
        self.group, self.check = group, InputCheck()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self.check(tensors, self.group, type(module).__name__)

    def __deepcopy__(self, memo: dict[int, Any]) -> _RootCheck:
        copied = _RootCheck(self.group)
        copied.check = copy.deepcopy(self.check, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedSaveError(
            f"a tensor-parallel model holds rank {self.group.rank}'s parts of its parameters and "
            "cannot be pickled. Fix: torch.save(tpkernels.full_state_dict(model), path), save "
            "every rank's part with torch.distributed.checkpoint.save(model.state_dict(), ...), "
            "or tpkernels.unparallelize(model) first"
        )


def unparallelize(model: nn.Module) -> None:
    """Undo :func:`parallelize`: dense weights (and gradients), original classes, same keys.

    Bitwise the weights as they are now. Collective over the group. Does nothing to a model that
    is not split.

    Raises:
        ConfigError: not a model; it was sharded (``zero``, ``fully_shard``) after it was split, or
            holds modules that were built parallel.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {type(model).__name__}")
    if data_group_of(model) is not None:
        raise ConfigError(
            "the model is under zero(), which cannot be undone. Fix: take "
            "tpkernels.full_state_dict(model) and load it into a fresh model"
        )
    group = group_of(model)
    if group is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, _BUILT) and not is_swapped(module):
            raise ConfigError(
                f"{name or 'model'} ({type(module).__name__}) was built tensor-parallel and has no "
                "dense form to go back to. Fix: take tpkernels.full_state_dict(model) and load it "
                "into a dense model"
            )
        if hasattr(module, "_get_fsdp_state"):
            raise ConfigError(
                f"{name or 'model'} is under fully_shard, which cannot be undone. Fix: take "
                "tpkernels.full_state_dict(model) and load it into a fresh model"
            )
    _make_dense(model, group)
    for module in model.modules():  # the model itself, or a part of it that was split
        if _HOOK in module.__dict__:
            module.__dict__.pop(_HOOK).remove()
        module.__dict__.pop(_GROUP, None)
    restore_save_pretrained(model)


def _make_dense(model: nn.Module, group: Group) -> None:
    """Dense parameters and gradients, original classes and attributes; collective."""
    dense: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and isinstance(parameter, (DTensor, ChunkedTensor)):
                if id(parameter) not in dense:
                    whole = nn.Parameter(gather_full(parameter, group), parameter.requires_grad)
                    whole.grad = gather_gradient(parameter, group)
                    dense[id(parameter)] = whole
                module._parameters[name] = dense[id(parameter)]
    for module in model.modules():
        if is_changed(module):
            restore_class(module)
