"""`tpkernels bench overlap --tune`: into how many chunks it pays to cut, kept in the user's table.

The row-parallel layer, whole and in chunks, over a grid of rows and widths on every link. A count
of chunks is kept where on no link it is more than 3% slower than the whole; of those the one that
is fastest in the geometric mean over the links, if it gains 2%. See tpkernels/overlap/table.py.
"""

# M rows, K this rank's part of the wide dimension, N columns on the wire

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from math import exp, log

import torch

from tpkernels.benchmarks.overlap_rows import OverlapRow
from tpkernels.benchmarks.overlap_variants import OFF, chunked, chunks_of
from tpkernels.errors import ConfigError
from tpkernels.overlap import table
from tpkernels.overlap.table import Entry, Table

CHUNKS = (2, 4, 8, 16)
MOST_SLOWER = 1.03
LEAST_GAIN = 0.98  # in the mean over the links: less is no more than the noise of a shared machine
# K = 2 N: the second layer of an MLP that is 4 N wide, between 2 ranks.
SHAPES = tuple((m, 2 * n, n) for n in (256, 512, 1024) for m in (256, 512, 1024, 2048, 4096))


def check(parsed: Namespace) -> None:
    """Refuse what --tune chooses by itself.

    Raises:
        ConfigError: naming the option.
    """
    for option in ("cases", "widths", "variants", "wire_ratio", "trace", "read"):
        if getattr(parsed, option):
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"--tune and {name} exclude each other: it measures the row-parallel layer whole "
                "and in chunks. Fix: leave one of them out"
            )


def variants(parsed: Namespace) -> list[str]:
    return [OFF, *map(chunked, parsed.chunks or CHUNKS)]


def entries(found: Sequence[OverlapRow]) -> dict[str, list[Entry]]:
    """By what carries the messages: the best count of chunks of each size; 1 where none pays."""
    ratios: dict[tuple[str, int, int], dict[int, list[float]]] = {}
    links: dict[tuple[str, int, int], int] = {}
    for row in found:
        itemsize = getattr(torch, row.dtype).itemsize
        key = (row.carrier, row.shape["m"], row.shape["n"] * itemsize)
        count = chunks_of(row.implementation)
        if row.implementation == OFF:
            links[key] = links.get(key, 0) + 1
        elif count is not None and row.ratio_to_off is not None:
            ratios.setdefault(key, {}).setdefault(count, []).append(row.ratio_to_off)
    best: dict[str, list[Entry]] = {}
    for (carrier, rows, row_bytes), measured in links.items():
        counts = ratios.get((carrier, rows, row_bytes), {})
        found_here = Entry(rows, row_bytes, _fastest(counts, measured))
        best.setdefault(carrier, []).append(found_here)
    return best


def _fastest(ratios: dict[int, list[float]], links: int) -> int:
    """Of the counts that were measured on all links and lose on none of them."""
    means = {
        count: exp(sum(map(log, each)) / len(each))
        for count, each in ratios.items()
        if len(each) == links and max(each) <= MOST_SLOWER
    }
    count = min(means, key=means.__getitem__, default=1)
    return count if means.get(count, 1.0) <= LEAST_GAIN else 1


def keep(found: Sequence[OverlapRow], how: str) -> list[str]:
    """Write the user's tables; a line about each."""
    lines = []
    for carrier, each in entries(found).items():
        mine = [row for row in found if row.carrier == carrier]
        measured = {
            "device": mine[0].device,
            "torch": mine[0].versions["torch"],
            "date": mine[0].date,
            "how": how,
            "links": list(dict.fromkeys(row.link for row in mine)),
        }
        path = table.user_folder() / f"{carrier}.json"
        table.write(Table(carrier, tuple(each), measured), path)
        cut = sum(entry.chunks > 1 for entry in each)
        lines.append(f"wrote {path}: {len(each)} sizes, chunks pay at {cut} of them")
    return lines
