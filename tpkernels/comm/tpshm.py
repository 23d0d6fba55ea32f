"""The backend ``tpshm`` of ``torch.distributed``: CPU collectives over memory that ranks share.

    dist.init_process_group("tpshm")                      # or "cpu:tpshm,cuda:nccl"

A group whose ranks are not on one host, or that lacks native code on some rank, runs on Gloo
instead, on all its ranks; :func:`served_by` says so. Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from tpkernels import envs
from tpkernels.errors import CommunicationError, TPKernelsWarning

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "tpshm"
# What the backend does over Gloo.
OVER_GLOO = "send and receive, sparse tensors, groups that span hosts"


class Service(NamedTuple):
    """What serves the CPU collectives of a group, and why."""

    backend: str
    reason: str


_services: dict[str, Service] = {}  # of each group that was made with tpshm, by its name


def register() -> None:
    """Make ``tpshm`` known to ``torch.distributed``. Never raises; a second call does nothing.

    PyTorch calls it at the end of ``import torch`` (entry point ``torch.backends``).
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
            _complete_new_groups(dist.distributed_c10d)


def _complete_new_groups(c10d: Any) -> None:
    """Give every new process group a default backend, also where PyTorch forgets it.

    torch 2.11 to 2.13, once any plugin is registered, leaves a group without one whose backend was
    given by device, as "cpu:gloo" or "cpu:tpshm": it looks for the plugin's name in upper case
    among names in lower case. Such a group counts no operations, and warns when it is destroyed.
    """
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def _new_process_group_helper(*args: Any, **kw: Any) -> Any:
        made = make(*args, **kw)
        group = made[0]
        if isinstance(group, c10d.ProcessGroup) and group.name() == "undefined":
            with contextlib.suppress(Exception):
                config = c10d.BackendConfig(c10d._world.pg_map[group][0])
                name = next(iter(config.get_device_backend_map().values()))
                group._set_default_backend(c10d.Backend.backend_type_map[name])
        return made

    c10d._new_process_group_helper = _new_process_group_helper


def register_if_loaded() -> None:
    """:func:`register` where ``torch.distributed`` has been imported."""
    if "torch.distributed.distributed_c10d" in sys.modules:
        register()


def served_by(group: dist.ProcessGroup) -> Service:
    """What serves the CPU collectives of ``group``: ``("tpshm" or "gloo", reason)``."""
    import torch
    import torch.distributed as dist

    backend = group._get_backend(torch.device("cpu")).name()
    asked = dist.get_backend_config(group)
    known = _services.get(group.group_name)
    if known is not None and NAME in asked:  # and not of an earlier group of that name
        return known
    return Service(backend, f"it was made with {asked}")


def availability() -> tuple[bool, str, str | None]:
    """Whether this machine can have ``tpshm``, why (not), and the fix: for ``doctor``."""
    from tpkernels import native

    if not sys.platform.startswith("linux"):
        return False, f"it needs Linux, this is {sys.platform}: CPU groups run on Gloo", None
    status = native.status()
    if not status.available:
        return False, f"no native code: CPU groups run on Gloo ({status.reason})", status.fix
    return True, f"CPU collectives within one host; over Gloo: {OVER_GLOO}", None


def time_limit(given: datetime.timedelta) -> float:
    """Seconds of a group's operations: ``TPKERNELS_TIMEOUT``, else as given, else its default."""
    from torch.distributed.constants import default_pg_timeout

    if os.environ.get("TPKERNELS_TIMEOUT") or given == default_pg_timeout:
        return envs.timeout()
    return given.total_seconds()


def _create(options: Any, _backend_options: Any) -> Any:
    """The backend of one process group; called by ``torch.distributed`` on all its ranks."""
    import torch.distributed as dist

    from tpkernels import native
    from tpkernels.comm.peers import SPANS_HOSTS, SWITCHED_OFF, Meeting, make_peers

    rank, size, name = options.group_rank, options.group_size, options.group_id
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    seconds = time_limit(options.timeout)
    meeting = Meeting(options.store, rank, size, name, seconds)
    peers = make_peers(meeting, global_ranks, seconds)
    try:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore(f"{meeting.prefix}/gloo/", options.store),
            rank,
            size,
            timeout=datetime.timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        meeting.say("connections", False)
        raise CommunicationError(meeting.why_no_connections(error)) from error
    meeting.say("connections", True)
    gloo.options.global_ranks_in_group = global_ranks
    gloo.options.group_name = name
    gloo._set_sequence_number_for_group()
    _services[name] = Service(NAME if peers.group is not None else "gloo", peers.reason)
    if peers.group is None:
        if rank == 0 and peers.reason not in (SPANS_HOSTS, SWITCHED_OFF):
            _warn(peers.reason)
        return gloo
    module = native.load()
    assert module is not None
    _settle_at_exit(module)
    return module.TpshmBackend(peers.group, gloo, name, global_ranks)


@functools.cache
def _settle_at_exit(module: Any) -> None:
    atexit.register(module.settle)


@functools.lru_cache  # once for a reason: a mesh has many groups
def _warn(reason: str) -> None:
    message = f"tpshm cannot serve, the group runs on Gloo: {reason}"
    warnings.warn_explicit(message, TPKernelsWarning, "tpkernels", 0)
