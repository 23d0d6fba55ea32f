"""``state_dict`` and ``load_state_dict`` of a sharded model: always shards, whatever ran before."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpkernels.checkpoint import check_equal_wholes
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import ConfigError
from tpkernels.zero.flat_buffer import Slot
from tpkernels.zero.guards import check_slot

if TYPE_CHECKING:
    from tpkernels.zero.engine import Engine
    from tpkernels.zero.unit import Unit


def attach_state_dict_hooks(engine: Engine) -> None:
    """Make ``state_dict`` and ``load_state_dict`` of the model, and of modules in it, see shards.

    - ``state_dict()`` gives shards, also while units are gathered by hand.
    - ``load_state_dict`` takes shards, or whole tensors, of which each rank takes its part; what
      does not fit raises before anything is loaded, whole tensors that differ between the ranks too
      (collective; unless ``TPKERNELS_CHECK=off``).
    - Both refuse parameters that were taken out of the memory that is gathered.
    """
    hooks = _StateDictHooks(engine)
    for module in {id(each): each for each in (engine.module, *hooks.owners())}.values():
        earlier = list(module._state_dict_hooks)
        module.register_state_dict_post_hook(functools.partial(hooks.after_save))
        for key in earlier:  # they may rename the keys: ours comes first
            module._state_dict_hooks[key] = module._state_dict_hooks.pop(key)
        module.register_load_state_dict_pre_hook(hooks.before_load)


class _StateDictHooks:
    """They keep no state between calls: an error in the middle leaves nothing to undo."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owned: dict[int, list[tuple[nn.Module, str, Unit, Slot, Tensor]]] = {}
        for unit in engine.units:
            for which, _, slot in unit.slots():
                master = unit.buffers[which].master
                for module, attribute in slot.owners:
                    entry = (module, attribute, unit, slot, master)
                    self._owned.setdefault(id(module), []).append(entry)

    def owners(self) -> list[nn.Module]:
        """Modules that hold a sharded parameter themselves."""
        return [entries[0][0] for entries in self._owned.values()]

    def after_save(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        """Put shards in the place of what is gathered."""
        for _, attribute, unit, slot, master in self._owned.get(id(module), ()):
            value = state.get(prefix + attribute)
            if not unit.shown:
                check_slot(slot, master)
            elif value is not None:
                keeps_variable = value is slot.whole
                state[prefix + attribute] = slot.shard if keeps_variable else slot.shard.detach()

    def before_load(
        self, module: nn.Module, state: Any, prefix: str, metadata: Any, *rest: Any
    ) -> None:
        """Put this rank's parts in the place of whole tensors."""
        if metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "load_state_dict(assign=True) would replace the shards that the optimizer steps. "
                "Fix: load_state_dict(state_dict) without assign"
            )
        self._engine.recover()
        is_root = module is self._engine.module
        inside = module.named_modules(remove_duplicate=False) if is_root else [("", module)]
        wholes: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        for path, owner in inside:
            for _, attribute, unit, slot, master in self._owned.get(id(owner), ()):
                key = f"{prefix}{path}{'.' if path else ''}{attribute}"
                if not isinstance(given := state.get(key), Tensor):
                    continue
                if unit.shown:
                    raise ConfigError(
                        f"load_state_dict while {unit.name!r} is gathered: what is loaded would "
                        "be lost. Fix: load outside of manager.gathered() and unshard(); every "
                        "rank takes its part of whole tensors"
                    )
                check_slot(slot, master)
                if not isinstance(given, ChunkedTensor):
                    given = given.full_tensor() if hasattr(given, "full_tensor") else given
                    wholes[key] = given
                parts[key] = _own_part(key, given, slot.shard)
        check_equal_wholes("load_state_dict", wholes, [self._engine.group, self._engine.replicas])
        state.update(parts)


def _own_part(name: str, given: Tensor, shard: nn.Parameter) -> Tensor:
    """This rank's part of ``given``, which may be whole, or be that part already."""
    assert isinstance(shard, ChunkedTensor)
    spec = shard.spec
    if isinstance(given, ChunkedTensor):
        if given.spec is not spec and given.spec != spec:
            raise ConfigError(
                f"{name}: the state dict holds another part, {given!r}, than this rank's "
                f"{shard!r}. Fix: load it with torch.distributed.checkpoint, which reshards"
            )
        return given
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
