"""Which torch is installed, without importing it."""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchInstall:
    """An installed torch: ``torch.__version__``, ``torch.version.cuda`` and its directory."""

    version: str
    cuda: str | None
    directory: Path

    @property
    def include_directories(self) -> list[Path]:
        """Where its C++ headers are."""
        include = self.directory / "include"
        return [include, include / "torch" / "csrc" / "api" / "include"]

    @property
    def library_directory(self) -> Path:
        """Where its shared libraries are."""
        return self.directory / "lib"


def find_torch() -> TorchInstall | None:
    """The torch that ``import torch`` would find, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent
    version_file = directory / "version.py"
    if not version_file.is_file():
        return None
    facts = runpy.run_path(str(version_file))
    return TorchInstall(str(facts["__version__"]), facts.get("cuda"), directory)
