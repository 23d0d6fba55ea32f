import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.recognise.simulated_split import dense_and_summed
from tpkernels.recognise import AttentionStructure, MLPStructure, recognise


def mha(cross=False, **kwargs):
    return AttentionStructure(
        core="", q=None, k=None, v=None, qkv="in_proj_weight", qkv_layout="blocks", out="out_proj",
        num_heads=4, num_kv_heads=4, head_dim=6, cross=cross, how="mha", dropout=0.1,
        mask_argument="attn_mask", **kwargs,
    )  # fmt: skip


def feed_forward(act, act_module=None):
    return MLPStructure(
        "plain", "linear1", "linear2", act=act, act_module=act_module, inner_dropout="dropout"
    )


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "act", "act_module"),
    [("gelu", "gelu", None), (F.silu, "silu", None), (nn.ReLU(), "relu", "activation")],
    ids=["name", "function", "module"],
)
def test_encoder_layers(norm_first, bias, activation, act, act_module):
    layer = nn.TransformerEncoderLayer(
        24, 4, 40, activation=activation, batch_first=True, norm_first=norm_first, bias=bias
    )
    recognition = recognise(layer)
    assert [(f.path, f.structure) for f in recognition.found] == [
        ("", feed_forward(act, act_module)),
        ("self_attn", mha()),
    ]
    assert not recognition.kept
    layer = layer.double().train()  # training: the layer's own code runs, not its fused path
    for dropout in (m for m in layer.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    layer.self_attn.dropout = 0.0
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    dense, summed = dense_and_summed(layer, recognition.found[0], lambda m: m(x), ranks=2)
    torch.testing.assert_close(summed, dense)


def test_stacks_are_repeated_blocks():
    model = nn.Transformer(24, 4, 2, 2, 40, activation="gelu")
    recognition = recognise(model)
    expected = {}
    for i in (0, 1):
        expected[f"encoder.layers.{i}"] = feed_forward("gelu")
        expected[f"encoder.layers.{i}.self_attn"] = mha()
        expected[f"decoder.layers.{i}"] = feed_forward("gelu")
        expected[f"decoder.layers.{i}.self_attn"] = mha()
        expected[f"decoder.layers.{i}.multihead_attn"] = mha(cross=True)
    assert {f.path: f.structure for f in recognition.found} == expected
    assert not recognition.kept


def test_the_activation_that_runs_is_named():
    """Copies of a decoder layer lose an activation module to relu (torch's __setstate__)."""
    layer = nn.TransformerDecoderLayer(24, 4, 40, activation=nn.SiLU())
    model = nn.TransformerDecoder(layer, 1)
    (found,) = [f for f in recognise(model).found if f.kind == "mlp"]
    x = torch.tensor([-1.0, 1.0])
    assert torch.equal(model.layers[0].activation(x), F.relu(x))
    assert found.structure == feed_forward("relu")


def test_multihead_attention_alone():
    assert [f.structure for f in recognise(nn.MultiheadAttention(24, 4, 0.1)).found] == [mha()]
    (found,) = recognise(nn.MultiheadAttention(24, 4, kdim=8, vdim=10)).found
    s = found.structure
    assert (s.q, s.k, s.v) == ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    assert s.qkv is None and s.cross and s.dropout == 0.0


@pytest.mark.parametrize("kwargs", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_added_keys_are_refused_and_the_rest_is_found(kwargs):
    layer = nn.TransformerEncoderLayer(24, 4, 40)
    layer.self_attn = nn.MultiheadAttention(24, 4, **kwargs)
    recognition = recognise(nn.ModuleList([layer]))
    assert [f.path for f in recognition.found] == ["0"]
    (kept,) = recognition.kept
    assert (kept.path, kept.kind, kept.in_block) == ("0.self_attn", "attention", True)
    assert "no head shard" in kept.reason


def test_overridden_methods_are_not_taken_for_the_known_ones():
    class Attention(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Layer(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return self.linear2(self.norm2(self.linear1(x)))

    assert "overrides MultiheadAttention.forward" in recognise(Attention(24, 4)).kept[0].reason
    recognition = recognise(Layer(24, 4, 24))
    assert [f.path for f in recognition.found] == ["self_attn"]
    assert {k.path for k in recognition.kept} == {"linear1", "linear2"}


def test_an_activation_that_is_not_element_wise():
    layer = nn.TransformerEncoderLayer(24, 4, 40, activation=lambda x: x.softmax(-1))
    recognition = recognise(layer)
    assert [f.path for f in recognition.found] == ["self_attn"]
    assert {k.path for k in recognition.kept} == {"linear1", "linear2"}
