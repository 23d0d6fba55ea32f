"""Names of mixed precision and offload, ours and FSDP's."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from tpkernels.errors import ConfigError
from tpkernels.zero.policies import Offload, Precision, resolve_mp_policy, resolve_offload

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
AS_IS = Precision(cast_forward_inputs=False, cast_root_inputs=False)


@pytest.mark.parametrize(
    ("value", "precision"),
    [
        (None, AS_IS),
        ("bf16", Precision(BF16, FP32)),
        (BF16, Precision(BF16, FP32)),
        ("float32", Precision(FP32, FP32)),
        (FP64, Precision(FP64, FP64)),
        (Precision(BF16, BF16), Precision(BF16, BF16)),
        (MixedPrecisionPolicy(), Precision()),
        (
            MixedPrecisionPolicy(BF16, FP32, FP64, False),
            Precision(BF16, FP32, FP64, False, None, False),
        ),
        (MixedPrecisionPolicy(param_dtype=BF16), Precision(BF16)),
        (MixedPrecision(), Precision(cast_forward_inputs=False)),
        (MixedPrecision(BF16, FP32, FP32), Precision(BF16, FP32, None, False, FP32, True)),
        (
            MixedPrecision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False),
            Precision(BF16, cast_root_inputs=False),
        ),
    ],
    ids=str,
)
def test_a_precision_is_read(value, precision):
    assert resolve_mp_policy(value) == precision
    assert resolve_mp_policy(precision) == precision


@dataclass(frozen=True)
class FuturePolicy(MixedPrecisionPolicy):
    grad_dtype: torch.dtype | None = None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int8", "mp_policy='int8' is not known"),
        (torch.int8, "mp_policy=torch.int8"),
        ({"param_dtype": BF16}, "MixedPrecisionPolicy"),
        (torch.float16, "loss scaler"),
        ("fp16", "loss scaler"),
        (MixedPrecisionPolicy(param_dtype=torch.float16), "mp_policy.param_dtype=torch.float16"),
        (MixedPrecisionPolicy(reduce_dtype=torch.float16), "mp_policy.reduce_dtype=torch.float16"),
        (MixedPrecisionPolicy(output_dtype="bf16"), "mp_policy.output_dtype='bf16'"),
        (MixedPrecision(keep_low_precision_grads=True), "keep_low_precision_grads=True"),
        (MixedPrecision(_module_classes_to_ignore=(nn.LayerNorm,)), "_module_classes_to_ignore"),
        (FuturePolicy(BF16, grad_dtype=BF16), "grad_dtype=torch.bfloat16"),
    ],
    ids=str,
)
def test_a_precision_that_has_no_meaning_here_is_refused(value, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        resolve_mp_policy(value)
    assert "allowed" in str(error.value) and "Fix: " in str(error.value)


def test_a_later_field_of_the_policy_left_at_its_default_is_no_error():
    assert resolve_mp_policy(FuturePolicy(BF16)) == Precision(BF16)


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (AS_IS, "None"),
        (
            Precision(BF16, FP32),
            "param_dtype bfloat16, reduce_dtype float32, inputs cast at every unit",
        ),
        (
            Precision(BF16, cast_forward_inputs=False),
            "param_dtype bfloat16, inputs cast at the root",
        ),
    ],
    ids=str,
)
def test_a_precision_is_shown_in_words(precision, words):
    assert str(precision) == words


@pytest.mark.parametrize(
    ("value", "offload"),
    [
        (None, Offload()),
        ("none", Offload()),
        ("cpu", Offload("cpu")),
        (Offload("cpu", False), Offload("cpu", False)),
        (OffloadPolicy(), Offload()),
        (CPUOffloadPolicy(), Offload("cpu")),
        (CPUOffloadPolicy(pin_memory=False), Offload("cpu", False)),
        (CPUOffload(), Offload()),
        (CPUOffload(offload_params=True), Offload("cpu")),
    ],
    ids=str,
)
def test_an_offload_is_read(value, offload):
    assert resolve_offload(value) == offload


class OtherOffload(OffloadPolicy):
    pass


@pytest.mark.parametrize("value", ["nvme", "gpu", True, Offload("nvme"), OtherOffload()], ids=str)
def test_another_offload_is_refused(value):
    with pytest.raises(ConfigError, match=r"offload_policy=.*allowed: None, 'none', 'cpu'.*Fix"):
        resolve_offload(value)
