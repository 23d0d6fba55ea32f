"""Sizes in bytes as people write them: ``"256MiB"``, ``"1.5 GB"``, ``1 << 28``, ``math.inf``."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction
from typing import Any

from tpkernels.errors import ConfigError
from tpkernels.reference.prefetch_scheduler import UNLIMITED as UNLIMITED

_ALLOWED = (
    "a whole number of bytes >= 0, a number with a unit (B, kB, MB, GB, TB for powers of 1000; "
    'KiB, MiB, GiB, TiB for powers of 1024) such as "256MiB" or "1.5 GB", or math.inf'
)
_UNITS = {"": 1, "B": 1, "kB": 1000}
for _exponent, _letter in enumerate("KMGTPE", start=1):
    for _spelled in (f"{_letter}B", f"{_letter}B".lower()):  # not "Mb": that is a megabit
        _UNITS[_spelled] = 1000**_exponent
    for _spelled in (f"{_letter}iB", f"{_letter}iB".lower()):
        _UNITS[_spelled] = 1024**_exponent
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_INFINITE = ("inf", "infinite", "infinity", "unlimited")


def parse_bytes(value: Any, name: str) -> int:
    """The number of bytes that ``value``, given for the parameter ``name``, says.

    A fraction of a byte is dropped (``"1.1 GiB"``); ``math.inf``, ``"inf"`` and all that is at
    least ``UNLIMITED`` are ``UNLIMITED``. A unit without its B, as in ``"64k"``, is refused: it
    does not say 1000 or 1024.

    Raises:
        ConfigError: negative, a fraction without a unit, NaN, bool, or anything else.
    """
    size = None if isinstance(value, bool) else _size(value)
    if size is None or size < 0:
        raise ConfigError(
            f"{name}={value!r} is no size in bytes; allowed: {_ALLOWED}.{_fix(value)}"
        )
    return min(size, UNLIMITED)


def is_size(text: str) -> bool:
    """Whether ``text`` starts as a size does: with a digit, a sign or a point."""
    return text.strip()[:1] in set("+-.0123456789") or text.strip().lower() in _INFINITE


def _size(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _INFINITE:
            return UNLIMITED
        match = _SIZE.fullmatch(text)
        if match is None or match[2] not in _UNITS or ("." in match[1] and match[2] in ("", "B")):
            return None
        return int(Fraction(match[1]) * _UNITS[match[2]])
    if isinstance(value, float):
        if value == math.inf:
            return UNLIMITED
        return int(value) if value.is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _fix(value: Any) -> str:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    letter = match[2][:1].upper() if match else ""
    if match and letter in set("KMGTPE"):
        return f' Fix: write "{match[1]}{letter}iB" or "{match[1]}{letter}B"'
    if value is None or _is_negative(value):
        return " Fix: math.inf to set no bound"
    return ' Fix: write it with its unit, such as "256MiB"'


def _is_negative(value: Any) -> bool:
    try:
        return float(value) < 0
    except (TypeError, ValueError):
        return False


def format_bytes(size: int, *, round_up: bool = False) -> str:
    """``size`` bytes in the largest binary unit it fills, four digits: ``"256 MiB"``.

    ``round_up``: never less than ``size``, for a bound that is proposed.
    """
    if size >= UNLIMITED:
        return "unlimited"
    for exponent, letter in reversed(list(enumerate("KMGTPE", start=1))):
        value = Fraction(size, 1024**exponent)
        if value >= 1:
            step = 10 ** (4 - len(str(int(value))))  # the fourth digit
            rounded = Fraction(math.ceil(value * step), step) if round_up else value
            return f"{float(rounded):.4g} {letter}iB"
    return f"{size} B"
