"""Rows of the overlap benchmark that no rank measured, and ranks and networks that are not made."""

from __future__ import annotations

from pathlib import Path

import torch

from tpkernels.benchmarks import overlap_rows, row_files
from tpkernels.benchmarks.overlap_layers import ROW
from tpkernels.benchmarks.overlap_rows import Measured, OverlapRow, Result
from tpkernels.benchmarks.overlap_variants import COMM, COMM_OURS, DTENSOR, GEMM, OFF, OURS, chunked
from tpkernels.benchmarks.overlap_worker import Order
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.rows import Origin
from tpkernels.benchmarks.shaped_hosts import CannotShape, Host
from tpkernels.benchmarks.turns import Timed

ORIGIN = Origin("a CPU", "a CPU", 1, {"torch": "2"}, "abc", "2026-11-30")
CHUNKED = chunked(2)


def timed(name: str, *us: float) -> Timed:
    return Timed(name, [lambda: None], us=list(us), batch=4)


def measured(**changes: object) -> Measured:
    """A row-parallel layer whose arithmetic takes 100 us, beside 8000 bytes at 1 Gbit/s: 64 us."""
    results = [
        Result(OFF, "gemm_all_reduce: off (TPKERNELS_OVERLAP=off)", 1e-7, None, None),
        Result(DTENSOR, None, 1e-7, None, None),
        Result(OURS, "gemm_all_reduce: chunked x4 (measured over lanes)", 2e-7, None, None),
        Result(CHUNKED, None, 1.0, None, "wrong: y: relative error 1.0e+00"),
    ]
    parts = [timed(GEMM, *[100] * 6), timed(COMM, *[80] * 6), timed(COMM_OURS, *[70] * 6)]
    whole = [timed(OFF, *[180] * 6), timed(DTENSOR, *[240] * 6)]
    whole.append(timed(OURS, 120, 120, 120, 120, 126, 117))
    given = {
        "op": ROW,
        "shape": {"m": 10, "k": 40, "n": 200},
        "dtype": "float32",
        "wire_bytes": 8000,
        "gbits": 1.0,
        "wire_ratio": None,
        "timed": [*parts, *whole],
        "results": {each.name: each for each in results},
        "others_share": 0.01,
    }
    return Measured(**{**given, **changes})


def made(*, backend: str = "gloo", carrier: str = "lanes", **changes: object) -> list[OverlapRow]:
    ranks = Ranks(0, 2, torch.device("cpu"), None, 0, 2)
    return overlap_rows.make_rows(measured(**changes), backend, carrier, ORIGIN, ranks)


class Started:
    """Ranks that are not started: each run leaves `rows` and `cut`, then raises `error`."""

    def __init__(self) -> None:
        self.rows, self.cut, self.error = made(), "", None
        self.orders: list[Order] = []
        self.hosts: list[object] = []

    def run(self, command, hosts, **options):
        self.orders.append(Order.from_json(command[-2]))
        self.hosts.append(hosts)
        with Path(command[-1]).open("w") as stream:
            row_files.write(self.rows, stream)
            stream.write(self.cut)
        if self.error is not None:
            raise self.error


class Network:
    """A network that is not made, or says why."""

    reason: str | None = None

    def __init__(self, hosts: int, rate: str) -> None:
        self.hosts = [Host(("within", str(i)), "eth0", f"10.77.0.{i + 1}") for i in range(hosts)]

    def __enter__(self) -> Network:
        if self.reason:
            raise CannotShape(self.reason)
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
