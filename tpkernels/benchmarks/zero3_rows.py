"""The rows of the ZeRO-3 benchmark: one a variant and pass, written and read back as JSONL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpkernels.benchmarks import row_files
from tpkernels.benchmarks.rows import Origin, digits
from tpkernels.benchmarks.shaped_hosts import UNSHAPED
from tpkernels.benchmarks.timers import percentile
from tpkernels.benchmarks.zero3_limits import Limit, Traffic, limit, sharded
from tpkernels.benchmarks.zero3_model import MODELS, sizes
from tpkernels.benchmarks.zero3_variants import COMPUTE, DDP, Plan

SCHEMA = "tpkernels-bench-zero3-1"
FORWARD, STEP = "zero3_forward", "zero3_forward_backward"
# Counters of ZeroManager.stats()
_GATHERED, _REDUCED, _PEAK = "gather_bytes_sent", "reduce_bytes_sent", "peak_gathered_bytes"


@dataclass(frozen=True)
class Zero3Row:
    """One variant, forward or forward and backward, of one model.

    Attributes:
        op: `zero3_forward` or `zero3_forward_backward`.
        shape: {"blocks", "d_model", "tokens" of a rank}; `model`: its name.
        link: what each host may send, or `unshaped`: ranks of one host, over loopback.
        nominal_mbs, measured_mbs: MB/s of the link as it was asked for, and of a bare send of 8 MB.
        blocks_per_unit, unit_bytes, prefetch_bytes: how ours, FSDP2 and DeepSpeed cut the model,
            and how far ahead ours may gather.
        us, p20_us, p80_us: of the slowest rank, over the rounds; None where not measured.
        compute_us: that of compute alone in the same run; `core_share`: how much of its core it
            had: much less than 1 where other programs ran.
        wire_bytes: what its schedule must send a rank, as ours counts it; `full_wire_bytes`: what
            gathering in forward and in backward must.
        sent_bytes: what the network interface sent in forward and backward; None over loopback.
        first_us, last_us: the formula's first gather and last reduce-scatter.
        limit_us: of its own schedule; `full_limit_us`: of gathering in both passes, for those that
            shard parameters.
        percent_of_limit: 100 limit_us / us.
        peak_gathered_bytes, stats: ours' own counters, a step.
        relative_error: against compute alone. error: why there is no time, or None.
    """

    op: str
    shape: dict[str, int]
    model: str
    dtype: str
    world: int
    link: str
    nominal_mbs: float | None
    measured_mbs: float
    implementation: str
    blocks_per_unit: int
    unit_bytes: int
    prefetch_bytes: int | None
    us: float | None
    p20_us: float | None
    p80_us: float | None
    repetitions: int
    compute_us: float | None
    core_share: float | None
    wire_bytes: float | None
    full_wire_bytes: float
    sent_bytes: float | None
    first_us: float | None
    last_us: float | None
    limit_us: float | None
    full_limit_us: float | None
    percent_of_limit: float | None
    peak_gathered_bytes: float | None
    stats: dict[str, float] | None
    relative_error: float | None
    error: str | None
    device: str
    threads: int
    versions: dict[str, str]
    commit: str
    date: str
    schema: str = SCHEMA


def make_rows(
    record: Mapping[str, Any], link: str, nominal_mbs: float | None, origin: Origin
) -> list[Zero3Row]:
    """The rows of one model, from what rank 0 wrote: all of forward, then all of the step."""
    return [
        _row(op, outcome, record, link, nominal_mbs, origin)
        for op in (FORWARD, STEP)
        for outcome in record["outcomes"]
    ]


def _row(
    op: str,
    outcome: Mapping[str, Any],
    record: Mapping[str, Any],
    link: str,
    nominal_mbs: float | None,
    origin: Origin,
) -> Zero3Row:
    shape, world, bandwidth = MODELS[record["model"]], record["world"], record["bandwidth"]
    plan, step = Plan(**outcome["plan"]), op == STEP
    cut = sizes(shape, plan.blocks_per_unit)
    full = sharded(cut.units, cut.root, world)
    times, stats = outcome["step_us" if step else "forward_us"], outcome["stats"]
    compute_us = _compute_us(record, op)
    traffic = Traffic(**outcome["traffic"]) if outcome["traffic"] else None
    if traffic is not None and stats and _GATHERED in stats and _REDUCED in stats:
        # It may keep units from forward to backward: then it has less to gather there.
        backward = max(0.0, stats[_GATHERED] + stats[_REDUCED] - traffic.forward)
        traffic = Traffic(traffic.forward, backward, traffic.first, traffic.last)
    own = whole = None
    if compute_us is not None and traffic is not None:
        own = limit(traffic, compute_us, bandwidth, backward=step)
        if plan.kind not in (COMPUTE, DDP):
            whole = limit(full, compute_us, bandwidth, backward=step)
    us = percentile(times, 50) if times else None
    wire = None if traffic is None else traffic.total if step else traffic.forward
    sent = percentile(outcome["sent"], 50) if outcome["sent"] and link != UNSHAPED else None
    return Zero3Row(
        op=op,
        shape={"blocks": shape.blocks, "d_model": shape.d_model, "tokens": shape.tokens},
        model=shape.name,
        dtype="float32",
        world=world,
        link=link,
        nominal_mbs=nominal_mbs,
        measured_mbs=digits(bandwidth / 1e6) or 0.0,
        implementation=plan.name,
        blocks_per_unit=plan.blocks_per_unit,
        unit_bytes=cut.units[0],
        prefetch_bytes=plan.prefetch_bytes,
        us=digits(us),
        p20_us=digits(percentile(times, 20)) if times else None,
        p80_us=digits(percentile(times, 80)) if times else None,
        repetitions=len(times),
        compute_us=digits(compute_us),
        core_share=_core_share(record),
        wire_bytes=wire,
        full_wire_bytes=full.total if step else full.forward,
        sent_bytes=sent if step else None,
        first_us=digits(own.first_us if own else None),
        last_us=digits(own.last_us if own else None),
        limit_us=digits(own.us if own else None),
        full_limit_us=digits(whole.us if whole else None),
        percent_of_limit=_percent(own, us),
        peak_gathered_bytes=(stats or {}).get(_PEAK),
        stats=stats,
        relative_error=digits(outcome["relative_error"]),
        error=outcome["error"],
        device=origin.device,
        threads=1,
        versions=origin.versions,
        commit=origin.commit,
        date=origin.date,
    )


def _compute_us(record: Mapping[str, Any], op: str) -> float | None:
    """Compute alone's median in this run."""
    for outcome in record["outcomes"]:
        times = outcome["step_us" if op == STEP else "forward_us"]
        if outcome["plan"]["kind"] == COMPUTE and times:
            return percentile(times, 50)
    return None


def _core_share(record: Mapping[str, Any]) -> float | None:
    """Compute alone's processor time over its time."""
    for outcome in record["outcomes"]:
        if outcome["plan"]["kind"] == COMPUTE and outcome["step_us"]:
            return digits(sum(outcome["cpu_us"]) / sum(outcome["step_us"]))
    return None


def _percent(own: Limit | None, us: float | None) -> float | None:
    return digits(100 * own.us / us) if own is not None and us else None


def read(path: Path) -> list[Zero3Row]:
    """The rows of a file.

    Raises:
        ConfigError: naming file and line: not there, or not rows of this benchmark.
    """
    return row_files.read(path, Zero3Row, SCHEMA, _MAKE)


_MAKE = "write it with `tpkernels bench zero3 --out FILE`"


def of_model(found: Sequence[Zero3Row]) -> dict[str, list[tuple[Zero3Row, Zero3Row]]]:
    """(forward, step) of each variant, by model, hosts and link; the latest of each."""
    tables: dict[str, dict[str, dict[str, Zero3Row]]] = {}
    for row in found:
        title = f"{row.model}, {row.world} hosts, {row.link}"
        tables.setdefault(title, {}).setdefault(row.implementation, {})[row.op] = row
    return {
        title: [(each[FORWARD], each[STEP]) for each in by_name.values() if len(each) == 2]
        for title, by_name in tables.items()
    }
