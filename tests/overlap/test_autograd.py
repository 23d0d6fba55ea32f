"""What users do around the collective ops: freeze, autocast, edit in place, differentiate twice."""

from __future__ import annotations

import pytest
import torch

from tests.overlap.samples import normals, part
from tpkernels.comm.group import resolve_group
from tpkernels.overlap import (
    all_gather_gemm,
    column_gemm_act,
    gemm_all_reduce,
    gemm_reduce_scatter,
    mlp,
)
from tpkernels.testing import count_collectives

SIZES = [3, 2]


def layers(name):
    """Each op as a function of a list of tensors that gives one tensor."""
    return {
        "row": lambda t: gemm_all_reduce(t["h"], t["w_down"], t["b_down"], name),
        "column": lambda t: torch.cat(
            column_gemm_act(t["x"], [t["w_up"], t["w_gate"]], [t["b_up"], None], "gelu", name), -1
        ),
        "plain": lambda t: mlp(
            t["x"], t["w_up"], t["b_up"], t["w_down"], t["b_down"], act="gelu", group_name=name
        ),
        "gated": lambda t: mlp(
            t["x"],
            t["w_up"],
            t["b_up"],
            t["w_down"],
            t["b_down"],
            act="silu",
            group_name=name,
            w_gate=t["w_gate"],
        ),
        "gather": lambda t: all_gather_gemm(
            t["x"], [t["w_up"]], [t["b_up"]], "gelu", name, chunks=2
        )[1][0],
        "scatter": lambda t: gemm_reduce_scatter(t["h"], t["w_down"], t["b_down"], name, chunks=2),
    }


def tensors(rank, dtype=torch.float64):
    made = {
        "x": normals(1, 4, 6),
        "h": part(normals(2, 4, 5), SIZES, -1, rank),
        "w_up": part(normals(3, 5, 6), SIZES, 0, rank),
        "b_up": part(normals(4, 5), SIZES, 0, rank),
        "w_gate": part(normals(5, 5, 6), SIZES, 0, rank),
        "w_down": part(normals(6, 6, 5), SIZES, 1, rank),
        "b_down": normals(7, 6),
    }
    return {label: t.to(dtype).clone() for label, t in made.items()}


every_op = pytest.mark.parametrize("kind", ["row", "column", "plain", "gated", "gather", "scatter"])


def frozen(group, kind):
    """Gradients with everything wanted, and with each tensor wanted alone."""
    run, values = layers(resolve_group(group).name)[kind], tensors(group.rank())

    def gradients(wanted):
        inputs = {k: v.clone().requires_grad_(k in wanted) for k, v in values.items()}
        y = run(inputs)
        if not y.requires_grad:
            return {}
        with count_collectives() as counts:
            y.square().sum().backward()
        sent = counts.total.calls
        return {k: (v.grad, sent) for k, v in inputs.items() if v.grad is not None}

    everything = gradients(set(values))
    for label, (expected, _) in everything.items():
        alone = gradients({label})
        assert set(alone) == {label}, label
        gradient, sent = alone[label]
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)
        assert sent == calls_for(kind, label), label
    return sorted(everything)


def calls_for(kind, label):
    """Collectives of backward where the gradient of ``label`` alone is wanted."""
    if kind == "scatter":
        return 2  # dY is gathered, in two chunks
    if kind == "gather":
        return 0 if label == "b_up" else 2
    return 1 if label == "x" else 0  # only dX is summed over ranks


@every_op
def test_each_input_alone_can_want_a_gradient(pool, kind):
    used = pool.run(frozen, kind, world_size=2)[0]
    assert {
        "row": ["b_down", "h", "w_down"],
        "column": ["b_up", "w_gate", "w_up", "x"],
        "plain": ["b_down", "b_up", "w_down", "w_up", "x"],
        "gated": ["b_down", "b_up", "w_down", "w_gate", "w_up", "x"],
        "gather": ["b_up", "w_up", "x"],
        "scatter": ["b_down", "h", "w_down"],
    }[kind] == used


def autocast(group, kind):
    run = layers(resolve_group(group).name)[kind]
    values = {k: v.requires_grad_() for k, v in tensors(group.rank(), torch.float32).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16), count_collectives() as counts:
        y = run(values)
    y.float().sum().backward()
    low = {k: v.detach().bfloat16() for k, v in values.items()}
    dtypes = {v.grad.dtype for v in values.values() if v.grad is not None}
    return y, run(low), dtypes, counts.total.bytes


@every_op
def test_autocast_computes_and_sends_in_its_dtype(pool, kind):
    for y, low, dtypes, sent in pool.run(autocast, kind, world_size=2):
        assert y.dtype is torch.bfloat16 and torch.equal(y, low)
        assert dtypes == {torch.float32}
        rows = {"column": 0, "gather": 8}.get(kind, 4)
        assert sent == rows * 6 * 2


def edited(group, kind):
    run = layers(resolve_group(group).name)[kind]
    results = []
    for in_place in (False, True):
        values = {k: v.requires_grad_() for k, v in tensors(group.rank()).items()}
        y = run(values)
        y = y.mul_(2).relu_() if in_place else torch.relu(y * 2)
        y.sum().backward()
        results.append([y.detach(), *(v.grad for v in values.values() if v.grad is not None)])
    return results


@every_op
def test_a_result_may_be_edited_in_place(pool, kind):
    for plain, in_place in pool.run(edited, kind, world_size=2):
        assert len(plain) == len(in_place) > 1
        assert all(torch.equal(a, b) for a, b in zip(plain, in_place, strict=True))


def twice(group, kind):
    run = layers(resolve_group(group).name)[kind]
    values = {k: v.requires_grad_() for k, v in tensors(group.rank()).items()}
    y = run(values)
    first = "h" if kind in ("row", "scatter") else "x"
    (slope,) = torch.autograd.grad(y.square().sum(), values[first], create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@every_op
def test_a_second_derivative_between_ranks_raises_and_is_never_wrong(pool, kind):
    assert all("once_differentiable" in told for told in pool.run(twice, kind, world_size=2))
