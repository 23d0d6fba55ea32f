"""Parameters on the meta device get values unit by unit, the same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tpkernels.comm.agreement import control_device
from tpkernels.comm.collectives import all_reduce
from tpkernels.comm.group import Group
from tpkernels.errors import UnsupportedModuleError
from tpkernels.zero.units import UnitModules, UnitParameter

_INITIALISERS = ("reset_parameters", "_reset_parameters")


def agreed_seed(groups: list[Group]) -> int:
    """A seed drawn by the first rank's generator, the same on all ranks; collective."""
    seed = torch.randint(2**31, (1,), dtype=torch.int64)
    for group in groups:
        seed = seed.to(control_device(group))
        seed = all_reduce(seed if group.rank == 0 else torch.zeros_like(seed), group.name)
    return int(seed)


def check_initialisers(root: nn.Module, planned: list[UnitModules]) -> None:
    """Raise for the first module whose meta parameters or buffers nothing would initialise.

    Raises:
        UnsupportedModuleError: it has no ``reset_parameters``.
    """
    own = {id(p) for unit in planned for _, p, _ in unit.parameters if p.is_meta}
    for name, module in root.named_modules():
        parameters = [n for n, p in module.named_parameters(recurse=False) if id(p) in own]
        buffers = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        if (parameters or buffers) and _initialiser(root, module) is None:
            raise UnsupportedModuleError(
                f"{name or type(root).__name__} ({type(module).__name__}) holds "
                f"{', '.join(parameters + buffers)} on the meta device and has no "
                "reset_parameters() to give them values. Fix: add one, or build the model on a "
                "real device"
            )


def materialise_buffers(root: nn.Module, device: torch.device, seed: int) -> None:
    """Give modules that hold only meta buffers their values."""
    for module in root.modules():
        direct = list(module.parameters(recurse=False))
        if not direct and any(b.is_meta for b in module.buffers(recurse=False)):
            with _seeded(device, seed):
                module.to_empty(device=device, recurse=False)
                _run(root, module)


def materialise(
    root: nn.Module, unit: UnitModules, device: torch.device, seed: int
) -> list[UnitParameter]:
    """The parameters of ``unit`` with values, those on meta initialised by their modules."""
    owners: dict[int, nn.Module] = {}
    for _, parameter, places in unit.parameters:
        if parameter.is_meta:
            owners.setdefault(id(places[0][0]), places[0][0])
    with _seeded(device, seed):
        for module in owners.values():
            elsewhere = {
                name: p for name, p in module._parameters.items() if p is not None and not p.is_meta
            }
            flags = {n: p.requires_grad for n, p in module.named_parameters(recurse=False)}
            module.to_empty(device=device, recurse=False)
            _run(root, module)
            module._parameters.update(elsewhere)  # to_empty made them empty as well
            for name, wanted in flags.items():
                module._parameters[name].requires_grad_(wanted)  # type: ignore[union-attr]
    result = []
    for fqn, parameter, places in unit.parameters:
        if parameter.is_meta:
            module, name = places[0]
            parameter = module._parameters[name]  # type: ignore[assignment]
            for module, name in places[1:]:
                module._parameters[name] = parameter
        result.append(UnitParameter(fqn, parameter, places))
    return result


def _initialiser(root: nn.Module, module: nn.Module) -> Callable[[], object] | None:
    for name in _INITIALISERS:
        if callable(method := getattr(module, name, None)):
            return method
    hub = getattr(root, "_init_weights", None)  # Hugging Face: the model initialises its modules
    if callable(hub) and list(module.parameters(recurse=False)):
        return lambda: hub(module)
    return None


def _run(root: nn.Module, module: nn.Module) -> None:
    initialise = _initialiser(root, module)
    assert initialise is not None, "check_initialisers was to find it"
    with torch.no_grad():
        initialise()


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
