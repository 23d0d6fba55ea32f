"""The ops that are tuned: inputs, plain PyTorch, each kernel that could serve, and the truth."""

# M rows and N columns of the output, K the summed dimension

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpkernels import reference
from tpkernels.benchmarks.ceilings import Work
from tpkernels.benchmarks.gate import Truth, sample
from tpkernels.benchmarks.harness import Case, Inputs, Variant
from tpkernels.kernels.config import GemmConfig
from tpkernels.library import rows
from tpkernels.ops import cublaslt

_TRUTH_ROWS, _TRUTH_COLUMNS = 32, 1024
REFERENCE, CUBLASLT, TRITON = "reference", "cublaslt", "triton"
Shape = tuple[int, int, int]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class TunedOp:
    """A local op at one (M, N, K).

    Attributes:
        inputs: sizes of its inputs, by name; then of its outputs.
        reference: plain PyTorch, by the specification.
        launch: the Triton kernel, with tiles.
        gated: whether gated MLPs call it, or the others.
        acts: what is tuned unless asked for otherwise.
    """

    name: str
    inputs: Callable[[int, int, int], dict[str, tuple[int, ...]]]
    outputs: tuple[str, ...]
    reference: Callable[..., Any]
    launch: Callable[..., Any]
    gated: bool
    acts: tuple[str, ...]


def _act_inputs(m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"x": (m, k), "weight": (n, k), "bias": (n,)}


def _dact_inputs(m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"dy": (m, k), "weight": (k, n), "pre": (m, n)}


def _glu_inputs(m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"x": (m, k), "w_gate": (n, k), "w_up": (n, k)}


def _dglu_inputs(m: int, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {"dy": (m, k), "weight": (k, n), "gate": (m, n), "up": (m, n)}


def _dact_dbias(dy: Tensor, weight: Tensor, pre: Tensor, act: str) -> Outputs:
    dh = reference.gemm_dact(dy, weight, pre, act)
    return dh, rows(dh).sum(0)


def _launch_act(aux: bool) -> Callable[..., Any]:
    def launch(x: Tensor, weight: Tensor, bias: Tensor, act: str, config: GemmConfig) -> Any:
        from tpkernels.kernels.gemm_act import gemm_act

        return gemm_act(x, weight, bias, act, aux=aux, config=config)

    return launch


def _launch_dact(dbias: bool) -> Callable[..., Any]:
    def launch(dy: Tensor, weight: Tensor, pre: Tensor, act: str, config: GemmConfig) -> Any:
        from tpkernels.kernels.gemm_dact import gemm_dact

        return gemm_dact(dy, weight, pre, act, dbias=dbias, config=config)

    return launch


def _launch_glu(aux: bool) -> Callable[..., Any]:
    def launch(x: Tensor, w_gate: Tensor, w_up: Tensor, act: str, config: GemmConfig) -> Any:
        from tpkernels.kernels.gemm_glu import gemm_glu

        return gemm_glu(x, w_gate, w_up, None, None, act, aux=aux, config=config)

    return launch


def _launch_dglu(
    dy: Tensor, weight: Tensor, gate: Tensor, up: Tensor, act: str, config: GemmConfig
) -> Any:
    from tpkernels.kernels.gemm_dglu import gemm_dglu

    return gemm_dglu(dy, weight, gate, up, act, config=config)


def _glu(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w_gate, w_up, act: function(x, w_gate, w_up, None, None, act)


_GELUS, _SILU = ("gelu_tanh", "gelu"), ("silu",)
OPS = {
    op.name: op
    for op in (
        TunedOp(
            "gemm_act", _act_inputs, ("y",), reference.gemm_act, _launch_act(False), False, _GELUS
        ),
        TunedOp(
            "gemm_act_aux",
            _act_inputs,
            ("y", "pre"),
            reference.gemm_act_aux,
            _launch_act(True),
            False,
            _GELUS,
        ),
        TunedOp(
            "gemm_dact_dbias",
            _dact_inputs,
            ("dh", "dbias"),
            _dact_dbias,
            _launch_dact(True),
            False,
            _GELUS,
        ),
        TunedOp(
            "gemm_glu",
            _glu_inputs,
            ("y",),
            _glu(reference.gemm_glu),
            _launch_glu(False),
            True,
            _SILU,
        ),
        TunedOp(
            "gemm_glu_aux",
            _glu_inputs,
            ("y", "gate", "up"),
            _glu(reference.gemm_glu_aux),
            _launch_glu(True),
            True,
            _SILU,
        ),
        TunedOp(
            "gemm_dglu",
            _dglu_inputs,
            ("d_gate", "d_up"),
            reference.gemm_dglu,
            _launch_dglu,
            True,
            _SILU,
        ),
        TunedOp(
            "gemm_dact",
            _dact_inputs,
            ("dh",),
            reference.gemm_dact,
            _launch_dact(False),
            False,
            _GELUS,
        ),
    )
}


def case(
    op: TunedOp,
    act: str,
    dtype: torch.dtype,
    device: torch.device,
    shape: Shape,
    configs: Iterable[GemmConfig],
) -> Case:
    """Plain PyTorch first, cuBLASLt where it serves, and Triton with each of `configs`."""

    def fused(inputs: Inputs) -> Outputs:
        x, weight, bias = inputs
        return (cublaslt.gemm_act(x, weight, bias, act),)

    variants = [Variant(REFERENCE, lambda inputs: _outputs(op.reference(*inputs, act)))]
    if device.type == "cuda" and cublaslt.serves(op.name, dtype, act, True):
        variants.append(Variant(CUBLASLT, fused))
    for config in configs:
        variants.append(Variant(f"{TRITON} {config}", _launcher(op, act, config)))
    m, n, k = shape
    return Case(
        op.name,
        f"{op.name} {act} M={m} N={n} K={k}",
        lambda: make_inputs(op, dtype, device, shape),
        variants,
        lambda inputs: _truths(op, act, inputs),
        Work((shape,), 0),
    )


def make_inputs(op: TunedOp, dtype: torch.dtype, device: torch.device, shape: Shape) -> Inputs:
    """Normal, weights scaled so that the sums' variance is about 1."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for name, size in op.inputs(*shape).items():
        tensor = torch.randn(size, generator=generator, device=device, dtype=dtype)
        made.append(tensor.mul_(max(shape[2], 1) ** -0.5) if name.startswith("w") else tensor)
    return tuple(made)


def _launcher(op: TunedOp, act: str, config: GemmConfig) -> Callable[[Inputs], Outputs]:
    return lambda inputs: _outputs(op.launch(*inputs, act, config))


def _outputs(found: Tensor | Outputs) -> Outputs:
    return (found,) if isinstance(found, Tensor) else found


def _truths(op: TunedOp, act: str, inputs: Inputs) -> list[Truth]:
    """Some rows and columns of each output, from those of the inputs that they depend on."""
    named = dict(zip(op.inputs(1, 1, 1), inputs, strict=True))
    first = inputs[0]
    transposed = op.name.startswith("gemm_d")  # weight [K, N]
    n = named["weight"].shape[1] if transposed else inputs[1].shape[0]
    picked_rows = sample(first.shape[0], _TRUTH_ROWS, first.device)
    columns = sample(n, _TRUTH_COLUMNS, first.device)

    def sliced(name: str, tensor: Tensor, picked: Tensor | None) -> Tensor:
        if name in ("x", "dy"):
            return (tensor if picked is None else tensor[picked]).double()
        if name.startswith("w"):
            return (tensor[:, columns] if transposed else tensor[columns]).double()
        if name == "bias":
            return tensor[columns].double()
        return (tensor if picked is None else tensor[picked])[:, columns].double()

    def truth(picked: Tensor | None) -> Outputs:
        slices = [sliced(name, tensor, picked) for name, tensor in named.items()]
        return _outputs(op.reference(*slices, act))

    truths = [
        Truth(name, lambda y: y[picked_rows][:, columns], value)
        for name, value in zip(op.outputs, truth(picked_rows), strict=True)
    ]
    if "dbias" in op.outputs:  # a sum over all rows
        index = op.outputs.index("dbias")
        truths[index] = Truth("dbias", lambda y: y[columns], truth(None)[index])
    return truths
