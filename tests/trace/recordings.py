"""Recordings made by hand, whose numbers are known."""

from __future__ import annotations

import random
from typing import Any

from tpkernels.trace.clock import SyncPoint
from tpkernels.trace.recording import Interval, Recording

UNFRIENDLY = "a<b>\"q\"&'s'</script><script>throw 1</script>"


def operation(name: str, begin: int, end: int, of: int = -1, lane: int = 0, **details: Any):
    return Interval("operation", name, begin, end, lane, of, {"layer": "", **details})


def compute(begin: int, end: int, of: int = -1, lane: int = 0) -> Interval:
    return Interval("compute", "gemm", begin, end, lane, of, {})


def exposed(begin: int, end: int, of: int = -1, lane: int = 0) -> Interval:
    return Interval("exposed", "all_reduce", begin, end, lane, of, {})


def sent(begin: int, end: int, of: int = -1, size: int = 100, sent_bytes: int = -1) -> Interval:
    details = {"group": "0", "bytes": size, "sent_bytes": sent_bytes}
    return Interval("communication", "all_reduce", begin, end, 0, of, details)


def recording(intervals: list[Interval], rank: int = 0, world_size: int = 1, **more: Any):
    ended = max((each.end for each in intervals), default=0)
    given = {"begun": 0, "ended": ended, **more}
    return Recording(rank, world_size, "host", "cpu", intervals=intervals, **given)


def training_step(rank: int, world_size: int, layers: int) -> Recording:
    """Forward and backward of `layers` layers whose chunks overlap, each rank's clock its own."""
    draw = random.Random(rank)
    begun = at = 10**12 * (rank + 1)
    found: list[Interval] = []

    def run(name: str, layer: str) -> None:
        nonlocal at
        owner, begin = len(found), at
        found.append(operation(name, begin, begin))
        ends = []
        for _ in range(draw.choice([1, 2, 4])):
            length = draw.randint(80_000, 200_000)
            found.append(compute(at, at + length, owner))
            at += length
            ends.append(at + draw.randint(60_000, 230_000))
            found.append(sent(at, ends[-1], owner, 1 << 20))
        for end in ends:
            if end > at:
                found.append(exposed(at, end, owner))
                at = end
        details = {"layer": layer, "plan": f"chunked x{len(ends)}", "implementation": "onednn"}
        found[owner] = operation(name, begin, at, **details)
        at += draw.randint(1_000, 50_000)

    names = [f"encoder.layer.{i}.mlp" for i in range(layers - 1)] + [UNFRIENDLY]
    for name in names:
        run("mlp", name)
    for name in reversed(names):
        run("mlp.backward", name)
    clock = [SyncPoint(begun, 10**12 - begun, 12_000)] if rank else []
    return recording(found, rank, world_size, begun=begun, ended=at, clock=clock)
