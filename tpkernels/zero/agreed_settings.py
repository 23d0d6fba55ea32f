"""Before anything is sharded: do the ranks ask :func:`tpkernels.zero` for the same?"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import envs
from tpkernels.comm.agreement import control_device
from tpkernels.comm.collectives import all_gather_bytes
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError
from tpkernels.zero.config import ZeroConfig
from tpkernels.zero.policies import Precision
from tpkernels.zero.units import UnitModules

_Setting = tuple[str, Any, str]  # name, what is compared, how a message shows it
_NOT_COMPARED = ("units", "training", "notes", "origins")  # units: what they come to is


def check_settings(
    config: ZeroConfig,
    planned: list[UnitModules],
    group: Group,
    replicas: Group | None,
    copies: Group | None,
) -> None:
    """Raise on every rank unless all have one config and the same units.

    One all-gather of 8 bytes a setting, over ``group`` and over ``replicas``.

    Raises:
        AgreementError: naming the setting, the ranks that differ, and what it is here.
    """

    def fix(name: str) -> str:
        if not name.startswith("units"):
            return f"give the same {name} on every rank"
        same = " and give the same units=" if name == "units" else ""
        return f"build the same model{same} on every rank{other_mesh(copies)}"

    _compare("zero()", lambda: _settings(config, planned), fix, group, replicas)


def check_budget(
    prefetch_bytes: int, max_live_bytes: int | None, group: Group, replicas: Group | None
) -> None:
    """Raise on every rank unless all have these bounds; as :func:`check_settings`."""
    bounds: list[_Setting] = [
        ("prefetch_bytes", prefetch_bytes, repr(prefetch_bytes)),
        ("max_live_bytes", max_live_bytes, repr(max_live_bytes)),
    ]

    def fix(name: str) -> str:
        return f"give the same {name} on every rank"

    _compare("set_budget()", lambda: bounds, fix, group, replicas)


def _compare(
    what: str,
    said: Callable[[], list[_Setting]],
    fix: Callable[[str], str],
    group: Group,
    replicas: Group | None,
) -> None:
    groups = [each for each in (group, replicas) if each is not None and each.size > 1]
    if envs.check() == "off" or not groups:
        return
    settings = said()
    row = torch.tensor(
        [dist.get_rank(), *(_digest(compared) for _, compared, _ in settings)], dtype=torch.int64
    )
    for each in groups:
        row = all_gather_bytes(row.to(control_device(each)), each.name).cpu()
    rows = row.view(-1, 1 + len(settings)).tolist()
    for column, (name, _, shown) in enumerate(settings, 1):
        others = [str(row[0]) for row in rows if row[column] != rows[0][column]]
        if others:
            raise AgreementError(
                f"{what}: {name} differs between the ranks: rank {', '.join(others)} from rank "
                f"{rows[0][0]}; here, on rank {dist.get_rank()}, it is {shown}. Fix: {fix(name)}; "
                "TPKERNELS_CHECK=off skips the check"
            )


def other_mesh(copies: Group | None) -> str:
    """What else to try where models differ, if tensor parallelism split them."""
    if copies is None:
        return ""
    return (
        "; or the mesh: tensor-parallel ranks hold different parts, so give zero() the "
        "data-parallel dimension alone, as in zero(model, mesh['dp_shard'])"
    )


def _settings(config: ZeroConfig, planned: list[UnitModules]) -> list[_Setting]:
    """The same names on all ranks."""
    result: list[_Setting] = []
    for each in dataclasses.fields(config):
        if each.name not in _NOT_COMPARED:
            value = getattr(config, each.name)
            shown = str(value) if isinstance(value, Precision) else repr(value)
            result.append((each.name, value, shown))
    parameters = [each for unit in planned for each in unit.parameters]
    names = [(unit.name, [each.fqn for each in unit.parameters]) for unit in planned]
    labels = ", ".join(unit.name for unit in planned[:4]) + (", ..." if len(planned) > 4 else "")
    numel = sum(unit.numel for unit in planned)
    dtypes = [each.parameter.dtype for each in parameters]
    trained = [each.parameter.requires_grad for each in parameters]
    meta = [each.parameter.is_meta for each in parameters]
    return [
        *result,
        ("units", names, f"{len(planned)} units of {len(parameters)} parameters: {labels}"),
        (
            "units' shapes",
            [tuple(each.parameter.shape) for each in parameters],
            f"{numel} elements in {len(parameters)} parameters",
        ),
        ("units' dtypes", dtypes, ", ".join(sorted({str(each) for each in dtypes}))),
        ("units' requires_grad", trained, f"True for {sum(trained)} of {len(trained)} parameters"),
        ("units' device", meta, f"meta for {sum(meta)} of {len(meta)} parameters"),
    ]


def _digest(value: Any) -> int:
    raw = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True)
