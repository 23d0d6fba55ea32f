"""The shapes that are measured: one rank's shard of known models' MLPs, and your own.

==========  =======  =====  =========  =====  =========================================
model       d_model  d_ff   act        gated  source
==========  =======  =====  =========  =====  =========================================
gpt2-xl     1600     6400   gelu_tanh  no     Radford et al. 2019, table 2; d_ff = 4 d_model and
                                              tanh GELU: openai/gpt-2, src/model.py
gpt3-13b    5120     20480  gelu_tanh  no     arXiv:2005.14165, table 2.1, which prints d_model
                                              5140; but its 40 heads of 128 make 5120, and 5140 is
                                              no multiple of 8. d_ff = 4 d_model (section 2.1)
gpt3-175b   12288    49152  gelu_tanh  no     arXiv:2005.14165, table 2.1
llama3-8b   4096     14336  silu       yes    arXiv:2407.21783, table 3
llama3-70b  8192     28672  silu       yes    arXiv:2407.21783, table 3
==========  =======  =====  =========  =====  =========================================

The GPTs have biases, the Llamas have none. Tensor parallelism over R ranks splits d_ff: a rank
holds N = d_ff / R columns of the first GEMM, [M, K = d_model] x [K, N].
"""

# M tokens, N this rank's part of d_ff, K d_model

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpkernels.errors import ConfigError

CUSTOM = "custom"


@dataclass(frozen=True)
class ModelMLP:
    """An MLP as its paper describes it."""

    name: str
    d_model: int
    d_ff: int
    act: str
    gated: bool
    bias: bool


MODELS = {
    mlp.name: mlp
    for mlp in (
        ModelMLP("gpt2-xl", 1600, 6400, "gelu_tanh", False, True),
        ModelMLP("gpt3-13b", 5120, 20480, "gelu_tanh", False, True),
        ModelMLP("gpt3-175b", 12288, 49152, "gelu_tanh", False, True),
        ModelMLP("llama3-8b", 4096, 14336, "silu", True, False),
        ModelMLP("llama3-70b", 8192, 28672, "silu", True, False),
    )
}
TP = (1, 2, 4, 8)
# All of 1, 16, 256, 2048, 8192 tokens; what matters most first, should time run out.
M = (2048, 16, 8192, 1, 256)


@dataclass(frozen=True)
class Shard:
    """One rank's part of an MLP, at M tokens.

    Attributes:
        model: a key of :data:`MODELS`, or :data:`CUSTOM`.
        tp: R, the ranks that share the MLP.
        m, n, k: tokens, this rank's d_ff, d_model.
        act: what the model itself uses.
    """

    model: str
    tp: int
    m: int
    n: int
    k: int
    act: str
    gated: bool
    bias: bool

    def __str__(self) -> str:
        name = "" if self.model == CUSTOM else f"{self.model} tp{self.tp} "
        return f"{name}M={self.m} N={self.n} K={self.k}"


def shards(models: Iterable[str], tps: Iterable[int], ms: Iterable[int]) -> Iterator[Shard]:
    """All combinations, in the order given; M varies slowest, the model fastest.

    Raises:
        ConfigError: an R that does not divide a model's d_ff.
    """
    models, tps = tuple(models), tuple(tps)
    for m in ms:
        for tp in tps:
            for name in models:
                mlp = MODELS[name]
                if mlp.d_ff % tp:
                    raise ConfigError(
                        f"--tp {tp} does not divide d_ff {mlp.d_ff} of {name}. "
                        f"Fix: --tp {' '.join(map(str, TP))}"
                    )
                n = mlp.d_ff // tp
                yield Shard(name, tp, m, n, mlp.d_model, mlp.act, mlp.gated, mlp.bias)


def custom(
    shapes: Sequence[tuple[int, int, int]], act: str = "gelu_tanh", gated: bool = False
) -> list[Shard]:
    """Shards of no particular model from (M, N, K); a bias where it is not gated."""
    return [Shard(CUSTOM, 1, m, n, k, act, gated, not gated) for m, n, k in shapes]


def small() -> list[Shard]:
    """What one CPU core measures in about a minute."""
    return [*shards(["gpt2-xl"], [4, 8], [16, 1, 256]), *shards(["llama3-8b"], [8], [16, 1])]


def quick(device_type: str) -> list[Shard]:
    """A few shapes of each kind."""
    if device_type == "cpu":
        return list(shards(["gpt2-xl"], [8], [16, 1]))
    return list(shards(MODELS, [1, 8], [2048, 16]))
