"""Wrap policies, ours (a callable) and FSDP's, read as the modules that they pick."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
)

from tpkernels.errors import ConfigError


def is_policy(units: Any) -> bool:
    """Whether ``units`` is a policy: a callable that is no class and no module."""
    known = isinstance(units, (ModuleWrapPolicy, CustomPolicy))
    return known or (callable(units) and not isinstance(units, (type, nn.Module)))


def heads_from_policy(root: nn.Module, policy: Any) -> list[nn.Module] | None:
    """The modules of ``root`` that ``policy`` picks; None where it picks nothing and must.

    A size-based policy may pick nothing: the model is then small, and one unit.

    Raises:
        ConfigError: the policy answers something other than True or False.
    """
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        picked = _of_fsdp_object(root, policy)
    elif _asks_for_numel(policy):
        picked = _of_fsdp_function(root, policy)
    else:
        picked = [each for each in root.modules() if _answer(policy, policy(each), each)]
    may_be_empty = _innermost(policy) is size_based_auto_wrap_policy
    return picked if picked or may_be_empty else None


def _of_fsdp_object(root: nn.Module, policy: ModuleWrapPolicy | CustomPolicy) -> list[nn.Module]:
    targets = policy._run_policy(root, ignored_modules=set(), root_kwargs={})
    for module, overrides in targets.items():
        if overrides:
            raise ConfigError(
                f"units: the policy gives {type(module).__name__} options of its own, "
                f"{overrides!r}; allowed: True or False. Fix: return True, and set what holds for "
                "all units with the arguments of zero"
            )
    return list(targets)


def _of_fsdp_function(root: nn.Module, policy: Callable[..., Any]) -> list[nn.Module]:
    """As FSDP1 wraps: from the leaves up, each asked with the elements not yet in a unit."""
    picked: list[nn.Module] = []
    inside: dict[int, int] = {}  # id -> elements in units at and below it; `root` keeps it alive

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        return _answer(policy, answer, module)

    def visit(module: nn.Module) -> int:
        if id(module) in inside:
            return inside[id(module)]
        numel = sum(each.numel() for each in module.parameters())
        taken = 0
        if ask(module, True, numel):
            taken = sum(visit(child) for child in module.children())
            if module is not root and ask(module, False, numel - taken):
                picked.append(module)
                taken = numel
        inside[id(module)] = taken
        return taken

    visit(root)
    return picked


def _innermost(policy: Any) -> Any:
    while isinstance(policy, functools.partial):
        policy = policy.func
    return policy


def _asks_for_numel(policy: Any) -> bool:
    try:
        names = inspect.signature(policy).parameters
    except (TypeError, ValueError):  # a builtin without a signature takes the module alone
        return False
    return {"module", "recurse", "nonwrapped_numel"} <= set(names)


def _answer(policy: Any, answer: Any, module: nn.Module) -> bool:
    if isinstance(answer, bool):
        return answer
    raise ConfigError(
        f"units: the policy {_innermost(policy)!r} answered {answer!r} for a "
        f"{type(module).__name__}; allowed: True or False. Fix: return a bool"
    )
