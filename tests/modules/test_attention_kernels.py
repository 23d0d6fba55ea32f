"""Which kernel serves attention: fused ones, with no needless mask tensor, copy or head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.comm.group import resolve_group
from tpkernels.modules import TPAttention, TPMultiheadAttention
from tpkernels.modules import attend as attend_module
from tpkernels.modules.attend import attend
from tpkernels.modules.kv_cache import KVCache
from tpkernels.testing import assert_two_times

HIDDEN, B, S = 64, 2, 6
GROUP = resolve_group(None)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH = {
    "cpu": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "aten::_scaled_dot_product_flash_attention",
}
COPIES = {"aten::clone", "aten::copy_", "aten::index_select", "aten::_to_copy"}
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}


class Ops(TorchDispatchMode):
    """The names of the operators that run, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def module(device, heads="mha", **options):
    torch.manual_seed(0)
    count, kv_heads = HEADS[heads]
    settings = {"causal": True, "device": device, "dtype": torch.bfloat16, **options}
    return TPAttention(HIDDEN, count, kv_heads, **settings)


def tokens(device, length=S):
    x = torch.randn(B, length, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x.to(device, torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_causal_runs_on_flash_without_a_copy(device, fused, heads):
    attention, x = module(device, heads, fused_qkv=fused), tokens(device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # anything else raises
        with Ops() as forward:
            y = attention(x)
        with Ops() as backward:
            y.float().square().sum().backward()
    assert forward.names.count(FLASH[device]) == 1
    assert not COPIES & set(forward.names)
    assert FLASH[device] + "_backward" in backward.names
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_and_decode_with_a_cache_need_no_mask(device, heads, monkeypatch):
    attention, x, masks = module(device, heads, fused_qkv=True), tokens(device), []
    true_sdpa = F.scaled_dot_product_attention

    def sdpa(*args, **options):
        masks.append(options["attn_mask"])
        return true_sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), Ops() as ops:
        whole = attention(x)
        cache = KVCache()
        parts = [attention(x[:, :4], cache=cache)]
        parts += [attention(x[:, i : i + 1], cache=cache) for i in (4, 5)]
    assert masks == [None] * 4
    assert ops.names.count(FLASH[device]) == 4
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-2, atol=2e-2)


def qkv(device, queries, keys, heads=8, kv_heads=2, dtype=torch.float32, dim=16):
    generator = torch.Generator().manual_seed(3)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [
        torch.randn(B, h, n, dim, generator=generator).to(device, dtype).requires_grad_()
        for h, n in shapes
    ]


def spelled_out(q, k, v, mask):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def assert_attends(inputs, mask, expected_mask=None, **options):
    """`attend` with ``mask`` is attention spelled out with ``expected_mask``, gradients too."""
    expected_mask = mask if expected_mask is None else expected_mask

    def results(attention, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        y = attention(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1))]

    def plain(q, k, v):
        additive = expected_mask is not None and expected_mask.is_floating_point()
        return spelled_out(q, k, v, expected_mask.to(q.dtype) if additive else expected_mask)

    dtype = inputs[0].dtype
    ours = results(lambda q, k, v: attend(q, k, v, GROUP, mask=mask, **options), dtype)
    eager, truth = results(plain, dtype), results(plain, torch.float64)
    for name, *values in zip(("y", "dq", "dk", "dv"), ours, eager, truth, strict=True):
        assert_two_times(*values, name=name)


def one_query_masks(keys):
    generator = torch.Generator().manual_seed(4)
    keep = torch.rand(B, 8, 1, keys, generator=generator) < 0.6
    keep[..., 0] = True
    return {
        "none": None,
        "padding": keep[:, :1],
        "per_head": keep,
        "additive_ST": torch.randn(1, keys, generator=generator),
        "additive_per_head": torch.randn(1, 8, 1, keys, generator=generator),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", one_query_masks(1))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_query_of_grouped_heads_equals_attention_spelled_out(device, name, dtype):
    inputs, mask = qkv(device, 1, 7, dtype=dtype), one_query_masks(7)[name]
    if mask is not None:
        mask = mask.to(device, dtype if mask.is_floating_point() else torch.bool)
    assert_attends(inputs, mask, causal=True)
    with torch.no_grad(), Ops() as ops:
        attend(*inputs, GROUP, mask=mask)
    if device == "cpu" or mask is None:  # SDPA itself may copy a mask
        assert not COPIES - {"aten::_to_copy"} & set(ops.names)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_last_queries_of_a_longer_sequence(device, kv_heads, dtype):
    inputs = qkv(device, 3, 7, kv_heads=kv_heads, dtype=dtype)
    allowed = torch.ones(3, 7, dtype=torch.bool, device=device).tril(4)
    assert_attends(inputs, None, allowed, causal=True)
    padding = torch.ones(B, 1, 1, 7, dtype=torch.bool, device=device)
    padding[0, ..., 5:] = False
    assert_attends(inputs, padding, allowed & padding, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_laid_out_across_is_served_by_a_fused_kernel(device):
    q, k, v = qkv(device, S, S, kv_heads=8, dtype=torch.bfloat16)
    mask = (torch.rand(S, S, device=device) < 0.7).fill_diagonal_(True).t()
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused):
        y, expected = (attend(q, k, v, GROUP, mask=m) for m in (mask, mask.contiguous()))
    assert torch.equal(y, expected)


def asked(
    monkeypatch, device, queries, keys, mask=None, causal=True, kv_heads=2, dim=16, dtype=None
):
    """What `attend` asks of SDPA for fake tensors of ``device``: no such device is needed."""
    calls = []

    def sdpa(q, k, v, **given):
        calls.append((k.shape[1], given))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    with FakeTensorMode():
        make = {"device": device, "dtype": dtype or torch.float32}
        q = torch.empty(B, 8, queries, dim, **make)
        k, v = (torch.empty(B, kv_heads, keys, dim, **make) for _ in range(2))
        given = None if mask is None else torch.ones(mask, dtype=torch.bool, device=device)
        attend(q, k, v, GROUP, mask=given, causal=causal)
    ((kv_heads, call),) = calls
    mask = call["attn_mask"]
    return "tensor" if mask is not None else None, call["is_causal"], call["enable_gqa"], kv_heads


HALF = {"dtype": torch.float16}
PADDING = (B, 1, 1, 6)


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        # whole sequence: causal by name; grouped heads as they are where flash serves
        ((6, 6), HALF, (None, True, True, 2)),
        ((6, 6), {**HALF, "kv_heads": 8}, (None, True, False, 8)),
        ((6, 6), {}, (None, True, False, 8)),  # fp32: repeated
        ((6, 6), {**HALF, "dim": 288}, (None, True, False, 8)),  # too wide for flash
        # the last queries of a longer sequence
        ((3, 6), HALF, ("tensor", False, False, 8)),  # fake tensors; others: see below
        ((3, 6), {}, ("tensor", False, False, 8)),
        ((6, 3), HALF, ("tensor", False, False, 8)),  # more queries than keys: some see none
        # with a mask: the memory-efficient kernel
        ((6, 6), {**HALF, "mask": PADDING}, ("tensor", False, False, 8)),
        ((6, 6), {**HALF, "mask": PADDING, "causal": False}, ("tensor", False, False, 8)),
        # decoding: no mask, no repeated head
        ((1, 6), HALF, (None, False, False, 2)),
        ((1, 6), {**HALF, "mask": PADDING}, ("tensor", False, False, 2)),
        ((1, 6), {}, (None, False, False, 2)),
    ],
)
def test_what_is_asked_of_sdpa_on_cuda(monkeypatch, shape, options, expected):
    assert asked(monkeypatch, "cuda", *shape, **options) == expected


def test_last_queries_on_flash_are_causal_without_a_mask_tensor(monkeypatch):
    """PyTorch's `CausalBias` says it; on the CPU PyTorch itself makes the mask of it."""
    inputs = qkv("cpu", 3, 7, dtype=torch.bfloat16)
    expected, kinds = attend(*inputs, GROUP, causal=True), []
    true_sdpa = F.scaled_dot_product_attention

    def sdpa(q, k, v, **given):
        kinds.append((type(given["attn_mask"]), given["enable_gqa"]))
        return true_sdpa(q, k, v, **given)

    # In this module alone: CausalBias asks whether the function called is PyTorch's own.
    monkeypatch.setattr(attend_module, "F", SimpleNamespace(scaled_dot_product_attention=sdpa))
    monkeypatch.setattr(attend_module, "flash_takes", lambda q: True)
    bias = attend(*inputs, GROUP, causal=True)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    traced = compiled(*inputs, GROUP, causal=True)
    assert kinds[0] == (CausalBias, True) and kinds[1][0] is not CausalBias
    assert torch.equal(bias, expected) and torch.equal(traced, expected)


def test_what_is_asked_of_sdpa_on_the_cpu_keeps_grouped_heads(monkeypatch):
    """Its flash kernel takes grouped heads with any mask and dtype."""
    for options in ({}, {"mask": PADDING}, {"dim": 288}):
        _, _, grouped, kv_heads = asked(monkeypatch, "cpu", 6, 6, **options)
        assert (grouped, kv_heads) == (True, 2), options


@pytest.mark.parametrize("device", DEVICES)
def test_every_case_is_served_by_a_fused_kernel(device):
    """The one that writes out all scores is switched off: it must not be needed."""
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    padding = torch.ones(B, 1, 1, S, dtype=torch.bool, device=device)
    padding[0, ..., 4:] = False
    for dtype in (torch.float32, torch.bfloat16):
        for queries in (S, 3, 1):
            for mask in (None, padding):
                inputs = qkv(device, queries, S, dtype=dtype)
                with sdpa_kernel(fused):
                    y = attend(*inputs, GROUP, mask=mask, causal=True)
                    y.float().square().sum().backward()
                assert all(bool(torch.isfinite(t.grad).all()) for t in inputs)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_multihead_attention_reads_no_mask_it_is_told_is_causal(monkeypatch, need_weights, padded):
    """As PyTorch: with ``is_causal``, without padding, and when no weights are wanted."""
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(HIDDEN, 8, batch_first=True)
    x, causal = torch.randn(B, S, HIDDEN), nn.Transformer.generate_square_subsequent_mask(S)
    padding = torch.zeros(B, S).masked_fill(torch.arange(S) > 4, -torch.inf) if padded else None
    options = {"attn_mask": causal, "is_causal": True, "key_padding_mask": padding}
    options["need_weights"] = need_weights
    expected = dense(x, x, x, **options)[0]
    TPMultiheadAttention.shard_(dense, None)
    masks, true_sdpa = [], F.scaled_dot_product_attention

    def sdpa(*args, **given):
        masks.append((given["attn_mask"] is None, given["is_causal"]))
        return true_sdpa(*args, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    torch.testing.assert_close(dense(x, x, x, **options)[0], expected, rtol=1e-5, atol=1e-6)
    assert masks == ([] if need_weights else [(not padded, not padded)])


def projections_task(group, fused):
    """The operators of a forward and a backward, in order."""
    attention = module("cpu", "gqa", fused_qkv=fused, group=group)
    x = tokens("cpu")
    with Ops() as forward:
        y = attention(x)
    with Ops() as backward:
        y.float().square().sum().backward()
    return forward.names, backward.names


@pytest.mark.parametrize("fused", [True, False])
def test_projections_are_one_column_gemm_with_bias_and_one_gemm_all_reduce(pool, fused):
    """Nothing is added beside them: the biases are in the ops; one all-reduce each way."""
    for forward, backward in pool.run(
        projections_task, fused, world_size=2, env={"TPKERNELS_CHECK": "off"}
    ):
        ours = [name for name in forward if name.startswith("tpkernels::")]
        assert ours == ["tpkernels::gemm_act"] * (1 if fused else 3) + [
            "tpkernels::gemm_all_reduce"
        ]
        assert not {"aten::add.Tensor", "aten::add_.Tensor", "aten::mm", "aten::addmm"} & set(
            forward
        )
        assert not COPIES & set(forward)
        assert [n for n in backward if n.startswith("tpkernels::")] == [
            "tpkernels::column_backward"
        ]
