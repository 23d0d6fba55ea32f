"""The ``zero_optimization`` section: stage, limits, persistence, offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import UNLIMITED, format_bytes
from tpkernels.zero.deepspeed import keys
from tpkernels.zero.deepspeed.offload_sections import read_offload
from tpkernels.zero.deepspeed.reading import Reading
from tpkernels.zero.deepspeed.values import count, flag, is_auto, number

SECTION = "zero_optimization"


class ZeroSection:
    """Keys and values of the section under their bare names; ``key(name)`` is as the file has it.

    Raises:
        ConfigError: an unknown key, or ``stage3_x`` and ``x`` of different values.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        keys.check_keys(given, keys.ZERO_KEYS, SECTION)
        self._spelled: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        for spelled, value in given.items():
            name = keys.ZERO_ALIASES.get(spelled, spelled)
            if name in self.values and not _same(self.values[name], value):
                raise ConfigError(
                    f"{SECTION}: {self._spelled[name]}={self.values[name]!r} and "
                    f"{spelled}={value!r} are one setting and differ. Fix: keep one of them"
                )
            self._spelled.setdefault(name, spelled)
            self.values.setdefault(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def key(self, name: str) -> str:
        """The key of ``name`` as the file spells it, with its section."""
        return f"{SECTION}.{self._spelled[name]}"


def _same(one: Any, other: Any) -> bool:
    if one == other:
        return True
    try:
        return number(one, "") == number(other, "")
    except ConfigError:
        return False


def read_zero(given: dict[str, Any], reading: Reading) -> None:
    """Read the section of ``given``; a file without one has ZeRO off, as stage 0 does."""
    values = given.get(SECTION)
    if isinstance(values, bool):  # DeepSpeed's first format
        reading.note(SECTION, values, "deprecated: true is stage 1, false is stage 0")
        values = {"stage": int(values)}
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f'{SECTION}={values!r} must be an object of keys and values. Fix: {{"stage": 3}}'
        )
    section = ZeroSection(values)
    _read_stage(section, reading)
    _read_limits(section, reading)
    _read_persistence(section, reading)
    _read_reduction(section, reading)
    read_offload(section, reading)
    for name, why in keys.ZERO_MET.items():
        if name in section:
            reading.note(section.key(name), section[name], why)
    where = {name: keys.ZERO_WARNED[name] for name in keys.ZERO_WARNED if name in section}
    for name, (usual, why) in where.items():
        spelled = section.key(name).removeprefix(f"{SECTION}.")
        reading.warn_unusual({spelled: section[name]}, {spelled: (usual, why)}, f"{SECTION}.")


def _read_stage(section: ZeroSection, reading: Reading) -> None:
    if "stage" not in section or section["stage"] is None:
        raise ConfigError(
            f"{SECTION}.stage is not given, which turns ZeRO off in DeepSpeed; allowed: 1, 2, 3. "
            'Fix: "zero_optimization": {"stage": 3}, or use '
            "torch.nn.parallel.DistributedDataParallel"
        )
    key, given = section.key("stage"), section["stage"]
    if reading.left_to_us(key, given, "stage"):
        return
    stage = count(given, key)
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"{key}={given!r}; allowed: 1, 2, 3. Fix: stage 3, or for stage 0 use "
            "torch.nn.parallel.DistributedDataParallel"
        )
    reading.put("stage", stage, key, given)


def _elements(
    section: ZeroSection, reading: Reading, name: str, by_hidden: Callable[[int], int] | None
) -> tuple[int | None, str]:
    """(elements that ``name`` says, how "auto" was resolved); None: our default."""
    given = section[name]
    if not is_auto(given):
        return (None, "") if given is None else (count(given, section.key(name)), "")
    if by_hidden is None or reading.hidden_size is None:
        return None, ""
    return by_hidden(reading.hidden_size), f"from hidden_size={reading.hidden_size}"


def _unresolved(section: ZeroSection, reading: Reading, name: str, setting: str) -> None:
    how = f"our default of {setting}"
    if is_auto(section[name]) and reading.hidden_size is None and name != "max_live_parameters":
        how += "; give hidden_size= to resolve it as Hugging Face does"
    reading.note(section.key(name), section[name], how)


def _read_limits(section: ZeroSection, reading: Reading) -> None:
    """Elements become bytes; 0 live parameters mean: gather nothing ahead of its use."""
    name = "prefetch_bucket_size"
    if name in section:
        elements, how = _elements(section, reading, name, lambda h: int(0.9 * h * h))
        if elements is None:
            _unresolved(section, reading, name, "prefetch_bytes")
        else:
            _put_bytes(reading, "prefetch_bytes", elements, section.key(name), section[name], how)
    name = "max_live_parameters"
    if name not in section:
        return
    elements, _ = _elements(section, reading, name, None)
    if elements is None:
        _unresolved(section, reading, name, "max_live_bytes")
    elif elements == 0:
        # A bound of 0 bytes would forbid the unit in use as well. What DeepSpeed does with it, and
        # so what is meant, is to gather each module when it runs and never ahead.
        how = "0: nothing is gathered ahead of its use; a unit in use is not bounded"
        reading.put("prefetch_bytes", 0, section.key(name), section[name], how)
    else:
        how = "enforced here; units in use are always admitted"
        _put_bytes(reading, "max_live_bytes", elements, section.key(name), section[name], how)


def _put_bytes(
    reading: Reading, setting: str, elements: int, key: str, given: Any, how: str
) -> None:
    size = min(elements * reading.itemsize, UNLIMITED)
    said = f"{elements} elements of {reading.itemsize} bytes = {format_bytes(size)}"
    none = setting == "max_live_bytes" and size == UNLIMITED
    reading.put(setting, None if none else size, key, given, f"{said}; {how}" if how else said)


def _read_persistence(section: ZeroSection, reading: Reading) -> None:
    name = "param_persistence_threshold"
    if name in section:
        elements, how = _elements(section, reading, name, lambda h: 10 * h)
        if elements is None:
            _unresolved(section, reading, name, "persistence_threshold")
        else:
            said = "of a whole unit, not of a parameter" + (f"; {how}" if how else "")
            key, given = section.key(name), section[name]
            reading.put("persistence_threshold", elements, key, given, said)
    name = "model_persistence_threshold"
    if name in section:
        key, given = section.key(name), section[name]
        if not reading.left_to_us(key, given, "persistence_limit"):
            elements = count(given, key)
            reading.put(
                "persistence_limit", None if elements == UNLIMITED else elements, key, given
            )


def _read_reduction(section: ZeroSection, reading: Reading) -> None:
    if "overlap_comm" in section:
        key, given = section.key("overlap_comm"), section["overlap_comm"]
        if not reading.left_to_us(key, given, "max_pending_reduces"):
            if flag(given, key):
                reading.note(key, given, "gathers and reductions run beside compute, as always")
            else:
                how = "the next reduction waits for this one; prefetch has its own bound"
                reading.put("max_pending_reduces", 1, key, given, how)
    name = "reduce_bucket_size"
    if name in section:
        elements, how = _elements(section, reading, name, lambda h: h * h)
        said = "nothing to do" if elements is None else f"{elements} elements"
        why = "a unit is reduced as one; its size is set by units="
        reading.note(section.key(name), section[name], f"{said}{f' {how}' if how else ''}; {why}")
    name = "ignore_unused_parameters"
    if name in section:
        key, given = section.key(name), section[name]
        if not reading.left_to_us(key, given, "find_unused_parameters"):
            reading.put("find_unused_parameters", flag(given, key), key, given)
    if "leaf_module" in section:
        key, given = section.key("leaf_module"), section["leaf_module"]
        if not reading.left_to_us(key, given, "units"):
            if not isinstance(given, dict):
                raise ConfigError(f'{key}={given!r} must be an object. Fix: {{"classes": []}}')
            keys.check_keys(given, keys.LEAF_MODULE_KEYS, key)
            why = "a unit is gathered whole anyway; name classes in units= to make them units"
            reading.note(key, given, why)
