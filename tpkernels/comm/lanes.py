"""Lanes: messages between CPU ranks of several hosts, moved by the thread that computes.

    exchange = lanes.exchange({1: [mine]}, {1: [theirs]}, "all_gather")   never blocks
    for piece in pieces:
        gemm(piece)
        lanes.progress()       moves what can be moved, without waiting
    exchange.wait()

Gloo sends from threads of its own, which take the core from the GEMM they should run beside, when
the scheduler pleases. Here nothing runs that the caller did not call: the kernel sends while the
GEMM runs, and what that costs is a copy into and one out of the kernel's buffers.

Between two ranks messages arrive in the order they are sent, so exchanges need only be started in
the same order on all ranks. State belongs to the group and ends with it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from tpkernels.comm.direct import has_peers
from tpkernels.comm.group import group_by_name
from tpkernels.comm.lanes_connecting import connect
from tpkernels.comm.lanes_exchanges import Exchange, Lanes
from tpkernels.comm.peers import Meeting, _host
from tpkernels.comm.tpshm import served_by, time_limit
from tpkernels.errors import TPKernelsWarning

__all__ = ["Exchange", "Lanes", "lanes_of", "wanted", "why_not"]

_ONE_HOST = "its ranks share one host"


class _Standing:
    """What is known of a group: whether its ranks span hosts, its lanes or why it has none."""

    def __init__(self, group: dist.ProcessGroup, group_name: str) -> None:
        self.lanes: Lanes | None = None
        self.reason = _refusal(group, group_name)
        self.tried = self.reason != ""
        self.spans_hosts = False
        if self.reason:
            return
        self.timeout = _timeout_of(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.meeting = Meeting(
            dist.PrefixStore("lanes", _store_of(group)),
            group.rank(),
            group.size(),
            group_name,
            time_limit(self.timeout),
            what="lanes",
        )
        self.meeting.say("host", _host())
        self.spans_hosts = len(set(self.meeting.hear_all("host"))) > 1

    def connect(self) -> None:
        """Make the lanes, or find out why they cannot be."""
        self.tried = True
        self.meeting.next_stage()
        lanes, self.reason = connect(self.meeting)
        name, rank = self.meeting.name, self.meeting.rank
        if not self.reason:
            self.lanes = Lanes(lanes, rank, name, self.global_ranks, self.timeout)
        elif rank == 0:
            _warn(self.reason)


@functools.lru_cache  # once for a reason: a mesh has many groups
def _warn(reason: str) -> None:
    message = f"no lanes between the ranks, whose messages go over Gloo instead: {reason}"
    warnings.warn_explicit(message, TPKernelsWarning, "tpkernels", 0)


_standings: WeakKeyDictionary[Any, _Standing] = WeakKeyDictionary()  # by group
_meeting = threading.RLock()


def lanes_of(group_name: str, *, even_on_one_host: bool = False) -> Lanes | None:
    """The lanes of a group, or None: :func:`why_not` tells; the same on all ranks.

    The first call for a group is collective over it; later ones look it up.

    Args:
        group_name: ``process_group.group_name``.
        even_on_one_host: where all ranks share a host, sending costs what copying does, and there
            are no lanes unless this is set; the same on all ranks.

    Raises:
        CommunicationError: a rank does not come to the first call in time; names it.
    """
    standing = _standing_of(group_name)
    if standing is None:
        return None
    if not standing.tried and (standing.spans_hosts or even_on_one_host):
        with _meeting:
            if not standing.tried:
                standing.connect()
    return standing.lanes


def wanted(group_name: str) -> bool:
    """Whether the group's ranks span hosts and could have lanes; makes none.

    The first call for a group is collective over it, as that of :func:`lanes_of`.
    """
    standing = _standing_of(group_name)
    return standing is not None and standing.spans_hosts


def why_not(group_name: str) -> str:
    """Why the group has no lanes; ``""``: it has, or nobody has asked for them yet."""
    group = group_by_name(group_name)
    if group is None:
        return "a group of one rank"
    standing = _standings.get(group)
    if standing is None or standing.lanes is not None:
        return ""
    return standing.reason or ("" if standing.spans_hosts else _ONE_HOST)


def _standing_of(group_name: str) -> _Standing | None:
    group = group_by_name(group_name)
    if group is None:
        return None
    standing = _standings.get(group)
    if standing is None:
        with _meeting:
            standing = _standings.get(group)
            if standing is None:
                standing = _standings[group] = _Standing(group, group_name)
    return standing


def _refusal(group: dist.ProcessGroup, group_name: str) -> str:
    """Why the group cannot have lanes, as far as every rank knows by itself; or ``""``."""
    if group.size() == 1:
        return "a group of one rank"
    if has_peers(group_name):
        return "its ranks share memory (tpshm)"
    if "cpu" not in {device.type for device in group._device_types}:
        return f"its backend, {dist.get_backend_config(group)}, does not serve CPU tensors"
    backend = served_by(group).backend
    return "" if backend == "gloo" else f"its CPU tensors are served by {backend}, not by Gloo"


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    return dist.distributed_c10d._world.pg_map[group][1]


def _timeout_of(group: dist.ProcessGroup) -> Any:
    """The limit the group was made with; PyTorch's default where its backend has none to show."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)
