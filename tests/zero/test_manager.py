"""What a user does with the manager: gather by hand, accumulate, step, read counters."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.zero import samples
from tpkernels.chunked_tensor import ChunkedTensor
from tpkernels.errors import AgreementError, ConfigError, ShardedSaveError, UnsupportedModuleError
from tpkernels.testing import count_collectives, max_relative_error
from tpkernels.zero import ZeroConfig, ZeroManager
from tpkernels.zero.config import TrainingHints


def one(**settings):
    return tpk.zero(samples.language(), **settings)


# --- by hand ---


def gathered_by_hand(group):
    model, dense = samples.language(), samples.language().state_dict()
    manager = tpk.zero(model, group, prefetch_bytes=0)
    block = model.blocks[1]
    manager.unshard(block)
    assert torch.equal(block.fc1.weight, dense["blocks.1.fc1.weight"])
    assert isinstance(model.blocks[0].fc1.weight, ChunkedTensor)
    assert all(isinstance(v, ChunkedTensor) for v in model.state_dict().values())
    used = manager.stats()["gathered_bytes"]
    manager.unshard(block)  # counted
    manager.reshard(block)
    assert torch.equal(block.fc1.weight, dense["blocks.1.fc1.weight"])
    samples.loss_of(model, *samples.batch(0)).backward()  # and used meanwhile
    assert manager.stats()["gathered_bytes"] == used > 0 == manager.stats()["idle_bytes"]
    manager.reshard(block)
    manager.reshard(block)  # of what was not unsharded: nothing
    assert samples.all_sharded(manager)
    handle = manager.unshard(async_op=True)
    assert isinstance(block.fc1.weight, ChunkedTensor)
    handle.wait()
    handle.wait()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dense[name]), name
    manager.reshard()
    assert samples.all_sharded(manager)
    with pytest.raises(ConfigError, match="GELU holds no parameter of this model, whose units are"):
        manager.unshard(nn.GELU())


def test_unshard_and_reshard(pool):
    pool.run(gathered_by_hand, world_size=2)


def test_a_module_inside_a_unit_stands_for_the_unit():
    manager = one()
    model = manager.module
    for module, weight in ((model.head, "head"), (model.blocks[1].fc1, "blocks.1.fc1")):
        with manager.gathered(module):
            assert module.weight.dim() == 2
            shown = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.dim() == 2}
            assert weight in shown and "blocks.0.fc1" not in shown
        manager.unshard(module)
        assert module.weight.dim() == 2
        manager.reshard(module)
    assert samples.all_sharded(manager)


def test_what_cannot_be_gathered_is_refused():
    manager = one()
    for ask in (manager.unshard, manager.reshard, lambda name: manager.gathered(name).__enter__()):
        with pytest.raises(ConfigError, match=r"module='head' is a str.*Fix: model.get_submodule"):
            ask("head")
    for rank in ("0", True, 0.0, 1, -1):
        with pytest.raises(ConfigError, match=rf"from_rank={rank!r}.*Fix: gathered"):
            manager.gathered(writeback=True, from_rank=rank).__enter__()
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(ShardedSaveError, match=r"ZeroManager.*Fix: torch.save"):
            copied(manager)
    assert samples.all_sharded(manager)


def waited_for_late(group):
    """Resharded before ``wait``: the parameters stay what they are."""
    model = samples.language()
    manager = tpk.zero(model, group)
    handle = manager.unshard(model.blocks[0], async_op=True)
    manager.reshard(model.blocks[0])
    handle.wait()
    sharded = samples.all_sharded(manager)
    samples.loss_of(model, *samples.batch(0)).backward()
    return sharded and samples.all_sharded(manager)


def test_a_handle_that_is_waited_for_after_reshard(pool):
    assert pool.run(waited_for_late, world_size=2) == [True, True]


def part_by_itself(group):
    """A part of the model called directly, with gradients; then the root's own parameters."""
    model, reference = samples.language("tied", torch.float64), samples.language("tied").double()
    manager = tpk.zero(model, group)
    x = samples.floats(0)
    for each in (model, reference):
        each.blocks[1](each.blocks[0](x)).square().mean().backward()
        with manager.gathered() if each is model else contextlib.nullcontext():
            each.head(x).square().mean().backward()
    with pytest.raises(UnsupportedModuleError, match=r"Fix: .*manager.gathered"):
        model.head(x)  # of the root's unit, and called by itself: nothing gathers it
    found = samples.gradients(model)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert max(max_relative_error(found[n], g) for n, g in expected.items()) < 1e-12
    return samples.all_sharded(manager)


def test_a_part_called_by_itself(pool):
    assert pool.run(part_by_itself, world_size=2) == [True, True]


def inputs_alone(group):
    """``autograd.grad`` of the inputs: no parameter gets a gradient, nothing stays."""
    model, reference = samples.stack(), samples.stack()
    manager = tpk.zero(model, group)
    slopes = []
    for each in (model, reference):
        x = samples.floats(0).requires_grad_()
        slopes += torch.autograd.grad(each(x).square().mean(), x)
    assert all(p.grad is None for p in manager.parameters())
    assert samples.all_sharded(manager)
    return max_relative_error(*slopes)


def test_gradients_of_the_inputs_alone(pool):
    assert max(pool.run(inputs_alone, world_size=2)) < 1e-12


# --- accumulation ---


def accumulated(group, stage):
    """Bytes reduced by no_sync and by reduce-every-time; gradients of both and of one pass."""
    rank, world = group.rank(), group.size()
    results, counts, sent = [], [], []
    for collects in (True, False):
        model = samples.language(dtype=torch.float64)
        manager = tpk.zero(model, group, stage=stage)
        with count_collectives() as count:
            for part in range(2):
                skips = collects and part == 0
                with manager.no_sync() if skips else contextlib.nullcontext():
                    tokens, targets = samples.batch(0, rank, world)[:, part::2]
                    (samples.loss_of(model, tokens, targets) / 2).backward()
        counts.append(count.total.bytes)
        sent.append(manager.stats()["reduce_bytes_sent"])
        results.append(samples.gradients(model))
    whole = samples.language(dtype=torch.float64)
    samples.loss_of(whole, *samples.batch(0)).backward()
    for result in results:
        for name, parameter in whole.named_parameters():
            assert max_relative_error(result[name], parameter.grad) < 1e-12
    return counts, sent


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync_reduces_once(pool, stage):
    """Z-18: equal gradients, half the reductions."""
    for (once, twice), sent in pool.run(accumulated, stage, world_size=2):
        assert once < twice and sent[0] * 2 == sent[1] > 0


def accumulated_apart(group):
    """no_sync over some units, then a backward over others: both arrive."""
    rank, world = group.rank(), group.size()
    model, reference = samples.stack(), samples.stack()
    manager = tpk.zero(model, group)
    for order, collects in (([0, 1], True), ([2], True), ([1, 2], False)):
        model.order = reference.order = order
        with manager.no_sync() if collects else contextlib.nullcontext():
            model(samples.floats(len(order), rank, world)).square().mean().backward()
        reference(samples.floats(len(order))).square().mean().backward()
    found = samples.gradients(model)
    return max(max_relative_error(found[n], p.grad) for n, p in reference.named_parameters())


def test_no_sync_over_other_units_than_the_backward_that_reduces(pool):
    for error in pool.run(accumulated_apart, world_size=2):
        assert error < 1e-12


def shared_buffer(group):
    model = samples.language("tied", torch.float64)
    reference = samples.language("tied", torch.float64)
    manager = tpk.zero(model, group)
    for part in range(3):
        with manager.no_sync() if part < 2 else contextlib.nullcontext():
            samples.loss_of(model, *samples.batch(part)).backward()
        samples.loss_of(reference, *samples.batch(part)).backward()
    found = samples.gradients(model)
    return max(max_relative_error(found[n], p.grad) for n, p in reference.named_parameters())


def test_world_size_one_adds_up_micro_batches(pool):
    """Z-54."""
    assert pool.run(shared_buffer, world_size=1)[0] < 1e-13


def dropped(group):
    """``optimizer.zero_grad()`` does not touch what no_sync collected; ``reset()`` drops it."""
    model = samples.stack()
    manager = tpk.zero(model, group)
    with manager.no_sync():
        model(samples.floats(0)).square().mean().backward()
    live = manager.stats()["live_bytes"]
    manager.reset()
    model(samples.floats(1)).square().mean().backward()
    reference = samples.stack()
    reference(samples.floats(1)).square().mean().backward()
    found = samples.gradients(model)
    error = max(max_relative_error(found[n], p.grad) for n, p in reference.named_parameters())
    return live, error


def test_reset_drops_what_was_collected(pool):
    for live, error in pool.run(dropped, world_size=2):
        assert live > 0 and error < 1e-12


# --- the optimizer ---


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Adafactor", "factors the second moment"),
        ("Muon", "orthogonalises"),
        ("LBFGS", "line search"),
        ("SparseAdam", "sparse gradients"),
    ],
)
def test_optimizers_of_whole_parameters_are_refused(name, why):
    with pytest.raises(UnsupportedModuleError, match=f"{name} cannot step shards.*{why}.*Fix: "):
        one().optimizer(getattr(torch.optim, name))


def test_an_unknown_optimizer_needs_a_word():
    class Own(torch.optim.SGD):
        pass

    manager = one()
    with pytest.raises(UnsupportedModuleError, match=r"Own .*not known.*element_wise=True"):
        manager.optimizer(Own, lr=0.1)
    assert isinstance(manager.optimizer(Own, element_wise=True, lr=0.1), Own)
    with pytest.raises(ConfigError, match="must be an optimizer class"):
        manager.optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_parameter_groups():
    manager = one()
    model = manager.module
    named = dict(model.named_parameters())
    decayed = [p for n, p in named.items() if n.endswith("weight")]
    others = [p for n, p in named.items() if not n.endswith("weight")]
    made = manager.optimizer(
        torch.optim.AdamW,
        [{"params": iter(decayed)}, {"params": others, "weight_decay": 0.0}],
        lr=0.1,
    )
    assert [len(group["params"]) for group in made.param_groups] == [len(decayed), len(others)]
    assert made.param_groups[1]["weight_decay"] == 0.0
    with pytest.raises(ConfigError, match=r"param_groups\[1\].*not a shard.*after zero"):
        manager.optimizer(torch.optim.SGD, [decayed, [nn.Parameter(torch.ones(3))]], lr=0.1)
    assert len(manager.optimizer(torch.optim.SGD, model.named_parameters()).param_groups) == 1


ELEMENT_WISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop"]


def stepped_by(group, names):
    rank, world = group.rank(), group.size()
    errors = {}
    for name in names:
        models = [samples.language(dtype=torch.float64) for _ in range(2)]
        manager = tpk.zero(models[1], group)
        cls = getattr(torch.optim, name)
        # ASGD keeps its rate in fp32, and rounds it otherwise tensor by tensor
        samples.train(models[0], cls(models[0].parameters(), lr=0.01, foreach=True), 3)
        samples.train(models[1], manager.optimizer(cls, lr=0.01), 3, rank, world, manager)
        found = samples.full(models[1])
        errors[name] = max(max_relative_error(found[n], p) for n, p in models[0].named_parameters())
    return errors


def test_every_element_wise_optimizer(pool):
    """Rprop is left out: it steps by the sign of a gradient, which rounding may change."""
    for errors in pool.run(stepped_by, ELEMENT_WISE, world_size=2):
        assert max(errors.values()) < 1e-9, errors


def hooked(group):
    """Z-52: a hook on a shard sees its gradient complete, reduced, once a backward."""
    rank, world = group.rank(), group.size()
    model, reference = samples.stack(), samples.stack()
    tpk.zero(model, group)
    seen = {}

    def hook(name, parameter):
        seen.setdefault(name, []).append(parameter.grad.plain().clone())

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: hook(name, p))
    for _ in range(2):
        model.zero_grad()
        model(samples.floats(0, rank, world)).square().mean().backward()
    reference(samples.floats(0)).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = parameter.spec.take(reference.get_parameter(name).grad)
        assert len(seen[name]) == 2
        torch.testing.assert_close(seen[name][1], expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("world", [1, 3])
def test_hooks_see_final_gradients(pool, world):
    pool.run(hooked, world_size=world)


def clipped(group, offload):
    rank, world = group.rank(), group.size()
    model, reference = samples.language("tied", torch.float64), samples.language("tied").double()
    manager = tpk.zero(model, group, offload_policy="cpu" if offload else None)
    samples.loss_of(model, *samples.batch(0, rank, world)).backward()
    samples.loss_of(reference, *samples.batch(0)).backward()
    norm = manager.clip_grad_norm_(0.01)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    found = samples.gradients(model)
    error = max(max_relative_error(found[n], p.grad) for n, p in reference.named_parameters())
    return abs(norm.item() / expected.item() - 1), error


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
def test_clip_grad_norm(pool, offload):
    """Z-53: also where master weights and gradients live on the CPU."""
    for norm, error in pool.run(clipped, offload, world_size=3):
        assert norm < 1e-12 and error < 1e-12


def test_clip_grad_norm_needs_a_bound():
    with pytest.raises(ConfigError, match=r"max_norm is not given.*Fix: "):
        one().clip_grad_norm_()
    manager = tpk.zero(samples.language(), config=ZeroConfig(gradient_clipping=1e-3))
    samples.loss_of(manager.module, *samples.batch(0)).backward()
    manager.clip_grad_norm_()
    assert manager.clip_grad_norm_(1.0).item() == pytest.approx(1e-3, rel=1e-3)


# --- state dicts ---


def saved_after_evaluation(group):
    """Z-31: a state dict is of shards, and the same, whatever ran before it."""
    model = samples.language()
    manager = tpk.zero(model, group, reshard_after_forward=False)
    before = {n: v.plain().clone() for n, v in model.state_dict().items()}
    with torch.no_grad():
        model(samples.batch(0)[0])
    loss = samples.loss_of(model, *samples.batch(0))
    after = model.state_dict()
    assert all(torch.equal(before[n], v.plain()) for n, v in after.items())
    loss.backward()
    assert samples.all_sharded(manager)
    return after.keys() == samples.language().state_dict().keys()


def test_a_state_dict_does_not_depend_on_what_ran(pool):
    assert pool.run(saved_after_evaluation, world_size=2) == [True, True]


# --- counters ---


def test_stats_are_json_and_the_report_a_page():
    manager = one()
    assert isinstance(manager, ZeroManager) and manager.module is not None
    optimizer = manager.optimizer(torch.optim.SGD, lr=0.1)
    samples.train(manager.module, optimizer, 2, manager=manager)
    stats = manager.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert stats["stage"] == 3 and stats["ranks"] == 1 and stats["max_live_bytes"] is None
    assert [row["name"] for row in stats["units"]] == [
        "(root)", "blocks.0", "blocks.1", "blocks.2",
    ]  # fmt: skip
    assert sum(row["hits"] for row in stats["units"]) == stats["hits"] > 0
    assert sum(row["misses"] for row in stats["units"]) == stats["misses"]
    report = manager.report()
    assert "ZeRO stage 3, 1 ranks" in report and all(
        len(line) <= 100 for line in report.split("\n")
    )
    assert repr(manager) == "ZeroManager(stage 3, 4 units, 1 ranks)"
    with pytest.raises(ConfigError, match="mode="), manager.mode(""):
        pass


def bytes_sent(group):
    model = samples.language()
    manager = tpk.zero(model, group, prefetch_bytes=0)
    samples.loss_of(model, *samples.batch(0)).backward()
    stats = manager.stats()
    whole = sum(row["gathered_bytes"] for row in stats["units"])
    return stats["gather_bytes_sent"], stats["reduce_bytes_sent"], whole, stats["gathers"]


def test_bytes_sent_are_those_of_the_algorithm(pool):
    """(R - 1) / R of every buffer, for each gather and for the reduction."""
    for world in (1, 2, 4):
        for gathered, reduced, whole, gathers in pool.run(bytes_sent, world_size=world):
            assert reduced == whole * (world - 1) // world
            assert gathers == 2 * 4  # in forward and in backward
            assert gathered == 2 * whole * (world - 1) // world


def modes(group):
    """A reference model's pass under a name of its own keeps the training order."""
    model = samples.stack(blocks=4)
    manager = tpk.zero(model, group)
    misses = []
    for step in range(4):
        before = manager.stats()["misses"]
        model.order = [3, 1]
        with manager.mode("reference"), torch.no_grad():
            model(samples.floats(step))
        model.order = [0, 1, 2, 3]
        model(samples.floats(step)).square().mean().backward()
        misses.append(manager.stats()["misses"] - before)
    return misses


def test_a_named_mode_keeps_its_own_order(pool):
    for misses in pool.run(modes, world_size=2):
        assert max(misses[1:]) <= 2  # the first unit of each pass


def many_blocks(group):
    """Z-11: blocks made, sharded and collected, one after the other: no false duplicates."""
    for _ in range(40):
        block = samples.Block()
        tpk.zero(block, group)
        del block
    whole = nn.Sequential(*(samples.Block() for _ in range(60)))
    manager = tpk.zero(whole, group)
    return len(manager.stats()["units"])


def test_many_blocks_one_after_the_other(pool):
    assert pool.run(many_blocks, world_size=2) == [60, 60]


def test_a_whole_parameter_that_is_not_gathered_can_be_printed():
    manager = one()
    with manager.gathered():
        weight = manager.module.head.weight
        assert "which is not gathered" not in repr(weight) and "tensor(" in repr(weight)
    assert repr(weight) == "Parameter(whole (12, 8), torch.float32, which is not gathered now)"


def disagreeing(group):
    """A budget, the units and the precision that differ by rank; and a batch that does not fit."""
    rank = group.rank()
    manager = tpk.zero(samples.language(), group)
    before = manager.stats()
    for settings in ({"prefetch_bytes": 1000 + rank}, {"max_live_bytes": 10**6 + rank}):
        name = next(iter(settings))
        with pytest.raises(AgreementError, match=rf"set_budget\(\): {name} differs .*Fix: give"):
            manager.set_budget(**settings)
        assert manager.stats()[name] == before[name]
    manager.set_budget(prefetch_bytes=2000)
    units = ["Block", "Linear"][rank]
    with pytest.raises(AgreementError, match="build the same model and give the same units="):
        tpk.zero(samples.language(), group, units=units)
    with pytest.raises(AgreementError) as caught:
        tpk.zero(samples.language(), group, mp_policy=[None, "bf16"][rank])
    said = ["None", "param_dtype bfloat16, reduce_dtype float32, inputs cast at every unit"]
    assert f"it is {said[rank]}. Fix" in str(caught.value)
    hints = TrainingHints(train_batch_size=8, micro_batch_size=2, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match=r"ranks 2 = 4; .*Fix: train_batch_size=4"):
        tpk.zero(samples.language(), group, config=ZeroConfig(training=hints))


def test_settings_that_differ_by_rank(pool):
    pool.run(disagreeing, world_size=2)
