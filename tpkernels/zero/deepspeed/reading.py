"""``Reading``: the settings read so far from a DeepSpeed configuration, with a note a key."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from tpkernels.errors import TPKernelsWarning
from tpkernels.zero.deepspeed.values import is_auto, is_usual


class Reading:
    """What has been read so far.

    Attributes:
        hidden_size: of the model, to resolve "auto"; None: unknown.
        param_dtype: in which parameters are gathered; None: not said.
        settings: keyword arguments of ``ZeroConfig``.
        hints: keyword arguments of its ``TrainingHints``.
    """

    def __init__(self, hidden_size: int | None, param_dtype: torch.dtype | None) -> None:
        self.hidden_size = hidden_size
        self.param_dtype = param_dtype
        self.settings: dict[str, Any] = {}
        self.hints: dict[str, Any] = {}
        self._notes: list[str] = []
        self._origins: list[tuple[str, Any, str]] = []
        self._warned: list[str] = []

    @property
    def itemsize(self) -> int:
        """Bytes of one gathered element; DeepSpeed counts elements, we count bytes."""
        return (self.param_dtype or torch.float32).itemsize

    def put(self, setting: str, value: Any, key: str, given: Any, how: str = "") -> None:
        """``key`` with its value ``given`` sets ``setting`` to ``value``."""
        target = self.hints if setting.startswith("training.") else self.settings
        target[setting.removeprefix("training.")] = value
        self._origins.append((setting, value, key))
        how = how.removesuffix("; ")
        self.note(key, given, f"{setting}={value}" + (f" ({how})" if how else ""))

    def note(self, key: str, given: Any, how: str) -> None:
        """``key`` sets nothing; ``how`` says why not, or what it means here."""
        self._notes.append(f"{key} = {_short(given)}: {how}")

    def left_to_us(self, key: str, given: Any, setting: str) -> bool:
        """Whether ``given`` is null or "auto", which leave ``setting`` at our default; noted."""
        if given is not None and not is_auto(given):
            return False
        self.note(key, given, f"our default of {setting}" if setting else "nothing to do")
        return True

    def warn(self, key: str, given: Any, why: str) -> None:
        """``key`` is accepted and not honoured; all such keys make one warning."""
        self._warned.append(f"{key} = {_short(given)}: {why}")
        self.note(key, given, f"not honoured: {why}")

    def warn_unusual(
        self, given: Mapping[str, Any], table: Mapping[str, tuple[Any, str]], where: str
    ) -> None:
        """Each key of ``table`` in ``given``: noted, and warned of where it asks for something."""
        for name, (usual, why) in table.items():
            if name not in given:
                continue
            key = f"{where}{name}"
            if is_usual(given[name], usual, key):
                self.note(key, given[name], "nothing to do")
            else:
                self.warn(key, given[name], why)

    def finish(self, source: str) -> dict[str, Any]:
        """Keyword arguments of ``ZeroConfig``, after the one warning; ``source`` names the file."""
        from tpkernels.zero.config import TrainingHints

        if self._warned:
            warnings.warn(
                f"{source}: {len(self._warned)} key(s) are accepted and not honoured: "
                + "; ".join(self._warned),
                TPKernelsWarning,
                stacklevel=4,  # the caller of ZeroConfig.from_deepspeed
            )
        return self.settings | {
            "training": TrainingHints(**self.hints),
            "notes": tuple(self._notes),
            "origins": tuple(self._origins),
        }


def _short(given: Any) -> str:
    if isinstance(given, (dict, list)) and given:
        return "{...}" if isinstance(given, dict) else "[...]"
    return repr(given)
