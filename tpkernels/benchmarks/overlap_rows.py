"""The rows of the overlap benchmark: one a variant, written and read back as JSONL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpkernels.benchmarks import row_files
from tpkernels.benchmarks.overlap_limits import (
    comparable,
    effective_overlap,
    limit_us,
    median_ratio,
    wire_us,
)
from tpkernels.benchmarks.overlap_trace import Traced
from tpkernels.benchmarks.overlap_variants import COMM, COMM_OURS, DTENSOR, GEMM, OFF, OURS, PARTS
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.rows import Origin, digits
from tpkernels.benchmarks.turns import Timed

SCHEMA = "tpkernels-bench-overlap-1"
ONE_HOST = "one host"
_MAKE = "write it with `tpkernels bench overlap --out FILE`"


@dataclass(frozen=True)
class Result:
    """What became of a variant before it was timed; see OverlapRow."""

    name: str
    plan: str | None
    relative_error: float
    saved_bytes: int | None
    error: str | None


@dataclass(frozen=True)
class Measured:
    """One problem on one link.

    Attributes:
        wire_bytes: that a rank must send; gbits: at that rate, or None on one host.
        wire_ratio: what the rate was chosen for, where it was.
        timed: the parts alone and the variants, in turns; results: of the variants.
        others_share: of the cores, that other programs took.
        traced: of variants that were traced.
    """

    op: str
    shape: dict[str, int]
    dtype: str
    wire_bytes: int
    gbits: float | None
    wire_ratio: float | None
    timed: Sequence[Timed]
    results: Mapping[str, Result]
    others_share: float | None
    traced: Mapping[str, Traced] | None = None


@dataclass(frozen=True)
class OverlapRow:
    """One variant of one op at one shape on one link.

    Attributes:
        op: see overlap_layers.py and overlap_block.py; shape: {"m", "k", "n"} of a layer, {"m",
            "d", "h"} of a block, m tokens in all.
        link: `0.5 Gbit/s`, or `one host`; gbits: what each host may send; wire_ratio: what that
            was chosen for, wire time over the arithmetic's, or None.
        backend: of the ranks' group; carrier: what carries ours (see overlap/plan.py).
        implementation: see overlap_variants.py; plan: as ours
            printed it.
        us, p20_us, p80_us: a call, on the slowest rank.
        gemm_us, comm_us: of the arithmetic alone, of the fastest way to communicate alone, in the
            same run; wire_us: wire_bytes, which a rank must send, at the link's rate.
        limit_us: the larger of gemm_us and wire_us; percent_of_limit: 100 limit_us / us.
        effective_overlap: (gemm_us + comm_us - us) / min(gemm_us, comm_us).
        comparable: whether wire_us is 0.5 to 1.0 of gemm_us: the rows that are judged by it.
        ratio_to_off: us / that of `off`, the median over the turns, `_low` and `_high` its 95%
            interval: below 1 is faster than without overlap.
        dtensor_ratio: dtensor's us / us: above 1 is faster than DTensor.
        saved_bytes: kept by a rank for the backward pass (blocks).
        traced_us, exposed_us: with --trace, of rank 0, by the clock while traced, and that it
            waited and computed nothing by the trace (overlap_trace.py).
        repetitions: turns; calls: that each is the mean of.
        relative_error: against float64, the largest of the ranks'.
        pinned: each rank has a core of its own; others_share: of all cores, that other programs
            took meanwhile. error: why there is no time, or None.
    """

    op: str
    shape: dict[str, int]
    dtype: str
    world: int
    link: str
    gbits: float | None
    wire_ratio: float | None
    backend: str
    carrier: str
    implementation: str
    plan: str | None
    us: float | None
    p20_us: float | None
    p80_us: float | None
    gemm_us: float
    comm_us: float
    wire_bytes: int
    wire_us: float | None
    limit_us: float
    percent_of_limit: float | None
    effective_overlap: float | None
    comparable: bool
    ratio_to_off: float | None
    ratio_to_off_low: float | None
    ratio_to_off_high: float | None
    dtensor_ratio: float | None
    saved_bytes: int | None
    traced_us: float | None
    exposed_us: float | None
    repetitions: int
    calls: int
    relative_error: float | None
    pinned: bool
    others_share: float | None
    error: str | None
    device: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    schema: str = SCHEMA


def make_rows(
    measured: Measured, backend: str, carrier: str, origin: Origin, ranks: Ranks
) -> list[OverlapRow]:
    """A row for each part alone, then for each variant, timed or not."""
    timed = {each.name: each for each in measured.timed}
    gemm = timed[GEMM].percentiles[1]
    comm = min(timed[name].percentiles[1] for name in (COMM, COMM_OURS) if name in timed)
    gbits = measured.gbits
    wire = None if gbits is None else wire_us(measured.wire_bytes, gbits)
    limit = limit_us(gemm, wire)
    off, dtensor = timed.get(OFF), timed.get(DTENSOR)
    found = []
    for name in (*(name for name in PARTS if name in timed), *measured.results):
        each, result = timed.get(name), measured.results.get(name)
        traced = (measured.traced or {}).get(name)
        p20, us, p80 = each.percentiles if each else (None, None, None)
        whole = us is not None and result is not None  # no part
        to_off: tuple[float | None, float | None, float | None] = (None, None, None)
        if whole and each and off and each is not off:
            to_off = median_ratio(each.us, off.us)
        found.append(
            OverlapRow(
                op=measured.op,
                shape=measured.shape,
                dtype=measured.dtype,
                world=ranks.world,
                link=ONE_HOST if gbits is None else f"{gbits:.4g} Gbit/s",
                gbits=digits(gbits),
                wire_ratio=measured.wire_ratio,
                backend=backend,
                carrier=carrier,
                implementation=name,
                plan=result.plan if result else None,
                us=digits(us),
                p20_us=digits(p20),
                p80_us=digits(p80),
                gemm_us=digits(gemm) or 0.0,
                comm_us=digits(comm) or 0.0,
                wire_bytes=measured.wire_bytes,
                wire_us=digits(wire),
                limit_us=digits(limit) or 0.0,
                percent_of_limit=digits(100 * limit / us) if whole and us else None,
                effective_overlap=digits(effective_overlap(gemm, comm, us))
                if whole and us
                else None,
                comparable=comparable(gemm, wire),
                ratio_to_off=digits(to_off[0]),
                ratio_to_off_low=digits(to_off[1]),
                ratio_to_off_high=digits(to_off[2]),
                dtensor_ratio=digits(dtensor.percentiles[1] / us)
                if whole and us and dtensor and each is not dtensor
                else None,
                saved_bytes=result.saved_bytes if result else None,
                traced_us=digits(traced.us) if traced else None,
                exposed_us=digits(traced.exposed_us) if traced else None,
                repetitions=len(each.us) if each else 0,
                calls=each.batch if each else 0,
                relative_error=digits(result.relative_error) if result else None,
                pinned=ranks.core is not None,
                others_share=digits(measured.others_share),
                error=result.error if result else None,
                device=origin.device,
                threads=1,
                versions=origin.versions,
                commit=origin.commit,
                date=origin.date,
            )
        )
    return found


def size_of(row: OverlapRow) -> str:
    """`1024x2048x512`, or of a block `1024 tokens, d=512`."""
    shape = row.shape
    if "d" in shape:
        return f"{shape['m']} tokens, d={shape['d']}"
    return "x".join(str(shape[name]) for name in ("m", "k", "n"))


def line(found: Sequence[OverlapRow]) -> str:
    """One measurement in a line, for who waits."""
    first = found[0]
    times = [
        f"{row.implementation} {row.us / 1e3:.1f}" if row.us else f"{row.implementation} -"
        for row in found
    ]
    ours = next((row for row in found if row.implementation == OURS), None)
    hidden = ""
    if ours is not None and ours.effective_overlap is not None:
        hidden = f"; effective overlap {ours.effective_overlap:.0%}"
    return f"  {first.link}, {first.backend}, ms: {', '.join(times)}{hidden}"


def read(path: Path) -> list[OverlapRow]:
    """The rows of a file.

    Raises:
        ConfigError: naming file and line: not there, or not rows of this benchmark.
    """
    return row_files.read(path, OverlapRow, SCHEMA, _MAKE)
