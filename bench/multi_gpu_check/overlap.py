"""GEMM and collective between GPUs: plain, DTensor, PyTorch's async TP and ours, in turns.

    overlap.py cuda|cpu --out results.jsonl [--quick] [--seconds S] [--commit TEXT]

One row a variant and shape. The limit of a shape is the longer of its GEMM alone and its collective
alone; effective overlap is (T_gemm + T_collective - T) / min(T_gemm, T_collective). A time is the
slowest rank's, p20, p50 and p80 of the turns. A variant that is wrong or cannot run has its reason.
"""

# M rows, K in features of this rank, N out features of this rank, R ranks

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layers import CASES, Case, Variant, variants_of
from ranks import say, start, synchronize
from torch import Tensor

# (model, d_model, d_ff): arXiv:2005.14165 table 2.1, arXiv:2307.09288
MODELS = (("gpt3-13b", 5120, 20480), ("llama-70b", 8192, 28672))
ROWS = {"cuda": (2048, 8192), "quick": (8192,), "cpu": (64,)}
TURNS = {"cuda": 25, "cpu": 3}
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # norm of the difference: no wrong rows


def main() -> int:
    """0 unless a variant of ours was wrong or could not run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, required=True, help="rows are appended")
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins after it")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    device = start(options.device)
    cases = list(_cases(options.device, options.quick))
    wrong = 0
    for number, case in enumerate(cases):
        left = torch.tensor(float(until - time.monotonic() > 0), device=device)
        dist.broadcast(left, 0)  # one rank's clock decides for all
        if not left.item():
            say(f"overlap: {len(cases) - number} of {len(cases)} cases not measured, no time left")
            break
        rows = _measured(case, device, options.device)
        wrong += sum(row["ours"] and bool(row["error"]) and not row["refused"] for row in rows)
        if dist.get_rank() == 0:
            with options.out.open("a") as file:
                for row in rows:
                    file.write(json.dumps({**row, **_origin(options, device)}) + "\n")
            for row in rows:
                print(f"{case}, {row['implementation']}: {_shown(row)}", flush=True)
    dist.destroy_process_group()
    return int(wrong > 0)


def _cases(kind: str, quick: bool) -> list[Case]:
    world = dist.get_world_size()
    if kind == "cpu":
        return [Case(op, "tiny", 64, 32 * world, 32, torch.float32) for op in CASES]
    rows = ROWS["quick" if quick else "cuda"]
    return [
        Case(op, model, m, ff // world * world, d, torch.bfloat16)
        for model, d, ff in MODELS
        for m in rows
        for op in CASES
    ]


def _measured(case: Case, device: torch.device, kind: str) -> list[dict[str, Any]]:
    variants = variants_of(case, device)
    truth = variants["plain"].run()
    running: dict[str, Variant] = {}
    errors: dict[str, str] = {}
    for name, variant in variants.items():
        error = _first_call(variant, truth, LIMITS[case.dtype])
        if _any_rank(error is not None, device):
            errors[name] = error or "another rank failed"
        else:
            running[name] = variant
    times: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(TURNS[kind] + 1):
        for name, variant in running.items():
            us = _timed(variant, device)
            if turn:  # the first one warms up
                times[name].append(us)
    compute, wire = (statistics.median(times[name]) for name in ("gemm", "collective"))
    limit, plain = max(compute, wire), statistics.median(times["plain"])
    rows = []
    for name, variant in variants.items():
        row: dict[str, Any] = {
            "op": case.op,
            "model": case.model,
            "shape": {"m": case.m, "k": case.ff, "n": case.d},
            "dtype": str(case.dtype).removeprefix("torch."),
            "world": dist.get_world_size(),
            "implementation": name,
            "ours": variant.ours,
            "note": variant.note,
            "error": errors.get(name),
            "refused": "cannot serve" in errors.get(name, ""),  # by name, as it should
            "us": None,
        }
        if name in times:
            us = statistics.median(times[name])
            deciles = statistics.quantiles(times[name], n=5) if len(times[name]) > 1 else [us] * 4
            row |= {"us": us, "us_p20": deciles[0], "us_p80": deciles[-1]}
            row |= {"ratio_to_plain": us / plain, "compute_us": compute, "wire_us": wire}
            row |= {"limit_us": limit, "percent_of_limit": 100 * limit / us}
            row["overlap"] = (compute + wire - us) / min(compute, wire)
        rows.append(row)
    return rows


def _first_call(variant: Variant, truth: Tensor, limit: float) -> str | None:
    """Why the variant is not timed, or None."""
    try:
        found = variant.run()
        if variant.part:  # the GEMM or the collective alone
            return None
        error = (found.float() - truth.float()).norm() / truth.float().norm()
        return None if float(error) <= limit else f"wrong: off by {float(error):.1e}"
    except Exception as failed:  # whatever a compiler or a backend raises is this row's result
        lines = str(failed).strip().splitlines() or [""]
        return f"{type(failed).__name__}: {lines[0]}"[:200]


def _any_rank(failed: bool, device: torch.device) -> bool:
    count = torch.tensor(float(failed), device=device)
    dist.all_reduce(count)
    return bool(count.item())


def _timed(variant: Variant, device: torch.device) -> float:
    """Microseconds of one call, of the slowest rank, all starting together."""
    dist.barrier()
    synchronize(device)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        variant.run()
        end.record()
        end.synchronize()
        us = begin.elapsed_time(end) * 1e3
    else:
        began = time.perf_counter()
        variant.run()
        us = (time.perf_counter() - began) * 1e6
    slowest = torch.tensor(us, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _origin(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "commit": options.commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _shown(row: dict[str, Any]) -> str:
    if row["us"] is None:
        return f"not measured: {row['error']}"
    note = f" ({row['note']})" if row["note"] else ""
    return f"{row['us']:.0f} us, {row['percent_of_limit']:.0f}% of the limit{note}"


if __name__ == "__main__":
    raise SystemExit(main())
