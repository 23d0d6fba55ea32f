"""``state_dict`` and ``load_state_dict`` of a sharded model: always shards, whatever ran before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError

if TYPE_CHECKING:
    from tpkernels.zero.engine import Engine


def attach_state_dict_hooks(engine: Engine) -> list[Any]:
    """Make ``state_dict`` and ``load_state_dict`` of every module of the model see the shards.

    - ``state_dict()`` gives shards, also while units are gathered by hand.
    - ``load_state_dict`` takes shards, or whole tensors, of which each rank takes its part;
      ``assign=True`` is refused: the optimizer steps the parameters that are there.
    - copies gathered before a load are stale from then on.
    """
    shown: list[tuple[Any, int]] = []
    depth = 0

    def show_shards() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            engine.recover()
            for unit in engine.units:
                if unit.shown:
                    shown.append((unit, unit.shown))
                    unit.hide()

    def show_again() -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            for unit, count in shown:
                unit.show_whole()
                unit.shown = count
            shown.clear()

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        show_shards()

    def after_save(module: nn.Module, state_dict: Any, prefix: str, metadata: Any) -> None:
        show_again()

    def before_load(
        module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any
    ) -> None:
        show_shards()
        if metadata.get("assign_to_params_buffers", False):
            show_again()
            raise ConfigError(
                "load_state_dict(assign=True) would replace the shards that the optimizer steps. "
                "Fix: load_state_dict(state_dict) without assign"
            )
        for name, parameter in module.named_parameters(prefix=prefix.rstrip("."), recurse=True):
            given = state_dict.get(name)
            if isinstance(parameter, ChunkedTensor) and isinstance(given, Tensor):
                state_dict[name] = _own_part(name, given, parameter)

    def after_load(module: nn.Module, incompatible: Any) -> None:
        show_again()
        engine.notice_edits()

    root = engine.module
    return [
        root.register_state_dict_pre_hook(before_save),
        root.register_state_dict_post_hook(after_save),
        root.register_load_state_dict_pre_hook(before_load),
        root.register_load_state_dict_post_hook(after_load),
    ]


def _own_part(name: str, given: Tensor, parameter: ChunkedTensor) -> Tensor:
    """This rank's part of ``given``, which may be whole, or be that part already."""
    spec = parameter.spec
    if isinstance(given, ChunkedTensor):
        if given.spec != spec:
            raise ConfigError(
                f"{name}: the state dict holds another part, {given!r}, than this rank's "
                f"{parameter!r}. Fix: load it with torch.distributed.checkpoint, which reshards"
            )
        return given
    if hasattr(given, "full_tensor"):
        given = given.full_tensor()
    whole = torch.Size(spec.whole_shape)
    if given.shape != whole:
        raise ConfigError(
            f"{name} must be whole, of shape {tuple(whole)}, got {tuple(given.shape)}. Fix: save "
            "tpkernels.full_state_dict(model), or load shards with torch.distributed.checkpoint"
        )
    part = given
    for level in reversed(list(spec.levels)):
        part = level.take(part)
    return ChunkedTensor.wrap(part, spec)
