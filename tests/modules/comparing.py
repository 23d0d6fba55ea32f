"""Run a dense module and its split form on the same numbers, and compare everything they give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.comm.group import resolve_group
from tpkernels.modules.parameters import gather_gradient
from tpkernels.testing import assert_two_times

TIGHT = {"rtol": 1e-12, "atol": 1e-12}  # fp64: sums in another order, nothing else


@dataclass
class Results:
    """The first output, the gradient of every floating-point input and of every parameter."""

    output: Tensor
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor | None]

    def named(self) -> dict[str, Tensor]:
        """Everything by name, for comparison."""
        inputs = {f"d input {i}": g for i, g in enumerate(self.input_grads)}
        grads = {f"d {name}": g for name, g in self.grads.items()}
        return {
            "output": self.output,
            **{k: v for k, v in (inputs | grads).items() if v is not None},
        }


def run(
    module: nn.Module,
    inputs: Sequence[Tensor],
    group: Any = None,
    call: Callable[..., Any] | None = None,
    integers: bool = False,
) -> Results:
    """One forward and backward from a seeded output gradient; ``group``: the module is split."""
    leaves = [x.detach().clone() for x in inputs]
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point())
    module.zero_grad()
    output = (call or _call)(module, *leaves)
    output = output[0] if isinstance(output, tuple) else output
    torch.manual_seed(5)
    dy = torch.randn(output.shape, dtype=torch.float64)
    output.backward((dy * 3).round().to(output.dtype) if integers else dy.to(output.dtype))
    for leaf, given in zip(leaves, inputs, strict=True):
        assert torch.equal(leaf, given), "an input was changed"
    resolved = None if group is None else resolve_group(group)
    grads = {
        name: p.grad if resolved is None else gather_gradient(p, resolved)
        for name, p in module.named_parameters()
    }
    return Results(
        output.detach(),
        [x.grad for x in leaves],
        {name: None if g is None else g.clone() for name, g in grads.items()},
    )


def _call(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


@dataclass(frozen=True)
class Case:
    """A dense module, how it is split, and inputs; built anew, and alike, on every rank."""

    build: Callable[[], nn.Module]
    shard: Callable[[nn.Module, Any], None]
    inputs: Callable[[], list[Tensor]]
    call: Callable[..., Any] = _call
    skip: frozenset[str] = field(default_factory=frozenset)
    """Gradients that are zero in exact arithmetic: their relative error means nothing."""


def compare(group: Any, case: Case, dtype: torch.dtype) -> Tensor:
    """Assert that the split module gives the dense one's output and gradients; return its output.

    fp64: tight. Else by the two-times rule. A second forward and backward must repeat the bits.
    """
    torch.manual_seed(1)
    dense = case.build().to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs()]
    truth_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    split = copy.deepcopy(dense)
    case.shard(split, group)
    ours, again = (run(split, inputs, group, case.call) for _ in range(2))
    for name, value in ours.named().items():
        assert torch.equal(value, again.named()[name]), f"{name} differs in the second run"
    truth = run(copy.deepcopy(dense).double(), truth_inputs, None, case.call).named()
    eager = run(dense, inputs, None, case.call).named()
    assert ours.named().keys() == truth.keys()
    for name, value in ours.named().items():
        if name.removeprefix("d ") in case.skip:
            continue
        if dtype is torch.float64:
            torch.testing.assert_close(
                value, truth[name], **TIGHT, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert_two_times(value, eager[name], truth[name], name=name)
    return ours.output


def exact(group: Any, case: Case) -> None:
    """Small whole numbers through the split module: every result has the dense module's bits."""
    torch.manual_seed(1)
    dense = case.build()
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
    inputs = [(2 * x).round() if x.is_floating_point() else x for x in case.inputs()]
    split = copy.deepcopy(dense)
    case.shard(split, group)
    theirs = run(dense, inputs, None, case.call, integers=True).named()
    for name, value in run(split, inputs, group, case.call, integers=True).named().items():
        assert torch.equal(value, theirs[name]), name


def assert_ranks_agree(results: Sequence[Tensor]) -> None:
    """Every rank returned the same bits."""
    for result in results[1:]:
        assert torch.equal(result, results[0])
