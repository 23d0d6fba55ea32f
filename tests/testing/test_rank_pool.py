"""RankPool: results, groups, clean state, and every way a rank can fail, each within its limit."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tpkernels.errors import ConfigError
from tpkernels.testing import RankError, RankPool, RankTimeoutError


@dataclasses.dataclass
class Boxed:
    tensor: torch.Tensor


def all_reduced(group, x, scale=1):
    y = x * (group.rank() + 1)
    dist.all_reduce(y, group=group)
    return y * scale


def world_ranks(group):
    return dist.get_rank(), group.rank(), group.size(), dist.get_process_group_ranks(group)


def echo(group, value):
    return value


def boxed_parameter(group):
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    return {"box": Boxed(parameter[:1]), "all": [parameter]}


def random_numbers(group):
    return torch.rand(3)


def process_id(group):
    return os.getpid()


def dirty(group):
    os.environ["TPKERNELS_GEMM"] = "nonsense"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


def state(group):
    return (
        os.environ.get("TPKERNELS_GEMM"),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


def make_a_group(group):
    dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def raise_everywhere(group):
    raise ConfigError("tp=3 does not divide 8 heads")


def raise_unpicklable(group):
    class LocalError(Exception):
        pass

    raise LocalError("only here")


def raise_on(group, rank):
    if group.rank() == rank:
        raise ValueError(f"bad rank {rank}")
    dist.all_reduce(torch.ones(2), group=group)


def die_on(group, rank, how):
    if group.rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2), group=group)


def sleep_on(group, rank, seconds):
    if group.rank() == rank:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(2), group=group)


def leave_a_collective(group):
    if group.rank() == 0:
        dist.all_reduce(torch.ones(2), group=group, async_op=True)


def test_results_come_by_rank(pool):
    results = pool.run(all_reduced, torch.tensor([1.0, 2.0]), scale=10)
    assert len(results) == 4
    for result in results:
        assert result.tolist() == [100.0, 200.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_first_ranks_form_a_group(pool, world_size):
    results = pool.run(world_ranks, world_size=world_size)
    expected = [(r, r, world_size, list(range(world_size))) for r in range(world_size)]
    assert results == expected


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3), (3,)], ids=str)
def test_strided_ranks_form_a_group(pool, ranks):
    results = pool.run(world_ranks, ranks=ranks)
    assert results == [(r, i, len(ranks), list(ranks)) for i, r in enumerate(ranks)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str
)
def test_tensors_travel_both_ways(pool, dtype):
    wide = torch.arange(24).to(dtype).view(4, 6)
    sent = {"strided": wide[:, ::2], "expanded": wide[:1].expand(3, 6), "empty": wide[:0]}
    for got in pool.run(echo, sent, world_size=2):
        for name, tensor in sent.items():
            assert got[name].dtype == dtype
            assert torch.equal(got[name], tensor), name


def test_results_are_detached_and_compact_anywhere_in_the_result(pool):
    (result,) = pool.run(boxed_parameter, world_size=1)
    row, whole = result["box"].tensor, result["all"][0]
    assert not row.requires_grad and row.grad_fn is None
    assert row.untyped_storage().nbytes() == 2 * 4
    assert not whole.requires_grad and whole.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_every_call_starts_from_the_same_seed(pool):
    first = pool.run(random_numbers)
    second = pool.run(random_numbers)
    assert all(torch.equal(first[0], other) for other in [*first, *second])


def test_a_call_leaves_no_settings_behind(pool):
    pool.run(dirty, world_size=2)
    assert pool.run(state, world_size=2) == [(None, torch.float32, True, 1)] * 2


def test_env_is_for_one_call(pool):
    given = pool.run(state, world_size=1, env={"TPKERNELS_GEMM": "reference"})
    assert given[0][0] == "reference"
    assert pool.run(state, world_size=1)[0][0] is None


def test_groups_made_by_a_call_are_destroyed(pool):
    first = pool.run(make_a_group)
    assert pool.run(make_a_group) == first


def test_the_ranks_stay_up(pool):
    assert pool.run(process_id) == pool.run(process_id)


def test_an_error_on_all_ranks_keeps_the_pool_and_its_type(pool):
    before = pool.run(process_id)
    with pytest.raises(RankError, match="tp=3 does not divide 8 heads") as caught:
        pool.run(raise_everywhere)
    error = caught.value
    assert (error.rank, error.kind) == (0, "raised")
    assert error.type_name == "tpkernels.errors.ConfigError"
    assert isinstance(error.__cause__, ConfigError)
    assert [failure.rank for failure in error.failures] == [0, 1, 2, 3]
    assert "in raise_everywhere" in error.remote_traceback
    assert pool.run(process_id) == before


def test_an_error_that_cannot_be_pickled_is_told_by_name(pool):
    with pytest.raises(RankError, match=r"LocalError: only here") as caught:
        pool.run(raise_unpicklable, world_size=2)
    assert caught.value.__cause__ is None


def test_one_rank_raises_while_others_wait_in_a_collective(pools):
    pool, start = pools(2), time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: bad rank 1") as caught:
        pool.run(raise_on, 1)
    assert time.monotonic() - start < 15
    hung = caught.value.failures[1]
    assert (hung.rank, hung.kind) == (0, "hung")
    assert "in raise_on" in hung.traceback and "all_reduce" in hung.traceback
    assert pool.run(world_ranks, world_size=1)[0][0] == 0


@pytest.mark.parametrize(
    ("how", "status"), [("kill", "was killed by SIGKILL"), ("exit", "exited with status 7")]
)
def test_a_rank_that_dies_is_named_with_its_exit_status(pools, how, status):
    pool, start = pools(2), time.monotonic()
    with pytest.raises(RankError, match=f"rank 1 died: it {status}") as caught:
        pool.run(die_on, 1, how)
    assert time.monotonic() - start < 15
    assert (caught.value.rank, caught.value.kind) == (1, "died")


def test_a_rank_that_hangs_is_named_with_its_stack(pools):
    pool = pools(2)
    with pytest.raises(RankTimeoutError, match=r"rank 0 did not return within 1\.\d s") as caught:
        pool.run(sleep_on, 0, 600, timeout=1.0)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    assert "in sleep_on" in str(caught.value)


def test_ranks_left_out_of_step_are_replaced(pools):
    pool = pools(2)
    before = pool.run(process_id)
    pool.run(leave_a_collective)
    after = pool.run(process_id)
    assert not set(before) & set(after)
    assert pool.run(all_reduced, torch.ones(1))[0].item() == 3.0


def test_calls_from_threads_take_turns(pool):
    results = {}

    def call(scale):
        results[scale] = pool.run(all_reduced, torch.ones(1), scale, world_size=2)[1].item()

    threads = [threading.Thread(target=call, args=(scale,)) for scale in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {scale: 3.0 * scale for scale in range(4)}


def test_bad_arguments_are_refused_in_the_parent(pool):
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        RankPool(0)
    with pytest.raises(ValueError, match="timeout must be above 0 seconds"):
        RankPool(1, timeout=0)
    with pytest.raises(ValueError, match=r"world_size must be within 1\.\.4 .*got 5"):
        pool.run(process_id, world_size=5)
    with pytest.raises(ValueError, match="ranks must be ascending"):
        pool.run(process_id, ranks=(2, 0))
    with pytest.raises(ValueError, match="ranks must be ascending"):
        pool.run(process_id, ranks=(0, 4))
    with pytest.raises(ValueError, match="disagree"):
        pool.run(process_id, ranks=(0, 2), world_size=3)
    with pytest.raises(TypeError, match="top of an importable module"):
        pool.run(lambda group: None)


def test_a_pool_that_is_dropped_ends_its_ranks():
    pool = RankPool(1)
    (pid,) = pool.run(process_id)
    del pool
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_of_its_own_leaves_no_process_behind(tmp_path: Path):
    """Functions of `__main__` work, and the ranks go when the script's interpreter does."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from tpkernels.testing import RankPool

            def pid(group):
                return os.getpid()

            if __name__ == "__main__":
                print(*RankPool(2).run(pid), flush=True)
            """
        )
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
