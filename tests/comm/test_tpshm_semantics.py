"""``tpshm`` does what Gloo does, call by call, in the same processes; and what Gloo does not: any
layout, uneven parts, averages.

Gloo reads and writes strided memory wrongly, so it is given contiguous tensors: TP-16, TP-19.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.ops.samples import laid_out

LAYOUTS = ("contiguous", "transposed", "strided", "offset")  # that can be written to
GLOO_REDUCES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
GLOO_LACKS = (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
REDUCTIONS = {
    "sum": ReduceOp.SUM,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "product": ReduceOp.PRODUCT,
}
BITS = {"band": ReduceOp.BAND, "bor": ReduceOp.BOR, "bxor": ReduceOp.BXOR}

# torch 2.13 renamed both and warns on the old names; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Call:
    """Where and how an operation is called: the group, the layout of every tensor, async or not."""

    def __init__(self, group, layout="contiguous", asynchronous=False, op=ReduceOp.SUM):
        self.group, self.layout, self.asynchronous, self.op = group, layout, asynchronous, op
        self.rank, self.world = group.rank(), group.size()

    def of(self, rank, shape, dtype, salt=0):
        """A tensor of small integers that rank ``rank`` brings; every rank can compute it."""
        generator = torch.Generator().manual_seed(1000 * salt + rank)
        return self.laid(torch.randint(0, 4, shape, generator=generator).to(dtype))

    def own(self, shape, dtype, salt=0):
        return self.of(self.rank, shape, dtype, salt)

    def empty(self, shape, dtype):
        return self.laid(torch.full(shape, 9).to(dtype))

    def laid(self, tensor):
        return laid_out(tensor, self.layout) if tensor.dim() > 1 else tensor

    def done(self, work):
        if self.asynchronous:
            work.wait()
            assert work.is_completed()
        else:
            assert work is None

    @property
    def how(self):
        return {"group": self.group, "async_op": self.asynchronous}


def all_reduce(call, shape, dtype):
    x = call.own(shape, dtype)
    call.done(dist.all_reduce(x, call.op, **call.how))
    return [x]


def reduce(call, shape, dtype):
    root = call.world - 1
    x = call.own(shape, dtype)
    call.done(dist.reduce(x, group_dst=root, op=call.op, **call.how))
    return [x] if call.rank == root else []  # the others' may hold anything


def broadcast(call, shape, dtype):
    results = []
    for root in range(call.world):
        x = call.own(shape, dtype, root)
        call.done(dist.broadcast(x, group_src=root, **call.how))
        results.append(x)
    return results


def all_gather(call, shape, dtype):
    outputs = [call.empty(shape, dtype) for _ in range(call.world)]
    call.done(dist.all_gather(outputs, call.own(shape, dtype), **call.how))
    return outputs


def all_gather_into_tensor(call, shape, dtype):
    output = call.empty((call.world * shape[0], *shape[1:]), dtype)
    call.done(all_gather_single(output, call.own(shape, dtype), **call.how))
    return [output]


def gather(call, shape, dtype):
    outputs = [call.empty(shape, dtype) for _ in range(call.world)] if call.rank == 0 else None
    call.done(dist.gather(call.own(shape, dtype), outputs, group_dst=0, **call.how))
    return outputs or []


def scatter(call, shape, dtype):
    root = call.world - 1
    inputs = None
    if call.rank == root:
        inputs = [call.of(r, shape, dtype) for r in range(call.world)]
    output = call.empty(shape, dtype)
    call.done(dist.scatter(output, inputs, group_src=root, **call.how))
    return [output]


def reduce_scatter(call, shape, dtype):
    inputs = [call.own(shape, dtype, r) for r in range(call.world)]
    output = call.empty(shape, dtype)
    call.done(dist.reduce_scatter(output, inputs, call.op, **call.how))
    return [output]


def reduce_scatter_tensor(call, shape, dtype):
    whole = call.own((call.world * shape[0], *shape[1:]), dtype)
    output = call.empty(shape, dtype)
    call.done(reduce_scatter_single(output, whole, call.op, **call.how))
    return [output]


def all_to_all_single(call, shape, dtype):
    whole = (call.world * shape[0], *shape[1:])
    output = call.empty(whole, dtype)
    call.done(dist.all_to_all_single(output, call.own(whole, dtype), **call.how))
    return [output]


def all_to_all_single_uneven(call, shape, dtype):
    sent = [r + 1 for r in range(call.world)]
    received = [call.rank + 1] * call.world
    output = call.empty((sum(received), *shape[1:]), dtype)
    x = call.own((sum(sent), *shape[1:]), dtype)
    call.done(dist.all_to_all_single(output, x, received, sent, **call.how))
    return [output]


def barrier(call, shape, dtype):
    call.done(dist.barrier(**call.how))
    return []


REDUCE = (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor)
MOVE = (
    *(broadcast, all_gather, all_gather_into_tensor, gather, scatter),
    *(all_to_all_single, all_to_all_single_uneven, barrier),
)
SHAPES = ((4, 3), (1, 1), (0, 3), (3, 0), (5,), (2, 3, 2))


def groups():
    return dist.new_group(backend="gloo"), dist.new_group(backend="tpshm")


def same(a, b):
    if a.dtype.itemsize == 1:  # float8 has no comparison
        a, b = (each.contiguous().view(torch.uint8) for each in (a, b))
    return torch.equal(a, b)


def compare(gloo, tpshm, operation, shape, dtype, layout, asynchronous, op=ReduceOp.SUM):
    known = torch.int32 if dtype in GLOO_LACKS else dtype  # the values are small integers
    expected = [each.to(dtype) for each in operation(Call(gloo, op=op), shape, known)]
    ours = operation(Call(tpshm, layout, asynchronous, op), shape, dtype)
    case = (operation.__name__, shape, dtype, layout, asynchronous, op)
    assert len(expected) == len(ours), case
    for theirs, mine in zip(expected, ours, strict=True):
        assert mine.dtype is theirs.dtype and same(mine, theirs), (case, mine, theirs)


def run_moves(group):
    gloo, tpshm = groups()
    for operation in MOVE:
        for dtype in (*GLOO_REDUCES, *GLOO_LACKS):
            compare(gloo, tpshm, operation, (4, 3), dtype, "contiguous", False)
        for layout in LAYOUTS:
            for asynchronous in (False, True):
                compare(gloo, tpshm, operation, (4, 3), torch.float32, layout, asynchronous)
        for shape in SHAPES:
            compare(gloo, tpshm, operation, shape, torch.float32, "contiguous", True)


def run_reductions(group):
    gloo, tpshm = groups()
    for operation in REDUCE:
        for op in REDUCTIONS.values():
            for dtype in GLOO_REDUCES:
                compare(gloo, tpshm, operation, (4, 3), dtype, "contiguous", False, op)
            for layout in LAYOUTS:
                for asynchronous in (False, True):
                    compare(gloo, tpshm, operation, (4, 3), torch.float32, layout, asynchronous, op)
        for shape in SHAPES:
            compare(gloo, tpshm, operation, shape, torch.float32, "contiguous", True)
    for op in BITS.values():
        for operation in REDUCE:
            compare(gloo, tpshm, operation, (4, 3), torch.int32, "transposed", False, op)
    for dtype in (torch.complex64, torch.complex128):
        compare(gloo, tpshm, all_reduce, (4, 3), dtype, "transposed", False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("run", [run_moves, run_reductions], ids=["moves", "reductions"])
def test_call_by_call_as_gloo(pools, run, world):
    """TP-16, TP-19, TP-21, TP-23: every operation, dtype, layout, empty shape; sync and async."""
    pools(world).run(run, timeout=60)


def run_alone(group):
    gloo, tpshm = groups()
    for operation in (*MOVE, *REDUCE):
        for layout in ("contiguous", "transposed"):
            compare(gloo, tpshm, operation, (4, 3), torch.float32, layout, False)
    compare(gloo, tpshm, all_reduce, (2, 2), torch.bfloat16, "contiguous", True, ReduceOp.MAX)


def test_a_group_of_one(pools):
    pools(1).run(run_alone)


def run_what_gloo_lacks(group):
    tpshm = dist.new_group(backend="tpshm")
    rank, world = tpshm.rank(), tpshm.size()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 2), float(rank), dtype=dtype)
        dist.all_reduce(x, ReduceOp.AVG, group=tpshm)
        assert torch.equal(x, torch.full_like(x, (world - 1) / 2))
    parts = [torch.empty(r + 1, 2) for r in range(world)]  # uneven
    dist.all_gather(parts, torch.full((rank + 1, 2), float(rank)), group=tpshm)
    assert [part.tolist() for part in parts] == [[[float(r)] * 2] * (r + 1) for r in range(world)]
    kept = torch.empty(rank + 1)
    dist.reduce_scatter(kept, [torch.full((r + 1,), 1.0 + rank) for r in range(world)], group=tpshm)
    assert kept.tolist() == [world * (world + 1) / 2] * (rank + 1)
    received = [torch.empty(rank + 1, 2) for _ in range(world)]
    dist.all_to_all(received, [torch.full((r + 1, 2), float(rank)) for r in range(world)], tpshm)
    assert [part[0, 0].item() for part in received] == list(range(world))
    flag = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flag, group=tpshm)  # "or"
    assert flag.tolist() == [True, False, True]
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar, group=tpshm)
    assert scalar.item() == world * (world - 1) / 2
    half = torch.full((1000,), 1 + 2**-7, dtype=torch.bfloat16)  # exact only when added in fp32
    dist.all_reduce(half, group=tpshm)
    assert torch.equal(half, torch.full_like(half, world * (1 + 2**-7)))
    stacked = torch.empty(world, 2)
    all_gather_single(stacked, torch.full((2,), float(rank)), group=tpshm)
    assert stacked[:, 1].tolist() == list(range(world))


def test_what_gloo_lacks(pools):
    pools(3).run(run_what_gloo_lacks)


def run_coalesced(group):
    tpshm = dist.new_group(backend="tpshm")
    rank, world = tpshm.rank(), tpshm.size()
    total = world * (world + 1) / 2
    xs = [torch.full((n, 2), 1.0 + rank).t() for n in (1, 0, 5)]
    with dist._coalescing_manager(group=tpshm):
        for x in xs:
            dist.all_reduce(x, group=tpshm)
    assert all(torch.equal(x, torch.full_like(x, total)) for x in xs)
    wholes = [torch.empty(world * n) for n in (3, 1)]
    with dist._coalescing_manager(group=tpshm, async_ops=True) as pending:
        for whole in wholes:
            own = torch.full((whole.numel() // world,), float(rank))
            all_gather_single(whole, own, group=tpshm)
    pending.wait()
    for whole in wholes:
        assert whole.view(world, -1)[:, 0].tolist() == list(range(world))
    kept = [torch.empty(n) for n in (2, 4)]
    with dist._coalescing_manager(group=tpshm):
        for each in kept:
            whole = torch.full((world * each.numel(),), 1.0 + rank)
            reduce_scatter_single(each, whole, group=tpshm)
    assert all(each.tolist() == [total] * each.numel() for each in kept)


def test_coalesced(pools):
    pools(3).run(run_coalesced)


def run_point_to_point(group):
    """Through the inner Gloo, beside collectives of our own that are under way."""
    tpshm = dist.new_group(backend="tpshm")
    rank = tpshm.rank()
    x = torch.full((4,), float(rank))
    work = dist.all_reduce(x, group=tpshm, async_op=True)
    if rank == 0:
        dist.send(torch.arange(3.0), group=tpshm, group_dst=1, tag=5)
        got = torch.empty(3)
        assert dist.recv(got, group=tpshm) == 1
    else:
        got = torch.empty(3)
        dist.recv(got, group=tpshm, group_src=0, tag=5)
        dist.isend(got + 1, group=tpshm, group_dst=0).wait()
    work.wait()
    assert x.tolist() == [1.0] * 4
    return got.tolist()


def test_send_and_receive(pools):
    assert pools(2).run(run_point_to_point) == [[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]]


def run_sparse(group):
    tpshm = dist.new_group(backend="tpshm")
    rank = tpshm.rank()
    x = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
    dist.all_reduce(x, group=tpshm)
    return x.to_dense().tolist()


def test_sparse_tensors(pools):
    assert pools(2).run(run_sparse) == [[1.0, 1.0, 0.0, 4.0, 0.0]] * 2


def run_work(group):
    """What an asynchronous work tells: its future, its result, once it is done."""
    tpshm = dist.new_group(backend="tpshm")
    world = tpshm.size()
    x = torch.ones(3)
    work = dist.all_reduce(x, group=tpshm, async_op=True)
    told = work.get_future().then(lambda future: future.value()[0].sum().item()).wait()
    assert told == 3 * world
    work.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is not None and torch.equal(work.result()[0], x)
    assert torch.equal(work.get_future().value()[0], x)  # asked for when all is done
    # In order, however many, while their tensors are held by nobody else.
    works = []
    for step in range(50):
        works.append(dist.all_reduce(torch.full((100,), float(step)), group=tpshm, async_op=True))
    assert [w.get_future().wait()[0][0].item() for w in works] == [world * s for s in range(50)]
    # A synchronous one comes after those.
    work = dist.all_reduce(x, group=tpshm, async_op=True)
    dist.all_reduce(x, group=tpshm)
    assert work.is_completed() and x.tolist() == [float(world**3)] * 3
    leaf = torch.nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        dist.broadcast(leaf.t(), group_src=0, group=tpshm)
    assert leaf._version == 0


def test_works(pools):
    pools(2).run(run_work)


def run_groups(group):
    """Overlapping and strided groups at once, from several threads."""
    import threading

    rank = dist.get_rank()
    members = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (1, 2, 3)]
    made = {m: dist.new_group(list(m), backend="tpshm") for m in members}
    own = {m: g for m, g in made.items() if rank in m}
    errors = []

    def work(m, g):
        for step in range(40):
            x = torch.full((3 + step,), float(rank + step))
            dist.all_reduce(x, group=g)
            expected = float(sum(r + step for r in m))
            if x.tolist() != [expected] * (3 + step):
                errors.append((m, step, x))

    threads = [threading.Thread(target=work, args=each) for each in own.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_groups_that_overlap_used_by_several_threads(pool):
    """TP-42, TP-44: what ranks say to each other in one group is not heard in another."""
    assert pool.run(run_groups) == [[]] * 4


def run_large(group, elements):
    tpshm = dist.new_group(backend="tpshm")
    rank = tpshm.rank()
    x = torch.full((elements,), rank + 1, dtype=torch.uint8)
    dist.all_reduce(x, group=tpshm)
    ends = [x[0].item(), x[elements // 2].item(), x[-1].item(), int(x.min()), int(x.max())]
    x[-1] = 7 if rank == 0 else 0
    dist.broadcast(x, group_src=0, group=tpshm)
    return [*ends, x[-1].item()]


def test_more_than_2_gib(pools):
    """TP-47, TP-56: 64-bit counts and offsets; the slots hold a part of it at a time."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(facts["MemAvailable"].split()[0])
    if available < 8 * 2**20:  # in KiB; two ranks of 2 GiB, and room to spare
        pytest.skip("needs 8 GiB of free memory")
    assert pools(2).run(run_large, 2**31 + 12345, timeout=60) == [[3, 3, 3, 3, 3, 7]] * 2
