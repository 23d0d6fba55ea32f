"""Values as they occur in DeepSpeed files: numbers as floats or strings, flags as strings."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

from tpkernels.errors import ConfigError
from tpkernels.zero.byte_sizes import UNLIMITED


def is_auto(value: Any) -> bool:
    """Whether ``value`` is the placeholder that Hugging Face's Trainer fills."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def number(value: Any, key: str) -> Decimal:
    """``5e7``, ``50000000`` or ``"5e7"`` as an exact number >= 0, perhaps infinite."""
    result = None
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            result = Decimal(str(value).strip())
        except InvalidOperation:
            result = None
    if result is None or result.is_nan() or result < 0:
        raise ConfigError(
            f'{key}={value!r}; allowed: a number >= 0, as a number or a string, or "auto". '
            f"Fix: write it as a number"
        )
    return result


def count(value: Any, key: str, least: int = 0) -> int:
    """``value`` as a whole number >= ``least``; ``UNLIMITED`` at most."""
    result = number(value, key)
    if result >= UNLIMITED:
        return UNLIMITED
    if result != result.to_integral_value() or result < least:
        raise ConfigError(
            f'{key}={value!r}; allowed: a whole number >= {least}, or "auto". '
            f"Fix: round it to a whole number"
        )
    return int(result)


def finite(value: Any, key: str) -> float:
    """``value`` as a finite float >= 0."""
    result = float(number(value, key))
    if math.isinf(result):
        raise ConfigError(f"{key}={value!r} must be finite. Fix: remove it to set no bound")
    return result


def flag(value: Any, key: str) -> bool:
    """``value`` as a bool: true, false, the words as strings, 0 or 1."""
    known = {"true": True, "false": False, "1": True, "0": False}
    if isinstance(value, (bool, int, str)):
        word = str(value).strip().lower()
        if word in known:
            return known[word]
    raise ConfigError(f'{key}={value!r}; allowed: true, false or "auto". Fix: write true or false')


def section(value: Any, key: str) -> dict[str, Any]:
    """``value`` as the keys and values of a nested section."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{key}={value!r} must be an object of keys and values. "
            f'Fix: "{key.split(".")[-1]}": {{}}'
        )
    return value


def choice(value: Any, key: str, allowed: tuple[str, ...]) -> str:
    """``value`` as one of the words ``allowed``, in lower case."""
    if isinstance(value, str) and value.strip().lower() in allowed:
        return value.strip().lower()
    raise ConfigError(
        f"{key}={value!r} is not known; allowed: {', '.join(allowed)}. Fix: {allowed[0]!r}"
    )


def is_usual(value: Any, usual: Any, key: str) -> bool:
    """Whether ``value`` is ``usual``, what DeepSpeed does anyway, or is left to the reader.

    Raises:
        ConfigError: ``value`` is no flag where ``usual`` is one, no number where it is one.
    """
    if value is None or is_auto(value):
        return True
    if usual is None:
        return value in ({}, False)
    if isinstance(usual, bool):
        return flag(value, key) == usual
    if usual < 0 and str(value).strip() in (str(usual), f"{usual}.0"):
        return True
    return number(value, key) == Decimal(usual)
