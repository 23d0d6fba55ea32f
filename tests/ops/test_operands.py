"""Which operands a measured kernel is taken for, and that plain PyTorch serves the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ops.samples import LAYOUTS, OPS, assert_equal, laid_out
from tpkernels.ops import choice, serve

GEMMS = [op for op in OPS if op.name.startswith("gemm_") and op.name in serve.KERNELS]
ELEMENTWISE = [op for op in OPS if op.name in ("act_grad", "glu_grad")]
by_gemm = pytest.mark.parametrize("op", GEMMS, ids=str)
K, N = 32, 48


class MeasuredKernel(Exception):
    """The kernel of the table's row was called."""


@pytest.fixture(autouse=True)
def tuned(monkeypatch):
    """A table whose every row is a Triton kernel's: CPU for CUDA."""

    def choose(*_, aligned=True, **__):
        return choice.Choice("triton" if aligned else "reference", "this test")

    def kernel(*_, **__):
        raise MeasuredKernel

    monkeypatch.setattr(serve, "choose", choose)
    kernels = SimpleNamespace(**dict.fromkeys(serve.KERNELS, kernel))
    monkeypatch.setattr(serve, "_triton", lambda: kernels)
    monkeypatch.setattr(serve, "_by_table", lambda _: True)


def aligned(op, tensors):
    """Whether the op takes the measured kernel; else its results are plain PyTorch's."""
    try:
        found = serve.KERNELS[op.name](*tensors, "relu")
    except MeasuredKernel:
        return True
    expected = op.expected([t.contiguous() for t in tensors], "relu")
    assert_equal(found if isinstance(found, tuple) else (found,), expected)
    return False


def matrices(op, tensors):
    """Positions of what is not a bias."""
    return [i for i, tensor in enumerate(tensors) if tensor.dim() > 1]


def with_rows(tensor, stride):
    """The same values, rows `stride` elements apart."""
    wide = tensor.new_empty(*tensor.shape[:-1], stride)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def off_by(tensor, elements):
    """The same values at an address that many elements later."""
    flat = tensor.new_empty(tensor.numel() + elements)
    return flat[elements:].view(tensor.shape).copy_(tensor)


@by_gemm
def test_contiguous_operands_are_as_measured(op):
    for lead in ((1,), (5,), (2, 3), ()):
        assert aligned(op, op.integers(lead, K, N))
    assert {op.name for op in GEMMS} == {name for name in serve.KERNELS if "gemm" in name}


@by_gemm
@pytest.mark.parametrize(
    ("change", "as_measured"),
    [
        (lambda t: with_rows(t, 64), True),
        (lambda t: with_rows(t, 56), False),  # of 16 bytes, not of 16 elements
        (lambda t: with_rows(t, 49), False),
        (lambda t: off_by(t, 4), True),  # 16 bytes
        (lambda t: off_by(t, 1), False),
        (lambda t: laid_out(t, "strided"), False),
    ],
    ids=["rows of 64", "rows of 56", "rows of 49", "16 bytes on", "4 bytes on", "every other"],
)
def test_each_operand_counts(op, change, as_measured):
    tensors = op.integers((16,), K, N)
    for position in matrices(op, tensors):
        given = list(tensors)
        given[position] = change(given[position])
        assert aligned(op, given) is as_measured


@by_gemm
def test_activations_that_are_transposed_are_not_as_measured(op):
    tensors = op.integers((16,), K, N)
    activations = [i for i in matrices(op, tensors) if tensors[i].shape[0] == 16]
    for position in activations:
        given = list(tensors)
        given[position] = laid_out(given[position], "transposed")
        assert not aligned(op, given)


@by_gemm
def test_weights_that_are_all_transposed_are_as_measured_and_one_of_two_is_not(op):
    tensors = op.integers((16,), K, N)
    weights = [i for i in matrices(op, tensors) if tensors[i].shape[0] != 16]
    assert len(weights) == (2 if op.name.startswith("gemm_glu") else 1)
    given = list(tensors)
    for count, position in enumerate(weights, 1):
        given[position] = laid_out(given[position], "transposed")
        assert aligned(op, given) is (count == len(weights))


@by_gemm
@pytest.mark.parametrize(("k", "n"), [(24, 48), (32, 40), (33, 48), (32, 47)])
def test_sizes_that_vectors_do_not_divide_are_not_as_measured(op, k, n):
    assert not aligned(op, op.integers((16,), k, n))


@by_gemm
def test_leading_dimensions_that_must_be_copied_are_not_as_measured(op):
    tensors = op.integers((4, 3), K, N)
    for position, shape in enumerate(op.shapes((4, 3), K, N)):
        if len(shape) == 3:
            given = list(tensors)
            given[position] = given[position].transpose(0, 1).contiguous().transpose(0, 1)
            assert not aligned(op, given)


@pytest.mark.parametrize("op", ELEMENTWISE, ids=str)
def test_element_by_element(op):
    tensors = op.integers((16,), K, N)
    assert aligned(op, tensors)
    for position in range(len(tensors)):
        for change in (lambda t: off_by(t, 1), lambda t: with_rows(t, 64)):
            given = list(tensors)
            given[position] = change(given[position])
            assert not aligned(op, given)


def test_nothing_is_asked_of_operands_where_no_table_decides(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("not to be called")

    monkeypatch.undo()
    monkeypatch.setattr(serve.alignment, "as_measured", fail)
    monkeypatch.delenv("TPKERNELS_GEMM", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert serve._by_table(cuda) and not serve._by_table(cpu)
    for name in ("reference", "triton"):
        monkeypatch.setenv("TPKERNELS_GEMM", name)
        assert not serve._by_table(cuda)
    assert serve._as_measured(torch.ones(3, 5).t(), torch.ones(5, 7))
    assert serve._elements_as_measured(torch.ones(3, 5).t())
    plain = choice.Choice("reference", "not tuned")
    monkeypatch.setattr(serve, "choose", lambda *_, **__: plain)
    monkeypatch.setattr(serve, "_by_table", fail)
    for op in GEMMS + ELEMENTWISE:  # what was not measured costs nothing more
        serve.KERNELS[op.name](*op.integers((16,), K, N), "relu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3, 16), (2, 3, 5, 16), (1, 3, 16), (3, 1, 16), (16,)])
def test_rows_are_a_view_if_flattening_copies_nothing(shape, layout):
    def agrees(x):
        storage = serve.rows(x).untyped_storage().data_ptr()
        return serve._rows_are_a_view(x) == (storage == x.untyped_storage().data_ptr())

    x = laid_out(torch.randn(shape), layout)
    assert agrees(x)
    if x.dim() > 2:
        assert agrees(x.transpose(0, 1)) and agrees(x[1:, :2]) and agrees(x[..., :8])
