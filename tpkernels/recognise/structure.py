"""What the recogniser says about a model: frozen descriptions, and which layers it may touch.

Paths inside a structure are relative to the module at which it was found (``Found.path``), those
of :class:`VocabularyStructure` to the root of the model. Nothing here changes a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

ActivationName = Literal["none", "gelu", "gelu_tanh", "silu", "relu", "relu2"]
WidthMeaning = Literal["q_heads", "kv_heads", "q_width", "kv_width", "kv_groups"]


@dataclass(frozen=True)
class MLPStructure:
    """Two linear layers with an activation between them.

    Equivalent to, with ``x -> up -> h`` and dropouts where they are named::

        plain        down(act(up(x)))
        gated        down(act(gate(x)) * up(x))
        gated_fused  a, b = up(x).chunk(2, -1)
                     down(act(a) * b if gate_first else a * act(b))
    """

    kind: Literal["plain", "gated", "gated_fused"]
    up: str
    down: str
    gate: str | None = None
    act: ActivationName | None = None
    """None: element-wise, but none of ours. The leaves can be split, nothing can be fused."""
    whole: bool = False
    """The forward of the found module is exactly the formula, so the module can be replaced.
    False: the pattern lies inside a larger forward, only the leaves may be replaced."""
    act_module: str | None = None
    """The activation module, when it is one, is used only there and carries no hook."""
    inner_dropout: str | float | None = None
    """Between activation and ``down``: the path of an ``nn.Dropout`` or the p of a functional."""
    outer_dropout: str | float | None = None
    """After ``down``; only when ``whole``."""
    gate_first: bool = True
    """gated_fused: the first half is the activated one."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the linear layers, each once."""
        return tuple(path for path in (self.gate, self.up, self.down) if path is not None)


@dataclass(frozen=True)
class AttentionStructure:
    """Query, key, value and output projections with a head count.

    ``how`` says what may be done:

    - ``"leaves"``: keep the forward (it views with -1), split the leaves and set
      ``width_attributes`` of ``core`` to rank-local values.
    - ``"replace"``: the forward was proved equal to canonical attention, replace the module::

        q, k, v = heads(q_proj(x)), heads(k_proj(x)), heads(v_proj(x))
        y = scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, enable_gqa=True)
        outer_dropout(out_proj(merge_heads(y)))

    - ``"mha"``: a ``torch.nn.MultiheadAttention``; ``q``, ``k``, ``v`` or ``qkv`` name its
      parameters (``in_proj_weight``, ``q_proj_weight``...), ``out`` its output projection.

    A fused projection is laid out in blocks of rows, :attr:`qkv_blocks`.
    """

    core: str
    q: str | None
    k: str | None
    v: str | None
    qkv: str | None
    qkv_layout: Literal["blocks"] | None
    out: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width_attributes: dict[str, WidthMeaning] = field(default_factory=dict)
    cross: bool = False
    """Keys and values may come from another sequence."""
    how: Literal["leaves", "replace", "mha"] = "leaves"
    causal: bool | None = None
    """None: decided by the caller or the mask."""
    dropout: str | float | None = None
    """Of the attention probabilities: the path of an ``nn.Dropout`` or a number."""
    scale: float | None = None
    """None: ``head_dim ** -0.5``."""
    mask_argument: str | None = None
    outer_dropout: str | float | None = None
    """After ``out``; only for ``how="replace"`` (elsewhere it stays in the forward)."""
    mask_kind: Literal["sdpa", "additive", "nonzero_keep"] | None = None
    """How ``how="replace"`` read ``mask_argument``, broadcastable to [batch, heads, T, T]. sdpa:
    bool True = attend, float is added; additive: added; nonzero_keep: 0 = hidden, any dtype."""
    mask_replaces_causal: bool = False
    """The module is causal only when it is given no mask (``is_causal=mask is None``)."""

    @property
    def qkv_blocks(self) -> tuple[tuple[str, int], ...]:
        """(role, rows) of each block of the fused projection, in order; empty without one."""
        if self.qkv is None:
            return ()
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query = () if self.q is not None else (("q", q_width),)
        return (*query, ("k", kv_width), ("v", kv_width))

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the linear layers, each once (``how="mha"``: only the output projection)."""
        projections = () if self.how == "mha" else (self.q, self.k, self.v, self.qkv)
        return tuple(path for path in (*projections, self.out) if path is not None)


@dataclass(frozen=True)
class VocabularyStructure:
    """The token embedding and the output head of a language model; paths from the root."""

    embedding: str
    head: str | None
    tied: bool
    """Both hold the same Parameter."""
    head_bias_tied_to: str | None
    """Another name of the head's bias (BERT registers it twice)."""


Structure = MLPStructure | AttentionStructure | VocabularyStructure


@dataclass(frozen=True)
class Found:
    """A structure at ``path``; ``aliases`` are other names of the same module object."""

    path: str
    kind: Literal["mlp", "attention", "vocabulary"]
    structure: Structure
    reason: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """A layer that stays dense: a linear leaf, an embedding, or an attention as one.

    ``in_block``: inside the repeated blocks, where a layer that cannot be split costs every rank
    the whole computation.
    """

    path: str
    kind: Literal["linear", "attention", "mlp", "embedding"]
    reason: str
    fix: str | None
    in_block: bool


@dataclass(frozen=True)
class Recognition:
    """Everything that was found and everything that was kept, in the order of the tree."""

    found: list[Found]
    kept: list[Kept]


Matches = Sequence[tuple[str, MLPStructure | AttentionStructure]]
"""What an adapter finds in a module: structures with the path of the part they are found at."""


@dataclass(frozen=True)
class MLPForm:
    """What lies before a linear layer; ``splits``: its code works on a part of the features."""

    structure: MLPStructure
    splits: bool


@dataclass(frozen=True)
class Refusal:
    """A module that looks like a structure but is not one that can be split; never half of it."""

    reason: str
    fix: str | None = None
    kind: Literal["attention", "mlp"] = "attention"


def is_leaf_linear(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x @ W + b`` and nothing else, from plain parameters.

    ``nn.Linear`` and subclasses that keep its forward, and transformers' ``Conv1D``.
    """
    return looks_linear(module) and linear_problem(module) is None


def leaf_features(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear leaf, read from its weight."""
    assert isinstance(module.weight, Tensor)
    rows, columns = module.weight.shape
    return (int(columns), int(rows)) if isinstance(module, nn.Linear) else (int(rows), int(columns))


def looks_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer of some kind, also quantised, wrapped or unknown."""
    if isinstance(module, nn.Linear) or _conv1d_class(module) is not None:
        return True
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    by_name = "linear" in type(module).__name__.lower()
    own_tensors = bool(module._parameters or module._buffers)
    return all(isinstance(size, int) for size in sizes) and (by_name or own_tensors)


def linear_problem(module: nn.Module) -> str | None:
    """Why a layer that looks linear is no leaf that can be split; None when it is one."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    plain = nn.Linear if isinstance(module, nn.Linear) else _conv1d_class(module)
    if plain is None:
        return f"{name} is not an nn.Linear"
    if type(module).forward is not plain.forward or "forward" in vars(module):
        return f"{name} overrides the forward of {plain.__name__}"
    if any(True for _ in module.children()):
        return f"{name} has modules of its own (a parametrization or an adapter)"
    extra = set(module._parameters) - {"weight", "bias"} | set(module._buffers)
    if extra:
        return f"{name} has tensors beside weight and bias: {', '.join(sorted(extra))}"
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__qualname__}, not a plain nn.Parameter"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions, not 2"
    return None


def _conv1d_class(module: nn.Module) -> type[nn.Module] | None:
    """transformers' Conv1D among the bases, found by name: transformers is never imported."""
    for base in type(module).__mro__:
        if base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils":
            return base
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs anything beside its class's forward."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)
