"""Modules on a GPU by every implementation: forward, backward, compiled; whole models."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tpkernels as tpk
from tests.modules.dense_attention import DenseAttention
from tests.ops.samples import assert_equal
from tpkernels.modules import TPMLP, TPAttention
from tpkernels.ops import choice
from tpkernels.testing import assert_two_times

HIDDEN, INNER = 64, 192
IMPLEMENTATIONS = ("triton", "reference")


class DenseMLP(nn.Module):
    """What a ``TPMLP`` equals."""

    def __init__(self, gated):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER) if gated else None
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        up = self.up_proj(x)
        h = F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        return self.down_proj(h)


def mlp(gated):
    activation = "silu" if gated else "gelu"
    return DenseMLP(gated), TPMLP(HIDDEN, INNER, activation=activation, gated=gated)


def attention(fused):
    dense = DenseAttention(HIDDEN, 4, 2, 16, fused=fused, causal=True)
    return dense, TPAttention(HIDDEN, 4, 2, 16, fused_qkv=fused, causal=True)


PAIRS = {
    "mlp": lambda: mlp(False),
    "gated_mlp": lambda: mlp(True),
    "attention": lambda: attention(False),
    "fused_attention": lambda: attention(True),
}


def made(name, device, dtype):
    """(dense, ours) with the same weights."""
    torch.manual_seed(0)
    dense, ours = PAIRS[name]()
    dense, ours = dense.to(device, dtype), ours.to(device, dtype)
    weights = dict(dense.named_parameters())
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(weights[key])
    return dense, ours


def step(module, x, twice=False):
    """Output, gradient of x and of every parameter."""
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf)
    parameters = [p for _, p in sorted(module.named_parameters())]
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y)
    grads = torch.autograd.grad(y, [leaf, *parameters], dy, retain_graph=twice)
    if twice:
        assert_equal(torch.autograd.grad(y, [leaf, *parameters], dy), grads)
    return [y.detach(), *grads]


# Softmax does not see the bias of K: its gradient is zero but for rounding.
def judged(module):
    names = ["y", "x", *sorted(name for name, _ in module.named_parameters())]
    return [i for i, name in enumerate(names) if name != "k_proj.bias"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_forward_and_backward_by_the_two_times_rule(name, implementation, device):
    dense, ours = made(name, device, torch.bfloat16)
    x = torch.randn(2, 6 if device.type == "cpu" else 48, HIDDEN).to(device, torch.bfloat16)
    before = x.clone()
    with choice.using(implementation):
        found, again = step(ours, x, twice=True), step(ours, x)
    assert torch.equal(x, before)
    assert_equal(again, found)
    eager = step(dense, x)
    truth = step(copy.deepcopy(dense).double(), x.double())
    if "fused_attention" in name:  # K's bias is part of qkv_proj.bias
        found, eager, truth = ([*r[:4], *r[5:]] for r in (found, eager, truth))
        assert sorted(n for n, _ in ours.named_parameters())[2] == "qkv_proj.bias"
        places = range(len(found))
    else:
        places = judged(ours)
    for place in places:
        assert_two_times(found[place], eager[place], truth[place], name=f"{name} {place}")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mlp", "gated_mlp"])
def test_compiled_by_inductor_in_one_graph_TP_39_TP_41(name, implementation):
    torch._dynamo.reset()
    dense, ours = made(name, "cuda", torch.bfloat16)
    x = torch.randn(2, 48, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with choice.using(implementation):
        compiled = torch.compile(ours, fullgraph=True)
        found = step(compiled, x)
        assert_equal(step(compiled, x), found)
    eager, truth = step(dense, x), step(copy.deepcopy(dense).double(), x.double())
    for place, values in enumerate(zip(found, eager, truth, strict=True)):
        assert_two_times(*values, name=f"{name} {place}")


@pytest.mark.gpu
def test_attention_compiled_by_inductor_in_one_graph():
    torch._dynamo.reset()
    _, ours = made("fused_attention", "cuda", torch.bfloat16)
    x = torch.randn(2, 48, HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = step(torch.compile(ours, fullgraph=True), x)
    for place, (one, other) in enumerate(zip(found, step(ours, x), strict=True)):
        if place != 4:  # qkv_proj.bias, of which K's part is rounding alone
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.fixture
def nccl():
    """A world of one rank on the GPU."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(3, device="cuda")
    dist.all_reduce(ones)
    assert ones.tolist() == [1.0] * 3
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_with_nccl_in_a_world_of_one(family, implementation, nccl):
    pytest.importorskip("transformers")
    from tests.models import zoo

    torch.manual_seed(0)
    dense = getattr(zoo, family)().cuda().eval()
    ours = copy.deepcopy(dense)
    with choice.using(implementation):
        report = tpk.parallelize(ours)
        assert (report.modules and "reference" in str(report)) or implementation in str(report)
        ids = torch.randint(1, zoo.VOCABULARY, (2, 12), device="cuda")
        results = []
        for model in (dense, ours, copy.deepcopy(dense).double()):
            logits = model(ids).logits
            logits.square().mean().backward()
            grad = model.get_input_embeddings().weight.grad
            grad = grad.to_local() if hasattr(grad, "to_local") else grad
            results.append([logits.detach(), grad])
        eager, found, truth = results
        for name, *values in zip(("logits", "gradient"), found, eager, truth, strict=True):
            assert_two_times(*values, dtype=torch.float32, name=name)
        ours.generate(ids[:1], max_new_tokens=4, do_sample=False)


@pytest.mark.gpu
@pytest.mark.slow
def test_the_demo_runs_on_the_gpu():
    from tpkernels.demo.packages import MODELS

    if not any(importlib.util.find_spec(model.package) for model in MODELS.values()):
        pytest.skip("no package with a pretrained model is installed")
    command = [sys.executable, "-m", "tpkernels", "demo", "--nproc", "1", "--device", "cuda"]
    done = subprocess.run([*command, "--repeat", "0"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
