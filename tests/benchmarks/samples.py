"""Rows as a run writes them, with times that are made up."""

from __future__ import annotations

from dataclasses import replace

from tpkernels.benchmarks.rows import Row

EAGER = Row(
    op="gemm_gelu",
    shape={"m": 2048, "n": 6400, "k": 1600},
    model="gpt2-xl",
    tp=1,
    world=1,
    act="gelu_tanh",
    dtype="bfloat16",
    implementation="eager",
    served_by=None,
    us=120.0,
    p20_us=119.0,
    p80_us=121.0,
    host_us=15.0,
    repetitions=20,
    limit_us=60.0,
    percent_of_limit=50.0,
    ratio_to_eager=1.0,
    fusion_bound=1.23,
    relative_error=0.0017,
    error=None,
    cold=True,
    device="Made-up GPU",
    host_cpu="Made-up CPU",
    threads=1,
    peak_tflops=790.0,
    bandwidth_gbs=4300.0,
    versions={"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "tpkernels": "0.1.0"},
    commit="0123456789ab",
    date="2026-11-30",
)


def variant(name: str, us: float, base: Row = EAGER, **changes: object) -> Row:
    """`name`'s row beside `base`, which is eager's."""
    return replace(
        base,
        implementation=name,
        us=us,
        percent_of_limit=100 * base.limit_us / us,
        ratio_to_eager=(base.us or 0.0) / us,
        **changes,
    )


def case(base: Row = EAGER, ours_us: float = 100.0) -> list[Row]:
    """One case: eager, a peer that cannot run, one that can, and ours."""
    no_time = {"us": None, "p20_us": None, "p80_us": None, "ratio_to_eager": None}
    absent = {"percent_of_limit": None, "error": "cannot run: no compiler", **no_time}
    return [
        base,
        replace(base, implementation="compile", **absent),
        variant("cublaslt", 110.0, base),
        variant("ours", ours_us, base, served_by="triton 128x256x64 g8 s3 w8 tma"),
        variant("ours:reference", 120.0, base, served_by="reference"),
    ]
