"""How a GEMM and its collective share the time: chosen from shapes alone, equal on all ranks.

``off``       [gemm      ][collective      ]
``chunked``   [gemm 0][gemm 1][gemm 2]
                      [c 0   ][c 1   ][c 2   ]
``signaled``  [gemm      ............  ]
                      [c 0   ][c 1   ][c 2   ]

``fused``     [gemm + all-reduce]   partial sums straight in memory that all ranks read

How many chunks is looked up in a measured table (:mod:`tpkernels.overlap.table`), by rows, bytes a
row and what carries them. ``signaled`` counts finished tiles of one whole GEMM and is never chosen
by itself: between GPUs nothing was measured. ``fused`` is for CPU ranks that share memory
(``tpkernels.overlap.fused``), and chosen where rows are few.
"""

# M rows (tokens), N columns of the reduced output, R ranks

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpkernels import envs
from tpkernels.comm.direct import has_peers
from tpkernels.comm.group import group_by_name
from tpkernels.comm.lanes import lanes_of
from tpkernels.errors import ConfigError
from tpkernels.overlap.table import table_of

CHUNKS = 4  # where chunks were asked for and nothing was measured
TILE_ROWS = 128  # of the usual tiles: signaled chunks end with one
MOST_SIGNALED = 64  # chunks whose tiles are counted apart


@dataclass(frozen=True)
class OverlapPlan:
    """Strategy and chunk count of one op, with the reason, for the report."""

    strategy: str
    chunks: int
    reason: str

    def __str__(self) -> str:
        count = f" x{self.chunks}" if self.chunks > 1 else ""
        return f"{self.strategy}{count} ({self.reason})"

    def rows(self, total: int) -> list[tuple[int, int]]:
        """[start, end) rows of each chunk: ever shorter ones at the end (:func:`falling_cut`).

        Signaled ones are of one length, whole tiles where there are enough, and the last is
        shorter.
        """
        if self.strategy == "signaled":
            length = max(1, -(-total // self.chunks))
            if length > TILE_ROWS:
                length = -(-length // TILE_ROWS) * TILE_ROWS
            return [(start, min(start + length, total)) for start in range(0, total, length)]
        return falling_cut(total, self.chunks)


def falling_cut(total: int, count: int) -> list[tuple[int, int]]:
    """[start, end) of ``count`` parts of ``total``, none empty; the last three halve each time.

        compute: [        ][        ][        ][   ][ ][]
        comm:              [        ][        ][       ][   ][ ][]

    What nothing hides is the message of the last part. Slept computing of 92 ms beside 8.4 MB each
    way at 1 Gbit/s (68 ms alone): 8 even parts 108 ms, 10 of which the last four fall 103 ms; at
    0.5 Gbit/s beside 160 ms 179 and 175 ms.
    """
    plateau = max(1, count - 3)
    weights = [8] * plateau + [4, 2, 1][: count - plateau]
    spare, before, bounds, start = total - count, 0, [], 0
    if spare < 0:
        return even_cut(total, count)
    for index, weight in enumerate(weights):
        before += weight
        end = index + 1 + spare * before // sum(weights)
        bounds.append((start, end))
        start = end
    return bounds


def rising_cut(total: int, count: int) -> list[tuple[int, int]]:
    """:func:`falling_cut` from the other end: messages start early, and end beside other work."""
    return [(total - end, total - start) for start, end in reversed(falling_cut(total, count))]


def even_cut(total: int, count: int) -> list[tuple[int, int]]:
    """[start, end) of ``count`` parts of ``total``, none empty; the first ones are one longer."""
    bounds, start = [], 0
    for index in range(count):
        end = start + total // count + (index < total % count)
        if end > start:
            bounds.append((start, end))
        start = end
    return bounds


def carrier_of(group_name: str, device: torch.device) -> str:
    """What carries messages of a group of several on ``device``: lanes, tpshm, gloo, nccl.

    The first call for a group between hosts is collective: it connects the ranks.
    """
    if device.type != "cpu":
        return "nccl"
    if has_peers(group_name):
        return "tpshm"
    return "gloo" if lanes_of(group_name) is None else "lanes"


def plan_overlap(
    rows: int,
    row_bytes: int,
    group_name: str,
    device: torch.device,
    chunks: int | None = None,
    *,
    fused: str | None = "it is not built for this op",
    fused_rows: int = 0,
    signaled: str | None = None,
) -> OverlapPlan:
    """The plan for an op that sends ``rows`` rows of ``row_bytes`` each over the group.

    Args:
        rows, row_bytes: of the whole matrix that is reduced, scattered or gathered.
        chunks: overrides the choice.
        fused: why the fused ops cannot serve (``fused.refusal``), or None if they can.
        fused_rows: up to how many rows they are measured to be faster (``fused.most_rows``).
        signaled: why counted tiles cannot serve, or None if they can.

    Decided from rank-invariant numbers only.

    Raises:
        ConfigError: ``TPKERNELS_OVERLAP`` asks for a strategy that cannot serve.
    """
    asked = envs.overlap()
    if chunks is not None:
        return _given(chunks, rows, asked, signaled)
    if group_by_name(group_name) is None:
        return OverlapPlan("off", 1, "group of one")
    refused = {"fused": fused, "signaled": signaled}.get(asked)
    if refused is not None:
        raise ConfigError(
            f"TPKERNELS_OVERLAP={asked} was asked for and cannot serve: {refused}. Fix: unset "
            "TPKERNELS_OVERLAP"
        )
    if asked == "fused":
        return OverlapPlan("fused", 1, "TPKERNELS_OVERLAP=fused")
    if asked == "auto" and fused is None and 0 < rows <= fused_rows:
        return OverlapPlan("fused", 1, f"ranks share memory, and rows are at most {fused_rows}")
    if asked == "signaled":
        return OverlapPlan("signaled", min(CHUNKS, max(1, rows)), "TPKERNELS_OVERLAP=signaled")
    if asked == "off":
        return OverlapPlan("off", 1, "TPKERNELS_OVERLAP=off")
    return _measured(rows, row_bytes, group_name, device, asked)


def plan_sequence(
    rows: int,
    row_bytes: int,
    group_name: str,
    device: torch.device,
    chunks: int | None = None,
    *,
    signaled: str | None = "it counts tiles of reductions, and this gathers",
) -> OverlapPlan:
    """The plan for an op that gathers or scatters ``rows`` rows: ``chunks`` is that of each rank's.

    One chunk a rank is overlap too: one's own rows need no message. Arguments as for
    :func:`plan_overlap`; where ``signaled`` was asked for and cannot serve, the op is chunked and
    the plan says why: it is a strategy of reductions, and a layer has gathers too.
    """
    group = group_by_name(group_name)
    if group is None:
        return OverlapPlan("off", 1, "group of one")
    if chunks is not None:
        if chunks < 1:
            raise ConfigError(f"chunks={chunks} must be at least 1")
        return OverlapPlan("chunked", chunks, "chunks was given")
    if envs.overlap() == "signaled" and signaled is not None:
        return OverlapPlan("chunked", CHUNKS, f"TPKERNELS_OVERLAP=signaled: {signaled}")
    plan = plan_overlap(rows, row_bytes, group_name, device, signaled=signaled)
    if plan.strategy != "chunked":
        return plan
    return OverlapPlan("chunked", -(-plan.chunks // group.size()), plan.reason)


def plan_column_backward(
    rows: int, row_bytes: int, group_name: str, device: torch.device
) -> OverlapPlan:
    """The plan for dX's all-reduce beside the dW GEMMs.

    Strategies that serve other ops alone leave it whole, beside the dW GEMMs: ``chunked`` x1.
    """
    if group_by_name(group_name) is None:
        return OverlapPlan("off", 1, "group of one")
    asked = envs.overlap()
    if asked == "off":
        return OverlapPlan("off", 1, "TPKERNELS_OVERLAP=off")
    if asked in ("auto", "chunked"):
        plan = _measured(rows, row_bytes, group_name, device, asked)
        if plan.strategy == "chunked":
            return plan
        return OverlapPlan("chunked", 1, f"{plan.reason}; whole beside the dW GEMMs")
    return OverlapPlan("chunked", 1, "whole beside the dW GEMMs")


def _given(chunks: int, rows: int, asked: str, signaled: str | None) -> OverlapPlan:
    if chunks < 1:
        raise ConfigError(f"chunks={chunks} must be at least 1")
    count = max(1, min(chunks, rows))
    strategy = "signaled" if asked == "signaled" and signaled is None else "chunked"
    count = min(count, MOST_SIGNALED) if strategy == "signaled" else count
    return OverlapPlan(strategy if count > 1 else "off", count, "chunks was given")


def _measured(
    rows: int, row_bytes: int, group_name: str, device: torch.device, asked: str
) -> OverlapPlan:
    """What the table of the group's carrier says."""
    carrier = carrier_of(group_name, device)
    table = table_of(carrier)
    count = max(1, min(table.chunks(rows, row_bytes), rows))
    if asked == "chunked":
        count = count if count > 1 else min(CHUNKS, max(1, rows))
        return OverlapPlan("chunked" if count > 1 else "off", count, "TPKERNELS_OVERLAP=chunked")
    if count > 1:
        return OverlapPlan("chunked", count, f"measured over {carrier}")
    if not table.entries:
        return OverlapPlan("off", 1, f"chunks over {carrier} were not measured")
    return OverlapPlan("off", 1, f"chunks do not pay at this size over {carrier}")


def plan_gemm_all_reduce(
    rows: int,
    columns: int,
    itemsize: int,
    group_name: str,
    chunks: int | None = None,
    *,
    device: torch.device | None = None,
    fused: str | None = "no tensor to fuse for",
    fused_rows: int = 0,
) -> OverlapPlan:
    """The plan for ``gemm_all_reduce`` of [rows, columns] with ``itemsize`` bytes an element.

    ``device`` is where the tensors are (default: the CPU); the rest as for :func:`plan_overlap`.
    """
    return plan_overlap(
        rows,
        columns * itemsize,
        group_name,
        device or torch.device("cpu"),
        chunks,
        fused=fused,
        fused_rows=fused_rows,
    )
