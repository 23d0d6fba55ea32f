"""Mixed precision and offload as FSDP1, FSDP2 and plain names say them, read into our own terms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from tpkernels.errors import ConfigError

DTYPE_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
_ALLOWED = (
    "None, a torch.dtype (bfloat16, float32, float64), its name ('bf16', 'fp32', ...), "
    "torch.distributed.fsdp.MixedPrecisionPolicy or torch.distributed.fsdp.MixedPrecision"
)
# Without a loss scaler gradients underflow in silence. torch.amp.GradScaler does not do: each rank
# would look for infinities in its own shard alone, and ranks would skip different steps.
FP16_REFUSED = (
    "needs a loss scaler that all ranks agree on, which this version lacks; allowed: "
    "torch.bfloat16, torch.float32, torch.float64."
)
_OFFLOAD_DEVICES = ("none", "cpu")


@dataclass(frozen=True)
class Precision:
    """In which dtypes a unit is gathered, reduced and run; master shards are fp32 (or fp64).

    Attributes:
        param_dtype: of the gathered parameters, so of compute; None: the parameters' own.
        reduce_dtype: of the gradients while they are summed over ranks; None: as they come out
            of backward, which is ``param_dtype``.
        output_dtype: floating-point outputs of the root are cast to it; None: left alone.
        cast_forward_inputs: cast floating-point inputs of every unit to ``param_dtype``.
        buffer_dtype: floating-point buffers are cast to it; None: left alone.
        cast_root_inputs: as ``cast_forward_inputs``, of the root alone (FSDP1 has both).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = None
    cast_root_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            computes = field in ("param_dtype", "reduce_dtype")
            check_dtype(getattr(self, field), f"mp_policy.{field}", allow_fp16=not computes)

    def __str__(self) -> str:
        said = [(each.name, getattr(self, each.name)) for each in dataclasses.fields(self)]
        dtypes = [(n, str(v).removeprefix("torch.")) for n, v in said if n.endswith("_dtype") and v]
        casts = self.param_dtype is not None and self.cast_forward_inputs
        inputs = "every unit" if casts else "the root" if self.cast_root_inputs else "nothing"
        cast = [("inputs cast at", inputs)] if self.param_dtype else []
        return ", ".join(f"{name} {value}" for name, value in dtypes + cast) or "None"


@dataclass(frozen=True)
class Offload:
    """Where the optimizer's state and the master shards live: ``optimizer`` "none" or "cpu".

    ``pin_memory``: with "cpu", in page-locked memory, for a module on CUDA.
    """

    optimizer: str = "none"
    pin_memory: bool = True


def dtype_named(value: Any) -> Any:
    """The dtype whose name ``value`` is ("bf16"), or else ``value`` itself."""
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def check_dtype(dtype: Any, name: str, *, allow_fp16: bool = False) -> None:
    """Raise ConfigError unless ``dtype`` is None or a floating-point dtype of 16 bits or more.

    float16 only where nothing is computed or summed in it, see :data:`FP16_REFUSED`.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES.values():
        half = " torch.float16," if allow_fp16 else ""
        raise ConfigError(
            f"{name}={dtype!r} is not known; allowed: None, torch.bfloat16,{half} "
            "torch.float32, torch.float64. Fix: use torch.bfloat16"
        )
    if dtype is torch.float16 and not allow_fp16:
        raise ConfigError(
            f"{name}=torch.float16 {FP16_REFUSED} "
            "Fix: use torch.bfloat16, whose range is that of float32"
        )


def resolve_mp_policy(value: Any) -> Precision:
    """The :class:`Precision` that ``value`` means.

    - None: parameters are gathered and reduced in their own dtype, nothing is cast.
    - a dtype or its name: compute in it, sum gradients over ranks in float32 (float64 for it).
    - ``MixedPrecisionPolicy`` (FSDP2): field by field.
    - ``MixedPrecision`` (FSDP1): its ``cast_root_forward_inputs`` is ``cast_root_inputs``. Batch
      norms are computed in ``param_dtype`` like the rest; FSDP1 keeps them apart in fp32.
    - :class:`Precision`: itself.

    Raises:
        ConfigError: any other value, float16, ``keep_low_precision_grads``, classes to ignore
            other than FSDP1's default, or a field that this version does not know.
    """
    if isinstance(value, Precision):
        return value
    if value is None:
        return Precision(cast_forward_inputs=False, cast_root_inputs=False)
    value = dtype_named(value)
    if isinstance(value, torch.dtype):
        check_dtype(value, "mp_policy")
        return Precision(value, torch.float64 if value is torch.float64 else torch.float32)
    if isinstance(value, MixedPrecisionPolicy):
        _only_known(value, {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"})
        return Precision(
            value.param_dtype,
            value.reduce_dtype,
            value.output_dtype,
            value.cast_forward_inputs,
            cast_root_inputs=value.cast_forward_inputs,
        )
    if isinstance(value, MixedPrecision):
        return _of_fsdp1(value)
    raise ConfigError(
        f"mp_policy={value!r} is not known; allowed: {_ALLOWED}. Fix: mp_policy='bf16'"
    )


def _of_fsdp1(value: MixedPrecision) -> Precision:
    known = {"param_dtype", "reduce_dtype", "buffer_dtype"}
    known |= {"cast_forward_inputs", "cast_root_forward_inputs"}
    _only_known(value, known)
    return Precision(
        value.param_dtype,
        value.reduce_dtype,
        None,
        value.cast_forward_inputs,
        value.buffer_dtype,
        value.cast_root_forward_inputs,
    )


def _only_known(value: Any, known: set[str]) -> None:
    """A field we do not read must be as the class makes it, lest it be ignored in silence."""
    default = type(value)()
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.name not in known and given != getattr(default, field.name):
            raise ConfigError(
                f"mp_policy: {type(value).__name__}({field.name}={given!r}) has no meaning here; "
                f"allowed: its default, {getattr(default, field.name)!r}. "
                f"Fix: remove {field.name}; gradients and master shards are kept in float32"
            )


def resolve_offload(value: Any) -> Offload:
    """The :class:`Offload` that ``value`` means; what is offloaded is the same for all of them.

    The optimizer's state, the master shards and the optimizer's step move to the CPU. The gathered
    copies that compute uses never do: they live on the module's device while they are in use. This
    is what FSDP's policies, which keep the shards on the CPU, amount to.

    - None, "none", FSDP2's ``OffloadPolicy()``, FSDP1's ``CPUOffload()``: nothing.
    - "cpu", FSDP1's ``CPUOffload(offload_params=True)``: to page-locked memory.
    - FSDP2's ``CPUOffloadPolicy(pin_memory=...)``: to page-locked memory, or ordinary memory.

    Raises:
        ConfigError: any other value, "nvme" by name.
    """
    if isinstance(value, Offload):
        check_offload_device(value.optimizer, "offload_policy")
        return value
    if isinstance(value, CPUOffloadPolicy):
        return Offload("cpu", value.pin_memory)
    if isinstance(value, CPUOffload):
        return Offload("cpu" if value.offload_params else "none")
    if value is None or type(value) is OffloadPolicy:
        return Offload()
    check_offload_device(value, "offload_policy")
    return Offload(value)


def check_offload_device(value: Any, name: str) -> None:
    """Raise ConfigError unless ``value`` is "none" or "cpu"; "nvme" is refused by name."""
    if isinstance(value, str) and value in _OFFLOAD_DEVICES:
        return
    what = "is not supported" if value == "nvme" else "is not known"
    policies = " or a CPUOffloadPolicy, OffloadPolicy or CPUOffload of torch.distributed.fsdp"
    raise ConfigError(
        f"{name}={value!r} {what}; allowed: None, 'none', 'cpu'"
        f"{policies if name == 'offload_policy' else ''}. Fix: {name}='cpu'"
    )
