"""``torch.compile(fullgraph=True)`` of split modules: the same numbers as eager, both ways."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.modules.comparing import assert_ranks_agree
from tpkernels.modules import TPMLP, TPAttention, VocabParallelEmbedding
from tpkernels.testing import count_collectives

BUILDS = {
    "mlp": lambda group: TPMLP(8, 12, activation="gelu", group=group),
    "gated_mlp": lambda group: TPMLP(8, 12, activation="silu", gated=True, group=group),
    "attention": lambda group: TPAttention(8, 4, 2, causal=True, rope_theta=1e4, group=group),
    "replicated": lambda group: TPAttention(8, 4, 1, fused_qkv=True, group=group),
    "embedding": lambda group: VocabParallelEmbedding(9, 8, padding_idx=1, group=group),
}


def compile_task(group, name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = BUILDS[name](group)
    ids = torch.randint(9, (2, 5))
    results = []
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for forward in (module, compiled, compiled):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        module.zero_grad()
        y = forward(ids if name == "embedding" else x)
        y.square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        results.append([y.detach(), *([] if name == "embedding" else [x.grad]), *local])
    for again in results[1:]:
        for eager, ours in zip(results[0], again, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    with count_collectives() as counts:
        compiled(ids if name == "embedding" else torch.randn(2, 5, 8))
    assert counts.total.calls == 1  # TP-39: the same collective in every run, compiled or not
    return results[1][0]


@pytest.mark.parametrize("name", BUILDS)
def test_compiled_equals_eager_TP_39_TP_41(pool, name):
    results = pool.run(compile_task, name, "aot_eager", world_size=2, timeout=120)
    assert_ranks_agree(results)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, and there is none")
def test_compiled_by_inductor_TP_39_TP_40(pool):
    assert_ranks_agree(pool.run(compile_task, "gated_mlp", "inductor", world_size=2, timeout=180))
