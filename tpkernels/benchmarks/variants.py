"""The ways to compute a case that both benchmarks share: plain, compiled, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from tpkernels.benchmarks.harness import Inputs, Variant
from tpkernels.ops import choice

EAGER, COMPILE, CUBLASLT, OURS = "eager", "compile", "cublaslt", "ours"
Function = Callable[[Inputs], Sequence[Tensor]]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` in its default mode, for the one shape that it meets: the strongest form.

    Compilers' earlier results are dropped, so that no limit on recompilations is met.
    """
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def ours(
    ops: Sequence[str],
    function: Function,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    act: str,
    bias: bool,
    tiny: Inputs,
) -> list[Variant]:
    """`function` by automatic choice, then with every implementation that could serve the `ops`.

    `ops` are the local ops that `function` calls at `shape` = (m, n, k); `tiny` are inputs of the
    smallest sizes. An interpreter is not measured.
    """
    # As the ops ask: a gradient's op has no bias, and the one with the bias' gradient is, where it
    # has no kernel of its own, made of the one without.
    asks = [(op, bias and "_d" not in op) for op in ops]
    asks += [("gemm_dact", False)] * ("gemm_dact_dbias" in ops)

    def choices() -> list[choice.Choice]:
        m, n, k = shape
        return [
            choice.choose(op, device, dtype, m, n, k, act=act, bias=with_bias)
            for op, with_bias in asks
        ]

    @contextmanager
    def using(name: str) -> Iterator[None]:
        with choice.using(name):
            if device.type == "cuda":
                choices()  # remembered, so that deciding is not part of the time
            else:
                function(tiny)  # nor what the dispatcher does once after kernels have changed
            yield

    def within(name: str) -> Callable[[], AbstractContextManager[None]]:
        return lambda: using(name)

    with choice.using("auto"):
        served_by = _served_by(ops, choices())
    variants = [Variant(OURS, function, within("auto"), served_by=served_by)]
    serving = [
        choice.candidates(op, device, dtype, act, with_bias) for op, with_bias in asks[: len(ops)]
    ]
    for name in dict.fromkeys(name for names in serving for name in names):
        everywhere = all(name in names for names in serving)
        # `cpu` is asked for as a whole: what it lacks of its own is made of what it has.
        if (everywhere or name == "cpu") and not (name == "triton" and device.type == "cpu"):
            variants.append(Variant(f"{OURS}:{name}", function, within(name), served_by=name))
    return variants


def _served_by(ops: Sequence[str], choices: Sequence[choice.Choice]) -> str:
    """`triton 128x128x64 ..`, or op by op where they differ."""
    found = dict(zip((*ops, "gemm_dact"), choices, strict=False))
    composed = (
        found.pop("gemm_dact") if "gemm_dact" not in ops and len(choices) > len(ops) else None
    )
    if composed is not None and found["gemm_dact_dbias"].implementation == "reference":
        found["gemm_dact_dbias"] = composed
    texts = {
        op: f"{c.implementation} {c.config}" if c.config else c.implementation
        for op, c in found.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{op} {text}" for op, text in texts.items())
