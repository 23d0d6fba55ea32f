"""Models that cannot be moved into flat buffers: refused by name before anything is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels.errors import ConfigError, UnsupportedModuleError
from tpkernels.zero.memory_overlap import refuse_overlaps


class Two(nn.Module):
    """Two parameters over given memory."""

    def __init__(self, first, second, trained=(True, True)):
        super().__init__()
        self.first = nn.Parameter(first, requires_grad=trained[0])
        self.second = nn.Parameter(second, requires_grad=trained[1])


def test_parameters_that_share_memory_are_refused():
    whole = torch.zeros(8, 8)
    tied = samples.language()
    tied.head.weight.data = tied.embedding.weight.data
    overlapping = (
        tied,
        Two(whole, whole, (True, False)),
        Two(whole, whole, (False, True)),
        Two(whole[:, :5], whole[:, 4:]),
        Two(whole, whole[3:].t()),
        Two(whole[:2], whole.view(-1)[15:].view(torch.bfloat16)),
    )
    for model in overlapping:
        shapes = [each.shape for each in model.parameters()]
        with pytest.raises(UnsupportedModuleError, match=r"share memory .*Fix: make them one"):
            tpk.zero(model)
        assert [each.shape for each in model.parameters()] == shapes
    with pytest.raises(UnsupportedModuleError, match=r"model.head.weight = model.embedding.weight"):
        tpk.zero(tied)


def test_parts_of_one_memory_that_do_not_overlap_are_allowed():
    whole = torch.zeros(8, 8)
    for model in (
        Two(whole[:4], whole[4:]),
        Two(whole[:, :4], whole[:, 4:]),
        Two(whole, whole, (False, False)),
        Two(whole[:0], whole),
        nn.LSTM(4, 4, 2),
        samples.language("tied"),
    ):
        tpk.zero(model)
    refuse_overlaps([("first", torch.zeros(2, device="meta").requires_grad_())] * 2)


def test_a_model_trained_in_float16_is_refused():
    with pytest.raises(ConfigError, match=r"weight is trained in torch.float16, .*loss scaler"):
        tpk.zero(samples.language().half())
    with pytest.raises(ConfigError, match=r"Fix: model.float\(\) or model.bfloat16\(\)"):
        tpk.zero(samples.language().half(), mp_policy=None)
    tpk.zero(samples.language().half(), mp_policy="bf16")
    frozen = samples.language("frozen")
    frozen.blocks[0].half()
    tpk.zero(frozen)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_refused():
    linear = nn.Linear(2, 2)
    for made in (torch.jit.script(linear), torch.jit.trace(linear, torch.ones(1, 2))):
        for model in (made, nn.Sequential(nn.Linear(2, 2), made)):
            with pytest.raises(UnsupportedModuleError, match=r"torch.jit.*Fix: give zero\(\) the"):
                tpk.zero(model)
