"""A DeepSpeed configuration from its file to keyword arguments: load, check the keys, read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tpkernels.errors import ConfigError
from tpkernels.zero.deepspeed import keys
from tpkernels.zero.deepspeed.reading import Reading
from tpkernels.zero.deepspeed.training_sections import read_precision, read_training
from tpkernels.zero.deepspeed.zero_section import read_zero
from tpkernels.zero.policies import DTYPE_NAMES


def read_deepspeed(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    hidden_size: int | None = None,
    param_dtype: torch.dtype | str | None = None,
    mp_policy: Any = None,
) -> dict[str, Any]:
    """Keyword arguments of ``ZeroConfig``; see ``ZeroConfig.from_deepspeed``."""
    if isinstance(path_or_dict, Mapping):
        given, source = dict(path_or_dict), "DeepSpeed configuration"
    else:
        given, source = _loaded(path_or_dict), f"DeepSpeed configuration {path_or_dict}"
    keys.check_keys(given, keys.TOP_KEYS, "the top level")
    reading = Reading(_hidden(hidden_size), _dtype(param_dtype))
    read_precision(given, reading, mp_policy)  # first: it says how many bytes an element has
    read_zero(given, reading)
    read_training(given, reading)
    for name, why in keys.TOP_NOT_READ.items():
        if name in given:
            reading.note(name, given[name], why)
    return reading.finish(source)


def _loaded(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin it with a mark
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"path_or_dict={path!r} cannot be read ({error}); allowed: the path of a JSON file, or "
            "a dict of what it holds. Fix: give the path of the file"
        ) from error
    try:
        given = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"path_or_dict={str(path)!r} is no JSON: {error}. Fix: repair that line (comments are "
            "not JSON), or give a dict"
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"path_or_dict={str(path)!r} holds a {type(given).__name__}, no object of keys and "
            'values. Fix: {"zero_optimization": {"stage": 3}}'
        )
    return given


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"path_or_dict: the key {twice!r} is given twice. Fix: keep one of them")
    return result


def _hidden(hidden_size: Any) -> int | None:
    whole = isinstance(hidden_size, int) and not isinstance(hidden_size, bool)
    if hidden_size is None or (whole and hidden_size > 0):
        return hidden_size
    raise ConfigError(
        f"hidden_size={hidden_size!r}; allowed: None or a whole number > 0. "
        "Fix: model.config.hidden_size"
    )


def _dtype(param_dtype: Any) -> torch.dtype | None:
    if param_dtype is None or isinstance(param_dtype, torch.dtype):
        return param_dtype
    if isinstance(param_dtype, str) and param_dtype in DTYPE_NAMES:
        return DTYPE_NAMES[param_dtype]
    raise ConfigError(
        f"param_dtype={param_dtype!r}; allowed: None, a torch.dtype or one of "
        f"{', '.join(DTYPE_NAMES)}. Fix: torch.bfloat16"
    )
