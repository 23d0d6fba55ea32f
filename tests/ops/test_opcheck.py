"""``torch.library.opcheck`` of every op that tpkernels defines, on whatever floor."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ops.samples import OPS
from tpkernels.library import OP_NAMES

for floor in ("ops", "overlap", "comm.regions", "modules"):
    importlib.import_module(f"tpkernels.{floor}")


def x(*shape):
    return torch.randn(*shape)


def wants_grad(*shape):
    return torch.randn(*shape, requires_grad=True)


def local_op_samples(op):
    """With and without gradients, without biases, on other layouts, with no rows."""
    yield (*op.normals((4,), 3, 5), "gelu")
    yield (*[t.requires_grad_() for t in op.normals((2, 2), 3, 5)], "silu")
    without = [None if i in op.optional else t for i, t in enumerate(op.normals((4,), 3, 5))]
    yield (*without, "relu2")
    yield (*[t.requires_grad_() for t in op.normals((0,), 3, 5)], "none")


# Groups of one: what an op does between ranks is tested in tests/comm and tests/overlap.
SAMPLES = {
    **{op.name: lambda op=op: list(local_op_samples(op)) for op in OPS},
    "column_gemm_act": lambda: [
        (x(4, 3), [x(5, 3), x(2, 3)], [x(5), None], "none", ""),
        (wants_grad(2, 2, 3), [wants_grad(5, 3)], [wants_grad(5)], "gelu", ""),
    ],
    "column_backward": lambda: [
        ([x(4, 5), x(4, 2)], x(4, 3), [x(5, 3), x(2, 3)], "", True, [True, False], [], [], ""),
        ([x(4, 5)], x(4, 3), [x(5, 3)], "", False, [True], [x(4, 2)], [x(4, 7)], "layer"),
    ],
    "gemm_all_reduce": lambda: [
        (x(4, 3), x(5, 3), x(5), "", None, None),
        (x(4, 3).bfloat16(), x(5, 3).bfloat16(), None, "", torch.float32, 2),
        (wants_grad(2, 2, 3), wants_grad(5, 3), wants_grad(5), "", None, None),
    ],
    "all_gather_gemm": lambda: [
        (x(2, 3), [x(4, 3), x(2, 3)], [x(4), None], "none", False, "", 0, None, None, ""),
        (x(2, 3), [x(4, 3)], [x(4)], "gelu", True, "", 0, [2], None, "layer"),
        (
            wants_grad(2, 2, 3),
            [wants_grad(4, 3)],
            [wants_grad(4)],
            "silu",
            False,
            "",
            1,
            None,
            2,
            "",
        ),
    ],
    "all_gather_gemm_backward": lambda: [
        (
            [x(4, 5), x(4, 2)],
            x(4, 3),
            x(4, 3),
            [x(5, 3), x(2, 3)],
            "",
            0,
            None,
            True,
            [True, False],
            None,
            "",
        ),
        ([x(4, 5)], None, x(4, 3), [x(5, 3)], "", 0, [4], False, [True], 2, "layer"),
    ],
    "gemm_reduce_scatter": lambda: [
        (x(4, 3), x(5, 3), x(5), "", 0, None, None, None, ""),
        (x(4, 3).bfloat16(), x(5, 3).bfloat16(), None, "", -1, [5], torch.float32, 2, "layer"),
        (wants_grad(2, 2, 3), wants_grad(5, 3), wants_grad(5), "", 1, None, None, None, ""),
    ],
    "gemm_reduce_scatter_backward": lambda: [
        (x(4, 5), x(4, 3), x(5, 3), "", 0, [4], [True, True, True], None, ""),
        (x(4, 5), x(4, 3), x(5, 3), "", 0, [4], [False, True, False], 2, "layer"),
    ],
    "mlp": lambda: [
        (x(4, 3), x(6, 3), x(6), None, None, x(3, 6), x(3), "gelu", "", None),
        (
            wants_grad(2, 2, 3),
            wants_grad(6, 3),
            None,
            wants_grad(6, 3),
            wants_grad(6),
            wants_grad(3, 6),
            wants_grad(3),
            "silu",
            "",
            torch.float32,
        ),
    ],
    "all_reduce": lambda: [(x(4, 3), ""), (wants_grad(4, 3).t(), "")],
    "all_gather": lambda: [(x(4, 3), [3], 1, ""), (wants_grad(4, 3), [4], 0, "")],
    "reduce_scatter": lambda: [(x(4, 3), [3], -1, ""), (wants_grad(4, 3), [4], 0, "")],
    "own_part": lambda: [(x(4, 3), None, 1, ""), (wants_grad(4, 3), [4], 0, "")],
    "sum_over_shards": lambda: [([x(4, 3), x(5)], "", ""), ([x(4, 3)], "", "layer")],
    "sum_replicated": lambda: [(x(4, 3), [0, 2], [1, 0], [2, 1], 3, "")],
    "vocab_parallel_cross_entropy": lambda: [
        (x(4, 7), torch.tensor([0, 3, 6, 2]), 0, 7, 0.0, ""),
        (wants_grad(4, 7), torch.tensor([0, 3, 6, 2]), 0, 7, 0.1, ""),
    ],
}


def test_every_op_has_an_opcheck_case():
    assert set(OP_NAMES) == set(SAMPLES)
    defined = [name for name in dir(torch.ops.tpkernels) if not name.startswith("_")]
    # None is defined by another road, but what moves memory and has no values to check, and what
    # needs ranks that share memory (tests/overlap/test_fused.py).
    peer_ops = {"all_reduce_peer_", "gemm_all_reduce_fused", "mlp_fused"}
    assert set(defined) - {"name", "exchange_storage_"} - peer_ops <= set(OP_NAMES)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    op = getattr(torch.ops.tpkernels, name).default
    for sample in SAMPLES[name]():
        torch.library.opcheck(op, sample)
