"""``ZeroConfig``: every setting of :func:`tpkernels.zero`, checked, and where each came from."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import UNLIMITED, format_bytes, parse_bytes
from tpkernels.zero.policies import (
    Offload,
    Precision,
    check_dtype,
    check_offload_device,
    dtype_named,
    resolve_mp_policy,
)

_FLAGS = (
    "pin_memory",
    "reshard_after_forward",
    "reshard_after_backward",
    "strict",
    "find_unused_parameters",
    "separate_reduce_group",
)
_NOT_SETTINGS = ("notes", "origins", "training")


@dataclass(frozen=True)
class TrainingHints:
    """What a DeepSpeed file says of the training loop, which is the caller's; None: not said.

    ``gradient_accumulation_steps`` is done with ``manager.no_sync()``; batch sizes are samples.
    """

    gradient_accumulation_steps: int | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None  # train_micro_batch_size_per_gpu

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _whole(f"training.{each.name}", getattr(self, each.name), 1, or_none=True)
        self.check_world(None)

    def check_world(self, world: int | None) -> None:
        """Raise ConfigError unless the batches agree; ``world``: ranks that share a batch."""
        whole = self.train_batch_size
        known = {
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "ranks": world,
        }
        part = math.prod(each for each in known.values() if each is not None)
        exact = None not in known.values()
        if whole is None or (whole == part if exact else whole % part == 0):
            return
        said = " * ".join(f"{name} {value}" for name, value in known.items() if value is not None)
        said += f" = {part}" if "*" in said else ""
        raise ConfigError(
            f"train_batch_size={whole} is not {'' if exact else 'a multiple of '}{said}; "
            "allowed: train_batch_size = micro_batch_size (train_micro_batch_size_per_gpu) * "
            "gradient_accumulation_steps * data-parallel ranks. Fix: "
            + (f"train_batch_size={part}" if exact else "leave one of them out")
        )


@dataclass(frozen=True)
class ZeroConfig:
    """Settings of ``tpkernels.zero(module, mesh, config=...)``; print it to see them all.

    Attributes:
        stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters.
        prefetch_bytes: bytes gathered and not yet in use, at most; what ``parse_bytes`` reads;
            0: no prefetch.
        max_live_bytes: bytes of everything gathered, at most, as far as the units in use allow: a
            unit in use is never refused; None (or infinite): no bound.
        units: what is gathered together, see :func:`tpkernels.zero.units.find_units`.
        mp_policy: what :func:`tpkernels.zero.policies.resolve_mp_policy` reads; kept as Precision.
        reduce_dtype: dtype, or its name, in which gradients are summed over ranks; None: as
            mp_policy says.
        offload_optimizer: "none" or "cpu": where optimizer state and master shards live.
        pin_memory: offload to page-locked memory.
        reshard_after_forward: free a unit after its forward and gather it again in backward.
        reshard_after_backward: False keeps the gathered weights after backward, which
            ``torch.autograd.grad(create_graph=True)`` needs.
        strict: raise where a bound cannot be kept, instead of a warning.
        find_unused_parameters: a parameter without a gradient on some ranks counts as zero there;
            without one on all ranks it gets none.
        persistence_threshold: units of fewer elements stay gathered; 0: none.
        persistence_limit: elements that stay gathered so, over all units; None: no bound.
        gradient_clipping: the largest global norm of the gradients; None: not clipped.
        separate_reduce_group: reduce over a second process group, so that gathers and reductions
            do not wait for each other on one communicator.
        max_pending_reduces: reductions in flight at once; at least 1.
        training: :class:`TrainingHints`.
        notes: one line for each key of a DeepSpeed file: how it was read.
        origins: (setting, value, key) of each setting that such a file gave.

    Raises:
        ConfigError: a value that cannot work, with the parameter, the value, what is allowed.
    """

    stage: int = 3
    prefetch_bytes: int = 256 * 2**20
    max_live_bytes: int | None = None
    units: Any = None
    mp_policy: Precision = None  # type: ignore[assignment]  # a Precision after __post_init__
    reduce_dtype: torch.dtype | None = None
    offload_optimizer: str = "none"
    pin_memory: bool = True
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    strict: bool = False
    find_unused_parameters: bool = False
    persistence_threshold: int = 0
    persistence_limit: int | None = None
    gradient_clipping: float | None = None
    separate_reduce_group: bool = False
    max_pending_reduces: int = 2
    training: TrainingHints = field(default_factory=TrainingHints)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    origins: tuple[tuple[str, Any, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_stage(self.stage)
        self._set("prefetch_bytes", parse_bytes(self.prefetch_bytes, "prefetch_bytes"))
        if self.max_live_bytes is not None:
            live = parse_bytes(self.max_live_bytes, "max_live_bytes")
            self._set("max_live_bytes", None if live == UNLIMITED else live)
        self._set("mp_policy", resolve_mp_policy(self.mp_policy))
        self._check_reduce_dtype()
        if self.offload_optimizer is None:
            self._set("offload_optimizer", "none")
        check_offload_device(self.offload_optimizer, "offload_optimizer")
        for name in _FLAGS:
            _flag(name, getattr(self, name))
        _whole("persistence_threshold", self.persistence_threshold, 0)
        _whole("persistence_limit", self.persistence_limit, 0, or_none=True)
        _whole("max_pending_reduces", self.max_pending_reduces, 1)
        _check_norm(self.gradient_clipping)
        if not isinstance(self.training, TrainingHints):
            raise ConfigError(
                f"training={self.training!r} must be a TrainingHints. Fix: "
                "training=TrainingHints(gradient_accumulation_steps=4)"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else

    def _check_reduce_dtype(self) -> None:
        self._set("reduce_dtype", dtype_named(self.reduce_dtype))
        check_dtype(self.reduce_dtype, "reduce_dtype")
        other = self.mp_policy.reduce_dtype
        if None not in (self.reduce_dtype, other) and self.reduce_dtype != other:
            raise ConfigError(
                f"reduce_dtype={self.reduce_dtype} and mp_policy's reduce_dtype={other} differ; "
                "allowed: one of them, or the same. Fix: remove reduce_dtype"
            )

    @property
    def precision(self) -> Precision:
        """``mp_policy`` with this config's ``reduce_dtype`` in it."""
        return dataclasses.replace(
            self.mp_policy, reduce_dtype=self.reduce_dtype or self.mp_policy.reduce_dtype
        )

    @property
    def offload(self) -> Offload:
        """``offload_optimizer`` and ``pin_memory`` as :func:`resolve_offload` would say them."""
        return Offload(self.offload_optimizer, self.pin_memory)

    @classmethod
    def from_deepspeed(
        cls,
        path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
        *,
        hidden_size: int | None = None,
        param_dtype: torch.dtype | str | None = None,
        mp_policy: Any = None,
    ) -> ZeroConfig:
        """The config that a DeepSpeed JSON file or its dict means.

        Equivalent to ``ZeroConfig(...)`` with the values printed by ``report()``. A key that is
        absent has this package's default, not DeepSpeed's.

        Args:
            path_or_dict: a JSON file, or what it holds.
            hidden_size: of the model; resolves "auto" as Hugging Face's Trainer does.
            param_dtype: in which parameters are gathered: DeepSpeed counts elements, we count
                bytes; None: bfloat16 where the bf16 section is on, else as ``mp_policy`` says.
            mp_policy: as of ``ZeroConfig``, where the file leaves it open ("auto", or no bf16
                section); None: float32 there.

        Raises:
            ConfigError: an unknown key, values that contradict each other, or that cannot be
                honoured; the message names the key.

        Warns:
            TPKernelsWarning: once for all keys that are accepted and not honoured.
        """
        from tpkernels.zero.deepspeed import read_deepspeed

        return cls(**read_deepspeed(path_or_dict, hidden_size, param_dtype, mp_policy))

    def report(self) -> str:
        """A table of setting, value and where it is from, then the notes on each key read."""
        rows = [("setting", "value", "from")]
        for name, value, default in _settings(self):
            key = [k for n, v, k in self.origins if n == name and v == value]
            origin = key[-1] if key else "default" if value == default else "given"
            rows.append((name, _shown(name, value), origin))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows]
        if self.notes:
            lines += ["", "how each key was read:", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


def _settings(config: ZeroConfig) -> list[tuple[str, Any, Any]]:
    """(name, value, default) of every setting, those of ``training`` with their prefix."""
    default = ZeroConfig()
    rows = [
        (each.name, getattr(config, each.name), getattr(default, each.name))
        for each in dataclasses.fields(config)
        if each.name not in _NOT_SETTINGS
    ]
    return rows + [
        (f"training.{each.name}", getattr(config.training, each.name), None)
        for each in dataclasses.fields(TrainingHints)
    ]


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    return str(value).removeprefix("torch.")


def _check_stage(stage: Any) -> None:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in range(4):
        raise ConfigError(f"stage={stage!r} is not known; allowed: 1, 2, 3. Fix: stage=3")
    if stage == 0:
        raise ConfigError(
            "stage=0 shards nothing, which is plain data parallelism; allowed: 1, 2, 3. "
            "Fix: use torch.nn.parallel.DistributedDataParallel, or stage=1"
        )


def _flag(name: str, value: Any) -> None:
    if isinstance(value, bool):
        return
    extra = ""
    if name == "reshard_after_forward" and isinstance(value, int):
        extra = " (resharding to a smaller group is not supported)"
    raise ConfigError(f"{name}={value!r} must be True or False{extra}. Fix: {name}=True")


def _whole(name: str, value: Any, least: int, *, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"{'None or ' if or_none else ''}a whole number >= {least}"
        fix = _near(value, least, None if or_none else least)
        raise ConfigError(f"{name}={value!r}; allowed: {allowed}. Fix: {name}={fix}")


def _near(value: Any, least: int, otherwise: int | None) -> int | None:
    """The whole number that ``value`` seems to mean."""
    try:
        number = math.ceil(float(value))
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if number >= least and not isinstance(value, bool) else otherwise


def _check_norm(value: Any) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ConfigError(
            f"gradient_clipping={value!r}; allowed: None or a number > 0. Fix: None to not clip"
        )
