"""Tests on groups whose messages are carried by each of what can carry them on CPU."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpkernels import native
from tpkernels.comm import tpshm
from tpkernels.comm.lanes import lanes_of, why_not
from tpkernels.overlap.plan import carrier_of
from tpkernels.testing import RankPool

CARRIERS = (
    "gloo",
    "lanes",
    pytest.param(
        "tpshm",
        marks=pytest.mark.skipif(
            not native.status().available, reason="tpshm is compiled; this machine has none"
        ),
    ),
)


def run_carried(
    pool: RankPool,
    carrier: str,
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    limit: float = 60.0,
    **options: Any,
) -> list[Any]:
    """``fn(group, *args)`` on the first ranks of ``pool``, in a new group over ``carrier``.

    ``limit``: seconds, of the group's collectives. ``options``: as for :meth:`RankPool.run`.
    """
    results = pool.run(_in_new_group, carrier, world_size, limit, fn, args, **options)
    return results[:world_size]


def _in_new_group(group, carrier, size, limit, fn, args):
    if carrier == "tpshm":
        tpshm.register()
    made = dist.new_group(
        list(range(size)),
        backend="tpshm" if carrier == "tpshm" else "gloo",
        timeout=datetime.timedelta(seconds=limit),
    )
    result = None
    if group.rank() < size:
        if size > 1:
            use_carrier(made, carrier)
        result = fn(made, *args)
    # Ended here: the pool would take ranks that sent different numbers of messages to be out of
    # step. WAR: a rank that closes its connections must have been heard by all.
    dist.barrier(group)
    dist.destroy_process_group(made)
    return result


def use_carrier(group: dist.ProcessGroup, carrier: str) -> None:
    """Give ``group`` the lanes it would not have on one host, if those are wanted."""
    name = group.group_name
    if carrier == "lanes":
        assert lanes_of(name, even_on_one_host=True) is not None, why_not(name)
    assert carrier_of(name, torch.device("cpu")) == carrier
