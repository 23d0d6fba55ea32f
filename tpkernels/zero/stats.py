"""What a manager counted: as a dict for JSON, and as one page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpkernels.zero.byte_sizes import UNLIMITED, format_bytes

if TYPE_CHECKING:
    from tpkernels.zero.engine import Engine


def collect_stats(engine: Engine) -> dict[str, Any]:
    """Counters since the start, or since ``reset_stats``; bytes, seconds, numbers of gathers."""
    scheduler, counters = engine.scheduler, engine.scheduler.counters
    rows = []
    for unit in engine.units:
        hits, misses, wasted = scheduler.unit_counters(unit.index)
        charged = unit.bytes(resident=False, held=False)
        rows.append(
            {
                "name": unit.name,
                "gathered_bytes": charged.gathered,
                "staging_bytes": charged.staging,
                "gradient_bytes": charged.gradients,
                "reduce_input_bytes": charged.reduce_input,
                "hits": hits,
                "misses": misses,
                "wasted": wasted,
                "stall_seconds": unit.stall_seconds,
                "bytes_sent": unit.gather_bytes_sent + unit.reduce_bytes_sent,
            }
        )
    config = engine.config
    return {
        "stage": config.stage,
        "ranks": engine.group.size,
        "replicas": engine.replicas.size if engine.replicas is not None else 1,
        "scheduler": scheduler.implementation,
        "prefetch_bytes": _bound(engine.prefetch_bytes),
        "max_live_bytes": _bound(engine.max_live_bytes),
        "idle_bytes": scheduler.idle_bytes,
        "gathered_bytes": scheduler.gathered_bytes,
        "live_bytes": scheduler.live_bytes,
        "peak_idle_bytes": counters.peak_idle_bytes,
        "peak_gathered_bytes": counters.peak_gathered_bytes,
        "peak_live_bytes": counters.peak_live_bytes,
        "gathers": counters.gathers,
        "hits": counters.hits,
        "misses": counters.misses,
        "wasted": counters.wasted,
        "stall_seconds": sum(unit.stall_seconds for unit in engine.units),
        "gather_bytes_sent": sum(unit.gather_bytes_sent for unit in engine.units),
        "reduce_bytes_sent": sum(unit.reduce_bytes_sent for unit in engine.units),
        "resident_bytes": _resident_bytes(engine),
        "units": rows,
    }


def format_stats(stats: dict[str, Any]) -> str:
    """One page: the totals, then one line a unit."""

    def size(value: int | None) -> str:
        return "no bound" if value is None else format_bytes(value)

    used = stats["hits"] + stats["misses"]
    share = f"{stats['hits'] / used:.0%}" if used else "-"
    lines = [
        f"ZeRO stage {stats['stage']}, {stats['ranks']} ranks"
        + (f" x {stats['replicas']} replicas" if stats["replicas"] > 1 else "")
        + f", {stats['scheduler']} scheduler",
        f"  gathered, not in use   now {size(stats['idle_bytes'])}, peak "
        f"{size(stats['peak_idle_bytes'])}, bound {size(stats['prefetch_bytes'])}",
        f"  all gathered           now {size(stats['gathered_bytes'])}, peak "
        f"{size(stats['peak_gathered_bytes'])}",
        f"  with gradients         now {size(stats['live_bytes'])}, peak "
        f"{size(stats['peak_live_bytes'])}, bound {size(stats['max_live_bytes'])}",
        f"  resident on this rank  {size(stats['resident_bytes'])} of master weights and gradients",
        f"  gathers                {stats['gathers']}; ready when needed {stats['hits']} of {used} "
        f"({share}), wasted {stats['wasted']}",
        f"  sent                   {size(stats['gather_bytes_sent'])} gathering, "
        f"{size(stats['reduce_bytes_sent'])} reducing",
        f"  waited                 {stats['stall_seconds']:.3f} s",
        "",
        f"  {'unit':<32} {'whole':>12} {'hits':>7} {'misses':>7} {'wasted':>7} {'waited':>10}"
        f" {'sent':>12}",
    ]
    for row in stats["units"]:
        name = row["name"] if len(row["name"]) <= 32 else f"...{row['name'][-29:]}"
        lines.append(
            f"  {name:<32} {size(row['gathered_bytes']):>12} {row['hits']:>7} {row['misses']:>7} "
            f"{row['wasted']:>7} {row['stall_seconds']:>8.3f} s {size(row['bytes_sent']):>12}"
        )
    return "\n".join(lines)


def _bound(value: int | None) -> int | None:
    return None if value is None or value >= UNLIMITED else value


def _resident_bytes(engine: Engine) -> int:
    tensors = [
        tensor
        for unit in engine.units
        for buffer in unit.buffers
        for tensor in (buffer.master, buffer.gradient)
        if tensor is not None
    ]
    return sum(tensor.nbytes for tensor in tensors)
