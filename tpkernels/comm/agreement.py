"""Do the ranks of a group agree on what they must share? A cheap check, in the first calls.

Ranks of one tensor-parallel group must be fed the same inputs and hold the same replicated
weights. When they do not, every number downstream is wrong and nothing else would say so; with
different shapes the next collective hangs. So each rank's values are reduced to a short
fingerprint, the fingerprints are gathered (one small collective), and a difference raises on
every rank. So does a difference in ``TPKERNELS_OVERLAP`` or in the measured tables, which say what
collectives there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tpkernels import envs
from tpkernels.comm.collectives import all_gather_bytes
from tpkernels.comm.group import Group, GroupLike, resolve_group
from tpkernels.errors import AgreementError, ConfigError

CHECKED_CALLS = 2  # how many calls "first" covers: the first, and one with warm state
_BLOCK = 1024  # words summed together; their sums are weighted by place, along both sides
_WEIGHTS = 1021  # a prime period of the weights, so that equal blocks do not line up
_tables: Callable[[], int] | None = None  # a number that differs where measured tables do
_OVERLAPS = ("auto", *envs.OVERLAP_STRATEGIES)  # sent as positions
_NOT_COMPARED, _UNKNOWN = -1, -2
_FIELDS = ("number of dimensions", "shape", "dtype", "values")


def check_agreement(values: Mapping[str, Tensor | None], group: GroupLike, what: str) -> None:
    """Raise :class:`AgreementError` on all ranks unless every named tensor agrees.

    Args:
        values: name -> tensor (None counts as a value), in the same order on all ranks.
        group: whose ranks must agree; a group of one always does.
        what: what is compared, for the message ("inputs of layer.0.mlp").

    Collective over the group: one all-gather of 32 bytes a tensor, whatever the tensors' size.
    """
    group = resolve_group(group)
    if group.size > 1 and values:
        _compare(values, group, what, _NOT_COMPARED)


def compare_tables_by(digest: Callable[[], int]) -> None:
    """``digest`` of the measured tables that collectives depend on, to be compared with inputs."""
    global _tables
    _tables = digest


def _compare(values: Mapping[str, Tensor | None], group: Group, what: str, overlap: int) -> None:
    """Compare ``values`` and, before them, the position of the overlap setting, and the tables."""
    digest = 0 if _tables is None or overlap == _NOT_COMPARED else _tables()
    count = torch.tensor([len(values), overlap, digest, 0], dtype=torch.int64)
    device = control_device(group)
    counts = all_gather_bytes(count.to(device), group.name).cpu()  # [R, 4]
    _check_overlap(counts[:, 1].tolist(), group, what)
    _check_tables(counts[:, 2].tolist(), group, what)
    if not bool((counts[:, 0] == len(values)).all()):
        raise AgreementError(
            f"{what}: the ranks of {group!r} name different numbers of tensors: "
            f"{counts[:, 0].tolist()}. Fix: give every rank of a group the same arguments"
        )
    if not values:
        return
    rows = torch.stack([_fingerprint(value) for value in values.values()])
    gathered = all_gather_bytes(rows.to(device), group.name).cpu()  # [R, T, 4]
    for index, name in enumerate(values):
        seen = gathered[:, index]
        for field, label in enumerate(_FIELDS):
            if bool((seen[:, field] != seen[0, field]).any()):
                other = [r for r in range(group.size) if seen[r, field] != seen[0, field]]
                mine = values[name]
                shown = "None" if mine is None else f"{tuple(mine.shape)} {mine.dtype}"
                raise AgreementError(
                    f"{what}: {name!r} differs in {label} between the ranks of one group: ranks "
                    f"{other} of the group differ from rank 0 (this is rank {group.rank}: "
                    f"{shown}). Fix: give every rank of a tensor-parallel group the same batch "
                    "and the same replicated weights (same seed or checkpoint); "
                    "TPKERNELS_CHECK=off skips the check"
                )


def _check_overlap(positions: list[int], group: Group, what: str) -> None:
    if len(set(positions)) == 1:
        return
    names = [_OVERLAPS[each] if each >= 0 else "not a strategy" for each in positions]
    raise AgreementError(
        f"{what}: TPKERNELS_OVERLAP differs between the ranks of {group!r}, and with it their "
        f"collectives: {', '.join(names)} by rank of the group (this is rank {group.rank}: "
        f"{names[group.rank]}). Fix: export the same TPKERNELS_OVERLAP on every rank, or on none"
    )


def _check_tables(digests: list[int], group: Group, what: str) -> None:
    if len(set(digests)) > 1:
        raise AgreementError(
            f"{what}: the overlap tables of the ranks of {group!r} differ, and with them their "
            f"collectives: digests {digests} by rank of the group (this is rank {group.rank}). "
            f"Fix: give every rank the same {envs.cache() / 'overlap'}, or none"
        )


def _asked_overlap() -> int:
    """The position of this rank's overlap setting.

    One that does not exist is compared as well: raising here, alone, would leave the others
    waiting. Where all ranks have such a one, the ops raise.
    """
    try:
        return _OVERLAPS.index(envs.overlap())
    except ConfigError:
        return _UNKNOWN


def control_device(group: Group) -> torch.device:
    """Where small tensors must be to be exchanged: CPU, unless the backend is NCCL alone."""
    if group.process_group is None:
        return torch.device("cpu")
    types = {device.type for device in group.process_group._device_types}
    return torch.device("cpu") if "cpu" in types else torch.device("cuda")


def _fingerprint(value: Tensor | None) -> Tensor:
    """Four int64: dimensions, hash of the shape, hash of the dtype, checksum of the bits."""
    if value is None:
        return torch.full((4,), -1, dtype=torch.int64)
    if hasattr(value, "to_local"):
        value = value.to_local()
    value = value.detach()
    header = [
        value.dim(),
        zlib.crc32(repr(tuple(value.shape)).encode()),
        zlib.crc32(str(value.dtype).encode()),
    ]
    checksum = (_checksum(value) + 2**63) % 2**64 - 2**63  # as int64 arithmetic wraps
    return torch.tensor([*header, checksum], dtype=torch.int64)


def _checksum(value: Tensor) -> int:
    """A checksum of the bits, at memory speed, in which a value's place counts."""
    if value.numel() == 0 or value.is_meta:
        return 0
    words, tail = _words(value)
    blocks = words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    rest = torch.cat([words[blocks.numel() :], tail])
    return sum(_weighted(sums) for sums in (blocks.sum(0), blocks.sum(1), rest))


def _words(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bits as int64 words, and what is left over."""
    raw = value.contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    return words.view(torch.int64), raw[whole:].to(torch.int64)


def _weighted(sums: Tensor) -> int:
    positions = torch.arange(sums.numel(), device=sums.device) % _WEIGHTS + 1
    return int((sums * positions).sum())


class InputCheck:
    """A module's check of its inputs, due in its first calls (``TPKERNELS_CHECK``).

    ``enabled`` is off for a module whose owner, or whose model's root, checks for it.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._seen = 0

    def __call__(self, values: Mapping[str, Tensor | None], group: Group, what: str) -> None:
        """Compare ``values`` between the ranks of ``group`` if this call is one to check.

        And what they ask for in ``TPKERNELS_OVERLAP``, which costs no collective more.

        Raises:
            AgreementError: on every rank, naming what differs.
        """
        if not self.enabled or group.size == 1 or torch.compiler.is_compiling():
            return
        mode = envs.check()
        if mode == "first" and self._seen < CHECKED_CALLS:
            self._seen += 1
        elif mode != "always":
            return
        _compare(values, group, f"inputs of {what}", _asked_overlap())
