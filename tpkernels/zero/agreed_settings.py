"""Before anything is sharded: do the ranks ask :func:`tpkernels.zero` for the same?"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import envs
from tpkernels.comm.agreement import control_device
from tpkernels.comm.collectives import all_gather_bytes
from tpkernels.comm.group import Group
from tpkernels.errors import AgreementError
from tpkernels.zero.config import ZeroConfig
from tpkernels.zero.units import UnitModules

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
    groups = [each for each in (group, replicas) if each is not None and each.size > 1]
    if envs.check() == "off" or not groups:
        return
    settings = _settings(config, planned)
    row = torch.tensor(
        [dist.get_rank(), *(_digest(compared) for _, compared, _ in settings)], dtype=torch.int64
    )
    for each in groups:
        row = all_gather_bytes(row.to(control_device(each)), each.name).cpu()
    rows = row.view(-1, 1 + len(settings)).tolist()
    for column, (name, _, shown) in enumerate(settings, 1):
        others = [str(row[0]) for row in rows if row[column] != rows[0][column]]
        if others:
            is_units = name.startswith("units")
            raise AgreementError(
                f"zero(): {name} differs between the ranks: rank {', '.join(others)} from rank "
                f"{rows[0][0]}; here, on rank {dist.get_rank()}, it is {shown}. Fix: "
                + ("build the same model" if is_units else f"give the same {name}")
                + f" on every rank{other_mesh(copies) if is_units else ''}; TPKERNELS_CHECK=off "
                "skips the check"
            )


def other_mesh(copies: Group | None) -> str:
    """What else to try where models differ, if tensor parallelism split them."""
    if copies is None:
        return ""
    return (
        "; or the mesh: tensor-parallel ranks hold different parts, so give zero() the "
        "data-parallel dimension alone, as in zero(model, mesh['dp_shard'])"
    )


def _settings(config: ZeroConfig, planned: list[UnitModules]) -> list[tuple[str, Any, str]]:
    """(name, what is compared, how a message shows it), the same names on all ranks."""
    result = []
    for each in dataclasses.fields(config):
        if each.name not in _NOT_COMPARED:
            value = getattr(config, each.name)
            result.append((each.name, value, repr(value)))
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
