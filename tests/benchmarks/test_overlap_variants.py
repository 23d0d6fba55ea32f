"""The overlap benchmark on real ranks: every variant is checked, what is wrong is not timed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.overlap_samples import CHUNKED
from tpkernels.benchmarks import overlap_layers
from tpkernels.benchmarks.overlap_block import BLOCKS
from tpkernels.benchmarks.overlap_layers import COLUMN, LAYERS, ROW, LayerProblem
from tpkernels.benchmarks.overlap_rows import Result
from tpkernels.benchmarks.overlap_variants import (
    COMM,
    COMM_OURS,
    DTENSOR,
    GEMM,
    NAMES,
    OFF,
    OURS,
    PARTS,
)
from tpkernels.benchmarks.overlap_worker import Case, checked
from tpkernels.benchmarks.ranks import Ranks
from tpkernels.benchmarks.turns import Timed, Turns, measure

SIZES = {**dict.fromkeys(LAYERS, (8, 12, 20)), **dict.fromkeys(BLOCKS, (6, 128))}


def joined(group: dist.ProcessGroup) -> Ranks:
    return Ranks(group.rank(), group.size(), torch.device("cpu"), group, None, 2)


def every_variant(group: dist.ProcessGroup, op: str, dtype: str) -> dict[str, Result]:
    problem = Case(op, SIZES[op], dtype).problem(group)
    return checked(problem, [*NAMES, CHUNKED], joined(group))[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("op", [*LAYERS, *BLOCKS])
def test_every_variant_is_right(op, dtype, pool):
    first, second = pool.run(every_variant, op, dtype, world_size=2)
    assert list(first) == [*NAMES, *([CHUNKED] if op in LAYERS and op != COLUMN else [])]
    for name, result in first.items():
        assert result.error is None and 0 < result.relative_error < 0.02, result
        assert result.relative_error == second[name].relative_error  # the largest of the ranks'
        assert (result.plan is None) == (name == DTENSOR)
        assert (result.saved_bytes is None) == (op in LAYERS)
    assert "TPKERNELS_OVERLAP=off" in first[OFF].plan
    assert "TPKERNELS_OVERLAP" not in first[OURS].plan


def test_three_ranks_are_right_too(pool):
    for results in pool.run(_three, world_size=3):
        for result in results:
            assert result.error is None and 0 < result.relative_error < 1e-5, result


def _three(group: dist.ProcessGroup) -> list[Result]:
    found = []
    for op in LAYERS:
        problem = Case(op, (12, 8, 20), "fp32").problem(group)
        found += checked(problem, NAMES, joined(group))[1].values()
    return found


def _one_is_wrong(group: dist.ProcessGroup) -> tuple[dict[str, Result], list[str]]:
    """Ours gives a wrong result on rank 1 only; DTensor raises there."""
    honest = LayerProblem.outputs

    def outputs(self: LayerProblem, name: str, result: object) -> list[Tensor]:
        found = honest(self, name, result)
        if group.rank() == 1 and name == DTENSOR:
            raise RuntimeError("lost")
        return [y * 1.01 for y in found] if group.rank() == 1 and name == OURS else found

    LayerProblem.outputs = outputs
    try:
        calls, results = checked(
            Case(ROW, (8, 12, 20), "fp32").problem(group), NAMES, joined(group)
        )
    finally:
        LayerProblem.outputs = honest
    return results, list(calls)


def test_what_is_wrong_on_one_rank_is_not_timed_on_any(pool):
    for results, timed in pool.run(_one_is_wrong, world_size=2):
        assert timed == [OFF]
        assert results[DTENSOR].error == "cannot run: RuntimeError: lost"
        assert results[OURS].error.startswith("wrong: y: relative error 1.0")


def _parts(group: dist.ProcessGroup, op: str) -> dict[str, list[float]]:
    problem = Case(op, SIZES[op], "fp32").problem(group)
    comm, alone = problem.collectives(), problem.alone()
    timed = [Timed(GEMM, [problem.gemm()]), Timed(COMM, [comm], comm.refresh, comm.lasting)]
    if alone is not None:
        timed.append(Timed(COMM_OURS, [alone]))
    measure(timed, joined(group), Turns(0.01, 3, 3, warm_up=1))
    return {each.name: each.us for each in timed}


@pytest.mark.parametrize("op", [*LAYERS, *BLOCKS])
def test_arithmetic_and_collectives_are_timed_alone(op, pool, monkeypatch):
    first, second = pool.run(_parts, op, world_size=2)
    assert first == second and list(first) == list(PARTS if op in LAYERS else PARTS[:2])
    assert all(len(us) == 3 and min(us) > 0 for us in first.values())


def _count_calls(group: dist.ProcessGroup, warm_up: int) -> int:
    """Of a call of 2 ms, which is a batch of its own, in 3 turns."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        time.sleep(2e-3)

    measure([Timed("slow", [call])], joined(group), Turns(0.01, 3, 3, warm_up))
    return len(calls)


@pytest.mark.parametrize("warm_up", [1, 2])
def test_long_calls_need_fewer_that_are_not_timed(warm_up, pool):
    """One, three, one and three batches of one: six times `warm_up` before them."""
    assert pool.run(_count_calls, warm_up, world_size=2) == [8 + 6 * warm_up] * 2


def _arithmetic(group: dist.ProcessGroup, op: str) -> int:
    """Multiplications of what is timed as arithmetic."""
    problem = LayerProblem(op, *SIZES[op], "fp32", group)
    return sum(a.shape[0] * a.shape[1] * b.shape[1] for a, b in problem._products())


def test_the_arithmetic_is_that_of_one_rank(pool):
    m, k, n = SIZES[ROW]
    for op in LAYERS:
        products = 2 if op in overlap_layers._BACKWARD else 1
        assert pool.run(_arithmetic, op, world_size=2) == [products * m * k * n] * 2


class _Groups(TorchDispatchMode):
    """The names of the groups that functional all-reduces go through."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d_functional.all_reduce" in str(func):
            self.names.append(getattr(args[2], "group_name", args[2]))
        return func(*args, **(kwargs or {}))


def _two_groups(group: dist.ProcessGroup) -> list[tuple[list[str], str]]:
    found = []
    for each in (dist.new_group(), dist.new_group()):
        call = Case(ROW, (8, 12, 20), "fp32").problem(each).build(DTENSOR)
        with _Groups() as seen:
            call()
        found.append((seen.names, each.group_name))
    return found


def test_dtensor_sends_through_the_group_that_is_measured(pool):
    """Its caches take meshes of the same ranks and names for the same mesh."""
    for found in pool.run(_two_groups):
        (first, name), (second, other) = found
        assert first == [name] and second == [other] and name != other
