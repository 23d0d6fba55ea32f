"""Fixtures and settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

# Before anything imports a Triton kernel: without a GPU they run in Triton's interpreter, on CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tpkernels.testing import RankPool

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# The suite shares its cores with its ranks: one thread each.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, saying so, without")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """`pools(W)`: a pool whose world has exactly W ranks, kept for the session."""
    made: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in made:
            made[world_size] = RankPool(world_size)
        return made[world_size]

    yield pool_of
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="session")
def pool(pools: Callable[[int], RankPool]) -> RankPool:
    """Four ranks; `pool.run(fn, ..., world_size=2)` uses the first two as a group."""
    return pools(4)
