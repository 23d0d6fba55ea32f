"""What DeepSpeed says outside ``zero_optimization``: precision, clipping, batch sizes."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import UNLIMITED
from tpkernels.zero.deepspeed import keys
from tpkernels.zero.deepspeed.reading import Reading
from tpkernels.zero.deepspeed.values import choice, count, finite, flag, is_auto, section
from tpkernels.zero.policies import Precision, resolve_mp_policy

_HINTS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
}
_BFLOAT16 = Precision(param_dtype=torch.bfloat16)


def read_precision(given: dict[str, Any], reading: Reading, mp_policy: Any = None) -> None:
    """``bf16`` becomes ``mp_policy``; ``fp16``, ``amp`` and ``torch_autocast`` must be off.

    ``mp_policy``: what the caller says where the file says neither on nor off.
    """
    policy = None if mp_policy is None else resolve_mp_policy(mp_policy)
    _read_bf16(given, reading, policy)
    if policy is not None:
        reading.settings["mp_policy"] = policy
        reading.param_dtype = reading.param_dtype or policy.param_dtype
    if "fp16" in given and not reading.left_to_us("fp16", given["fp16"], "mp_policy"):
        fp16 = section(given["fp16"], "fp16")
        keys.check_keys(fp16, keys.FP16_KEYS, "fp16")
        enabled = fp16.get("enabled", False)
        if is_auto(enabled):
            reading.note("fp16.enabled", enabled, "off: float16 would need a loss scaler")
        elif flag(enabled, "fp16.enabled"):
            raise ConfigError(
                f"fp16.enabled={enabled!r} needs a loss scaler, which this version lacks; allowed: "
                'false, "auto". Fix: "bf16": {"enabled": true}, whose range is that of float32'
            )
        else:
            reading.note("fp16.enabled", enabled, "off")
        for name in sorted(set(fp16) - {"enabled"}):
            reading.note(f"fp16.{name}", fp16[name], "of no use while fp16 is off")
    _must_be_off(given, "amp", "mp_policy='bf16'", reading)
    _must_be_off(given, "torch_autocast", "run the forward under torch.autocast", reading)
    if "data_types" in given and not reading.left_to_us("data_types", given["data_types"], ""):
        types = section(given["data_types"], "data_types")
        known = ("grad_accum_dtype", "param_dtype", "buffer_dtype")
        keys.check_keys(types, known, "data_types")
        for name, value in types.items():
            if value in (None, "auto", "fp32"):
                reading.note(f"data_types.{name}", value, "nothing to do")
            else:
                reading.warn(
                    f"data_types.{name}", value, "mp_policy= says it; gradient shards are float32"
                )


def _read_bf16(given: dict[str, Any], reading: Reading, policy: Precision | None) -> None:
    names = [name for name in ("bf16", "bfloat16") if name in given]
    if len(names) == 2 and given["bf16"] != given["bfloat16"]:
        raise ConfigError(
            "bf16 and bfloat16 are one section and differ: "
            f"{given['bf16']!r}, {given['bfloat16']!r}. Fix: keep bf16"
        )
    for name in names[:1]:
        if reading.left_to_us(name, given[name], "mp_policy"):
            continue
        bf16 = section(given[name], name)
        keys.check_keys(bf16, keys.BF16_KEYS, name)
        enabled = bf16.get("enabled", False)
        if is_auto(enabled):
            how = "off; from_deepspeed(..., mp_policy='bf16') turns it on"
            reading.note(f"{name}.enabled", enabled, "as mp_policy says" if policy else how)
        elif policy is not None and "enabled" not in bf16:
            reading.note(f"{name}.enabled", None, "as mp_policy says")
        elif policy is not None:
            raise ConfigError(
                f"{name}.enabled={enabled!r} and mp_policy={policy!s} are one setting; allowed: "
                'one of them, or "enabled": "auto". Fix: remove mp_policy, or replace it '
                "afterwards: dataclasses.replace(config, mp_policy=...)"
            )
        elif flag(enabled, f"{name}.enabled"):
            how = "computed and reduced in bfloat16, master shards in float32"
            reading.put("mp_policy", _BFLOAT16, f"{name}.enabled", enabled, how)
            reading.param_dtype = reading.param_dtype or torch.bfloat16
        else:
            reading.note(f"{name}.enabled", enabled, "off")
        if "immediate_grad_update" in bf16:
            value = bf16["immediate_grad_update"]
            reading.note(f"{name}.immediate_grad_update", value, "nothing to do")
        reading.warn_unusual(bf16, keys.BF16_WARNED, f"{name}.")


def _must_be_off(given: dict[str, Any], name: str, fix: str, reading: Reading) -> None:
    if name not in given or reading.left_to_us(name, given[name], "mp_policy"):
        return
    enabled = section(given[name], name).get("enabled", False)
    if not is_auto(enabled) and flag(enabled, f"{name}.enabled"):
        raise ConfigError(
            f"{name}.enabled={enabled!r} is not supported; allowed: false. Fix: remove the section "
            f"and {fix}"
        )
    reading.note(f"{name}.enabled", enabled, "off")


def read_training(given: dict[str, Any], reading: Reading) -> None:
    """Clipping, the dtype of reductions, accumulation and batch sizes, tensor parallelism."""
    if "gradient_clipping" in given:
        _read_clipping(given["gradient_clipping"], reading)
    _read_communication_dtype(given, reading)
    for name, hint in _HINTS.items():
        if name in given and not reading.left_to_us(name, given[name], f"training.{hint}"):
            value = count(given[name], name, least=1)
            reading.put(f"training.{hint}", value, name, given[name], "the training loop's to use")
    _read_allreduce_op(given, reading)
    _read_tensor_parallel(given, reading)
    if "allgather_size" in given:
        reading.note(
            "allgather_size", given["allgather_size"], keys.ZERO_MET["allgather_bucket_size"]
        )
    reading.warn_unusual(given, keys.TOP_WARNED, "")


def _read_clipping(value: Any, reading: Reading) -> None:
    name = "gradient_clipping"
    if not reading.left_to_us(name, value, name):
        norm = finite(value, name)
        if norm > 0:
            reading.put(name, norm, name, value)
        else:
            reading.put(name, None, name, value, "0 is off")


def _read_allreduce_op(given: dict[str, Any], reading: Reading) -> None:
    name = "gradient_allreduce_op"
    if name not in given or reading.left_to_us(name, given[name], ""):
        return
    if choice(given[name], name, ("mean", "sum")) == "sum":
        raise ConfigError(
            f"{name}='sum' is not supported; allowed: 'mean'. Fix: remove it and multiply the loss "
            "by the number of ranks"
        )
    reading.note(name, given[name], "as always: the mean over ranks")


def _read_communication_dtype(given: dict[str, Any], reading: Reading) -> None:
    name = "communication_data_type"
    value = given.get(name)
    if name not in given or reading.left_to_us(name, value, "reduce_dtype"):
        return
    word = choice(value, name, ("none", "fp32", "bf16", "fp16"))
    if word == "fp16":
        raise ConfigError(
            f"{name}={value!r} overflows without a loss scaler, which this version lacks; allowed: "
            "'fp32', 'bf16'. Fix: 'fp32'"
        )
    if word == "none":
        reading.note(name, value, "our default of reduce_dtype")
    else:
        dtype = torch.float32 if word == "fp32" else torch.bfloat16
        reading.put("reduce_dtype", dtype, name, value)


def _read_tensor_parallel(given: dict[str, Any], reading: Reading) -> None:
    name = "tensor_parallel"
    if name not in given or reading.left_to_us(name, given[name], ""):
        return
    tensor_parallel = section(given[name], name)
    keys.check_keys(tensor_parallel, keys.AUTOTP_KEYS, name)
    size = tensor_parallel.get("autotp_size", 0)
    if not is_auto(size) and 1 < count(size, f"{name}.autotp_size") <= UNLIMITED:
        raise ConfigError(
            f"{name}.autotp_size={size!r} is not read here; allowed: 0, 1. Fix: remove it and call "
            "tpkernels.parallelize(model, mesh['tp']) before tpkernels.zero"
        )
    reading.note(name, given[name], "off; tpkernels.parallelize splits modules over ranks")
