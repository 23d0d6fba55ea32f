"""count_collectives sees every Python road to a process group, and says so when it cannot."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.overlap.carriers import CARRIERS, run_carried
from tpkernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from tpkernels.testing import CollectiveCounts, count_collectives


@torch.library.custom_op("tpkernels_tests::reduced", mutates_args=())
def reduced(x: torch.Tensor, group_name: str) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y, group=dist.distributed_c10d._resolve_process_group(group_name))
    return y


@reduced.register_fake
def _(x, group_name):
    return torch.empty_like(x)


reduced.register_autograd(
    lambda ctx, dy: (reduced(dy, ctx.group_name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group_name", inputs[1]),
)


def _summary(counts: CollectiveCounts) -> dict[str, tuple[int, int]]:
    return {kind: (counts[kind].calls, counts[kind].bytes) for kind in counts}


def eager_calls(group):
    size = group.size()
    part, whole = torch.ones(3, 5), torch.ones(size * 3, 5)
    with count_collectives() as counts:
        dist.all_reduce(part, group=group)
        dist.all_reduce(part.bfloat16(), group=group, async_op=True).wait()
        dist.all_gather(list(whole.chunk(size)), part, group=group)
        dist.all_gather_single(whole, part, group=group)
        dist.reduce_scatter_single(part, whole, group=group)
        dist.reduce_scatter(part, list(whole.chunk(size)), group=group)
        dist.broadcast(part, 0, group=group)
        dist.all_to_all_single(whole.clone(), whole, group=group)
        dist.barrier(group=group)
    return _summary(counts), counts.calls[1].dtype, counts.calls[1].group_name == group.group_name


def functional_calls(group):
    size = group.size()
    part, whole = torch.ones(3, 5), torch.ones(size * 3, 5)
    with count_collectives() as counts:
        funcol.all_reduce(part, "sum", group).wait()
        funcol.all_gather_single(part, 0, group).wait()
        funcol.reduce_scatter_single(whole, "sum", 0, group).wait()
        reduced_part = torch.ops._c10d_functional.all_reduce_.default(part, "sum", group.group_name)
        torch.ops._c10d_functional.wait_tensor(reduced_part)
    names = {call.group_name for call in counts.calls}
    return _summary(counts), names == {group.group_name}


def overlapped_calls(group):
    """Two chunks gathered, scattered and summed: what stands for what, and each byte once."""
    name, size = group.group_name, group.size()
    x, weight = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3)
    with count_collectives() as counts:
        gathered, _ = all_gather_gemm(x, [weight], None, "none", name, chunks=2)
        gemm_reduce_scatter(torch.ones(4 * size, 3), weight, None, name, chunks=2)
        gemm_all_reduce(x, weight, None, name, chunks=2)
    with count_collectives() as backward:
        gathered.sum().backward()
    names = {call.group_name for call in counts.calls}
    dtypes = {call.dtype for call in counts.calls}
    return _summary(counts), _summary(backward), names == {name}, dtypes


def custom_op_calls(group):
    x = torch.ones(4, requires_grad=True)
    with count_collectives() as outer:
        with count_collectives() as forward:
            y = reduced(x, group.group_name)
        with count_collectives() as backward:
            y.sum().backward()
    return [_summary(counts) for counts in (forward, backward, outer)]


def compiled_calls(group):
    name = group.group_name

    def fn(x):
        return reduced(x, name) + funcol.all_reduce(x, "sum", name)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    with count_collectives() as first:
        compiled(torch.ones(4))
    with count_collectives() as second:
        compiled(torch.ones(4))
    return _summary(first), _summary(second)


def other_thread_calls(group):
    with count_collectives() as counts:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
        thread.start()
        thread.join()
    return _summary(counts)


def nothing_left_installed(group):
    before = dist.ProcessGroup.allreduce, torch.ops._c10d_functional.all_reduce.default._op
    with count_collectives():
        during = dist.ProcessGroup.allreduce, torch.ops._c10d_functional.all_reduce.default._op
    after = dist.ProcessGroup.allreduce, torch.ops._c10d_functional.all_reduce.default._op
    return before == after, all(a is not b for a, b in zip(before, during, strict=True))


def unseen_calls(group):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
    with count_collectives():
        model(torch.ones(1, 2)).sum().backward()


PART, WHOLE = 3 * 5 * 4, 2 * 3 * 5 * 4  # bytes, two ranks


def test_eager_collectives(pool):
    for summary, dtype, same_group in pool.run(eager_calls, world_size=2):
        assert summary == {
            "all_reduce": (2, PART + PART // 2),
            "all_gather": (2, 2 * WHOLE),
            "reduce_scatter": (2, 2 * WHOLE),
            "all_to_all": (1, WHOLE),
            "broadcast": (1, PART),
            "barrier": (1, 0),
        }
        assert dtype == torch.bfloat16
        assert same_group


def test_functional_collectives(pool):
    for summary, same_group in pool.run(functional_calls, world_size=2):
        assert summary == {
            "all_reduce": (2, 2 * PART),
            "all_gather": (1, WHOLE),
            "reduce_scatter": (1, WHOLE),
        }
        assert same_group


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [2, 3])
def test_overlapped_ops_count_the_same_whatever_carries_them(pool, carrier, world):
    """Not the sends, receives, all-to-alls or lanes that carry them."""
    whole = world * 4 * 3 * 4
    for forward, backward, same_group, dtypes in run_carried(
        pool, carrier, overlapped_calls, world_size=world
    ):
        assert forward == {
            "all_gather": (2, whole),
            "reduce_scatter": (2, whole // 3 * 2),
            "all_reduce": (2, 4 * 2 * 4),
        }
        assert backward == {"reduce_scatter": (2, whole)}
        assert same_group and dtypes == {torch.float32}


def test_inside_custom_ops_forward_and_backward(pool):
    one = {"all_reduce": (1, 16)}
    assert pool.run(custom_op_calls, world_size=2)[0] == [one, one, {"all_reduce": (2, 32)}]


def test_compiled_graphs_count_what_runs_and_not_what_is_traced(pool):
    two = {"all_reduce": (2, 32)}
    assert pool.run(compiled_calls, world_size=2)[1] == (two, two)


def test_other_threads(pool):
    assert pool.run(other_thread_calls)[3] == {"all_reduce": (1, 8)}


def test_everything_is_put_back(pool):
    assert pool.run(nothing_left_installed, world_size=1) == [(True, True)]


def test_a_collective_that_cannot_be_seen_raises(pools):
    with pytest.raises(RuntimeError, match="code started the others"):
        pools(2).run(unseen_calls)


def test_a_kind_that_does_not_exist_is_refused():
    assert CollectiveCounts()["all_reduce"].calls == 0
    with pytest.raises(KeyError, match="one of all_reduce, all_gather"):
        CollectiveCounts()["allreduce"]
