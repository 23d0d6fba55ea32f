"""How a GEMM and its collective share the time: chosen from shapes alone, equal on all ranks.

``off``       [gemm      ][all-reduce      ]
``chunked``   [gemm 0][gemm 1][gemm 2]
                      [ar 0  ][ar 1  ][ar 2  ]
``signaled``  [gemm      ............  ]
                      [ar 0  ][ar 1  ][ar 2  ]

``fused``     [gemm + all-reduce]   partial sums straight in memory that all ranks read

``signaled`` is for CUDA, and never chosen by itself: between GPUs nothing was measured. ``fused``
is for CPU ranks that share memory (``tpkernels.overlap.fused``), and chosen where rows are few.
"""

# M rows (tokens), N columns of the reduced output, R ranks

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

from tpkernels import envs
from tpkernels.comm.group import group_by_name
from tpkernels.errors import ConfigError

# Measured on Gloo between two hosts, fp32, M 1024-4096 rows, N 512-1024: over 0.5 and 1 Gbit/s, 4
# chunks took at most 11% longer than the best of 2, 4 and 8 and always beat none; over 4 Gbit/s,
# where 2 MiB take 5 ms, chunking gained nothing. Nothing smaller was measured, so nothing smaller
# than the smallest of these is cut: 1024 x 512 x 4 bytes, in chunks of 256 rows.
CHUNKS = 4
MIN_BYTES_BETWEEN_HOSTS = 2 << 20
MIN_ROWS_PER_CHUNK = 256
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
        """[start, end) rows of each chunk.

        When uneven, the first ones are a row longer; signaled ones are of one length, whole tiles
        where there are enough, and the last is shorter.
        """
        if self.strategy == "signaled":
            length = max(1, -(-total // self.chunks))
            if length > TILE_ROWS:
                length = -(-length // TILE_ROWS) * TILE_ROWS
            return [(start, min(start + length, total)) for start in range(0, total, length)]
        bounds, start = [], 0
        for index in range(self.chunks):
            end = start + total // self.chunks + (index < total % self.chunks)
            if end > start:
                bounds.append((start, end))
            start = end
        return bounds


def plan_gemm_all_reduce(
    rows: int,
    columns: int,
    itemsize: int,
    group_name: str,
    chunks: int | None = None,
    *,
    fused: str | None = "no tensor to fuse for",
    fused_rows: int = 0,
) -> OverlapPlan:
    """The plan for ``gemm_all_reduce`` of [rows, columns] with ``itemsize`` bytes an element.

    Args:
        chunks: overrides the choice.
        fused: why the fused ops cannot serve (``fused.refusal``), or None if they can.
        fused_rows: up to how many rows they are measured to be faster (``fused.most_rows``).

    Decided from rank-invariant numbers only.

    Raises:
        ConfigError: ``TPKERNELS_OVERLAP`` asks for a strategy that cannot serve.
    """
    asked = envs.overlap()
    if chunks is not None:
        if chunks < 1:
            raise ConfigError(f"chunks={chunks} must be at least 1")
        count = max(1, min(chunks, rows))
        strategy = asked if asked == "signaled" else "chunked"
        count = min(count, MOST_SIGNALED) if strategy == "signaled" else count
        return OverlapPlan(strategy if count > 1 else "off", count, "chunks was given")
    group = group_by_name(group_name)
    if group is None:
        return OverlapPlan("off", 1, "group of one")
    if asked == "fused":
        if fused is not None:
            raise ConfigError(
                f"TPKERNELS_OVERLAP=fused was asked for and cannot serve: {fused}. Fix: unset "
                "TPKERNELS_OVERLAP"
            )
        return OverlapPlan("fused", 1, "TPKERNELS_OVERLAP=fused")
    if asked == "auto" and fused is None and 0 < rows <= fused_rows:
        return OverlapPlan("fused", 1, f"ranks share memory, and rows are at most {fused_rows}")
    if asked == "signaled":
        return OverlapPlan("signaled", min(CHUNKS, max(1, rows)), "TPKERNELS_OVERLAP=signaled")
    if asked == "off":
        return OverlapPlan("off", 1, "TPKERNELS_OVERLAP=off")
    most = max(1, rows // MIN_ROWS_PER_CHUNK)
    if asked == "chunked":
        count = min(CHUNKS, max(1, rows))
        return OverlapPlan("chunked", count, "TPKERNELS_OVERLAP=chunked")
    if not _between_hosts(group):
        return OverlapPlan("off", 1, "ranks share a host: chunking not measured to pay")
    if rows * columns * itemsize < MIN_BYTES_BETWEEN_HOSTS or most == 1:
        return OverlapPlan("off", 1, "too small for chunks to pay")
    return OverlapPlan("chunked", min(CHUNKS, most), "ranks on several hosts")


def _between_hosts(group: dist.ProcessGroup) -> bool:
    """Whether the group spans hosts, by torchrun's numbering; without torchrun it does not."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local_world < 1:
        return False
    return len({rank // local_world for rank in dist.get_process_group_ranks(group)}) > 1
