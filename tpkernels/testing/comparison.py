"""Comparisons with a truth in float64, and the rule that judges a result by eager PyTorch's error.

`max_relative_error` is the number a whole model is judged by; `assert_two_times` judges an op or a
layer: our error may be at most twice what eager PyTorch makes in the same dtype, plus one
rounding unit, whatever the shape or the scale of the inputs.
"""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over norm of the truth, in float64.

    Equivalent to: `(actual.double() - truth.double()).norm() / truth.double().norm()`, but 0 where
    both are zero or empty. NaN where either tensor has one.

    Raises:
        ValueError: shapes differ.
    """
    difference, wide_truth = _difference(actual, truth)
    return _ratio(_norm(difference), _norm(wide_truth))


def max_relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """`max|actual - expected| / max|expected|`, in float64; 0 where both are zero or empty.

    Raises:
        ValueError: shapes differ.
    """
    difference, wide_expected = _difference(actual, expected)
    return _ratio(_peak(difference), _peak(wide_expected))


def assert_two_times(
    ours: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    name: str = "result",
) -> None:
    """Assert `error(ours) <= 2 * error(eager) + eps`, each against the same `truth`.

    Args:
        ours: the result under test.
        eager: the same computation by eager PyTorch, in the same dtype and from the same inputs.
        truth: the same computation in float64, from the same inputs.
        dtype: the dtype whose rounding unit is allowed; default `ours.dtype`. Give it where a
            result is kept in a wider dtype than it was computed in.
        name: what is compared, for the message.

    Raises:
        AssertionError: with both errors, the bound, and the element that is furthest off.
        ValueError: shapes differ, or `truth` is not float64.
    """
    if truth.dtype not in (torch.float64, torch.complex128):
        raise ValueError(
            f"truth must be float64, got {truth.dtype}; compute it in double precision"
        )
    eps = torch.finfo(dtype or ours.dtype).eps
    our_error, eager_error = relative_error(ours, truth), relative_error(eager, truth)
    bound = 2.0 * eager_error + eps
    if our_error <= bound:  # False for a NaN
        return
    raise AssertionError(
        f"{name}: relative error {our_error:.3e} is above {bound:.3e} "
        f"= 2 x eager's {eager_error:.3e} + eps {eps:.3e} "
        f"(shape {tuple(ours.shape)}, {ours.dtype}); {_worst(ours, eager, truth)}"
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
    wide_a, wide_b = _wide(a), _wide(b)
    return wide_a - wide_b, wide_b


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(dtype)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _peak(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _ratio(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def _worst(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> str:
    difference, wide_truth = _difference(ours, truth)
    # A NaN is further off than any number.
    flat = int(difference.abs().nan_to_num(nan=float("inf")).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), ours.shape))
    return (
        f"furthest off at {index}: {_wide(ours)[index].item():.9g}, "
        f"eager {_wide(eager)[index].item():.9g}, truth {wide_truth[index].item():.9g}"
    )
