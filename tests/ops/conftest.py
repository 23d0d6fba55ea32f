"""The implementations of the local ops that this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tpkernels import native
from tpkernels.kernels import available
from tpkernels.ops import choice
from tpkernels.ops.choice import LOCAL_OPS

# Run through Triton's interpreter as well, which is slow: tests/kernels draws shapes, dtypes and
# layouts widely; these show that the ops hand them on rightly.
INTERPRETED = (
    "test_opcheck",
    "test_integers_are_exact",
    "test_every_size_has_the_formula_s_shape",
    "test_infinity_and_nan_are_the_true_ones_or_eager_s",
    "test_a_missing_bias_is_a_bias_of_zero",
    "test_layouts_equal_contiguous",
    "test_gemm_gelu_is_gemm_act",
    "test_integer_gradients_are_exact",
    "test_no_rows_give_zero_weight_gradients",
    "test_gradients_within_twice_eager_s_error",
    "test_the_pre_activation_s_own_gradient_is_added",
    "test_results_may_be_edited_in_place",
    "test_a_second_backward_equals_the_first_bitwise",
    "test_nothing_is_kept_when_no_gradient_is_wanted",
    "test_autocast_mixes_dtypes_and_gives_gradients_in_the_parameters_dtype",
    "test_inference_mode_and_meta",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the interpreter is not asked to run."""
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]  # items are the whole session's
    for item in ours:
        if _params(item).get("implementation") == "triton":  # NumPy's, of infinities
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"))
    out = {item for item in ours if not _is_wanted(item)}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


def _params(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_wanted(item: pytest.Item) -> bool:
    params = _params(item)
    if params.get("implementation") != "triton":
        return True
    name = item.originalname
    if item.path.name == "test_errors.py":
        return True
    if name not in INTERPRETED or params.get("dtype") is torch.float64:
        return False
    if name in ("test_integers_are_exact", "test_integer_gradients_are_exact"):
        return params["act"] == "relu2"  # it contains the others
    return name != "test_opcheck" or params["name"] in LOCAL_OPS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["reference", "cpu", "triton"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serve the local ops by each implementation in turn; skip one that is not here."""
    if request.param == "cpu" and native.load() is None:
        pytest.skip(f"the compiled kernels are not there: {native.status().reason}")
    if request.param == "triton":
        if not available.triton_status().available:
            pytest.skip(available.triton_status().reason)
        if not available.interpreting():
            pytest.skip("CPU tensors need Triton's interpreter: TRITON_INTERPRET=1")
    before = os.environ.get("TPKERNELS_GEMM")
    os.environ["TPKERNELS_GEMM"] = request.param
    choice.apply()
    yield request.param
    if before is None:
        del os.environ["TPKERNELS_GEMM"]
    else:
        os.environ["TPKERNELS_GEMM"] = before
    choice.apply()
