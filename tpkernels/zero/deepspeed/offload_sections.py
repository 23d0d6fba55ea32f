"""``offload_optimizer``, ``offload_param`` and the deprecated ``cpu_offload*`` keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpkernels.errors import ConfigError
from tpkernels.zero.deepspeed import keys
from tpkernels.zero.deepspeed.reading import Reading
from tpkernels.zero.deepspeed.values import choice, flag, is_auto
from tpkernels.zero.deepspeed.values import section as as_section

if TYPE_CHECKING:
    from tpkernels.zero.deepspeed.zero_section import ZeroSection

_DEVICES = ("none", "cpu", "nvme")


def read_offload(section: ZeroSection, reading: Reading) -> None:
    """Set ``offload_optimizer`` and ``pin_memory``; refuse what this version cannot offload."""
    _refuse_parameters(section, reading)
    devices = list(_devices(section, reading))
    if len({device for device, _, _ in devices}) > 1:
        said = ", ".join(f"{key} says {device!r}" for device, key, _ in devices)
        raise ConfigError(f"{said}: they are one setting and differ. Fix: keep offload_optimizer")
    for device, key, given in devices:
        how = "optimizer state and master shards; gathered parameters stay on the device"
        how = how if device == "cpu" else ""
        reading.put("offload_optimizer", device, key, given, _deprecated(key) + how)
    pins = list(_pins(section, reading))
    if len({pin for pin, _, _ in pins}) > 1:
        said = ", ".join(f"{key} says {pin}" for pin, key, _ in pins)
        raise ConfigError(f"{said}: they are one setting and differ. Fix: keep offload_optimizer's")
    for pin, key, given in pins:
        reading.put("pin_memory", pin, key, given, _deprecated(key))


def _deprecated(key: str) -> str:
    """DeepSpeed itself warns of these keys, and names the section that replaces them."""
    return "deprecated, use offload_optimizer; " if ".cpu_offload" in key else ""


def _devices(section: ZeroSection, reading: Reading) -> Iterator[tuple[str, str, Any]]:
    if "offload_optimizer" in section:
        key = section.key("offload_optimizer")
        if not reading.left_to_us(key, section["offload_optimizer"], "offload_optimizer"):
            yield from _device(as_section(section["offload_optimizer"], key), key, reading)
    if "cpu_offload" in section:
        key, given = section.key("cpu_offload"), section["cpu_offload"]
        if not reading.left_to_us(key, given, "offload_optimizer"):
            yield "cpu" if flag(given, key) else "none", key, given


def _device(given: dict[str, Any], where: str, reading: Reading) -> Iterator[tuple[str, str, Any]]:
    keys.check_keys(given, keys.OFFLOAD_OPTIMIZER_KEYS, where)
    reading.warn_unusual(given, keys.OFFLOAD_OPTIMIZER_WARNED, f"{where}.")
    read = ("device", "pin_memory", *keys.OFFLOAD_OPTIMIZER_WARNED)
    for name, value in given.items():
        if name not in read:
            reading.note(f"{where}.{name}", value, "nothing to do: nothing is swapped to NVMe")
    value = given.get("device")
    key = f"{where}.device"
    if value is None or is_auto(value):
        reading.note(key, value, "our default of offload_optimizer")
        return
    device = choice(value, key, _DEVICES)
    if device == "nvme":
        raise ConfigError(f"{key}='nvme' is not supported; allowed: 'none', 'cpu'. Fix: 'cpu'")
    yield device, key, value


def _pins(section: ZeroSection, reading: Reading) -> Iterator[tuple[bool, str, Any]]:
    offload = section.values.get("offload_optimizer")
    if isinstance(offload, dict) and "pin_memory" in offload:
        key = f"{section.key('offload_optimizer')}.pin_memory"
        if not reading.left_to_us(key, offload["pin_memory"], "pin_memory"):
            yield flag(offload["pin_memory"], key), key, offload["pin_memory"]
    if "cpu_offload_use_pin_memory" in section:
        key = section.key("cpu_offload_use_pin_memory")
        given = section["cpu_offload_use_pin_memory"]
        if not reading.left_to_us(key, given, "pin_memory"):
            yield flag(given, key), key, given


def _refuse_parameters(section: ZeroSection, reading: Reading) -> None:
    fix = (
        'Fix: remove it and write "offload_optimizer": {"device": "cpu"}, which moves the master '
        "shards and the optimizer's state to the CPU"
    )
    if "cpu_offload_param" in section:
        key, given = section.key("cpu_offload_param"), section["cpu_offload_param"]
        if not reading.left_to_us(key, given, "offload_optimizer"):
            if flag(given, key):
                raise ConfigError(f"{key}={given!r} is not supported; allowed: false. {fix}")
            reading.note(key, given, "parameters are not offloaded")
    if "offload_param" not in section:
        return
    key, given = section.key("offload_param"), section["offload_param"]
    if reading.left_to_us(key, given, "offload_optimizer"):
        return
    values = as_section(given, key)
    keys.check_keys(values, keys.OFFLOAD_PARAM_KEYS, key)
    device = values.get("device")
    left_open = device is None or is_auto(device)
    if not left_open and choice(device, f"{key}.device", _DEVICES) != "none":
        raise ConfigError(f"{key}.device={device!r} is not supported; allowed: 'none'. {fix}")
    reading.note(key, given, "parameters are not offloaded")
