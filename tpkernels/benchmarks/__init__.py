"""Benchmarks: what `tpkernels bench` and the scripts in `bench/` run.

shapes -> cases (`gemm_gelu`, `mlp`) -> harness (gate, then timing in turns) -> rows -> report;
`zero3` is a program of its own: ranks on hosts with shaped links (`shaped_hosts`), whole steps.
`tune` uses the same harness to write the table that `tpkernels.ops.choice` reads.
"""
