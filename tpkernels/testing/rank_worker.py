"""One rank of a `RankPool`: a process that joins a Gloo group, then runs what it is sent.

Started by `rank_pool.py` as `python -c ...` with one end of a socket; never imported by the parent
except for the messages it shares with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# The parent enforces every limit and shows stacks; Gloo's own limit must never come first.
GLOO_TIMEOUT = timedelta(hours=1)
STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Setup:
    """The first message to a rank."""

    rank: int
    world_size: int
    port: int


@dataclass(frozen=True)
class Task:
    """A function to run; `payload` is the pickled `(fn, args, kwargs)`.

    `ranks` names the group. A rank outside it only creates that group, so that the collective
    part of making it is shared by all.
    """

    ranks: tuple[int, ...]
    payload: bytes
    sys_path: list[str]
    main_path: str | None
    env: dict[str, str]


@dataclass(frozen=True)
class MakeGroup:
    """Ask every rank to create the group of `ranks`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """What a rank answers: a pickled result, or an error.

    `collectives` counts, for every process group, the collectives started so far: ranks that
    disagree have left one of their peers behind.
    """

    payload: bytes | None = None
    type_name: str = ""
    message: str = ""
    traceback: str = ""
    exception: bytes | None = None
    collectives: dict[str, int] = field(default_factory=dict)


class _ResultPickler(pickle.Pickler):
    """Pickles tensors as detached, compact CPU copies, wherever they sit in the result."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter):
            copy = obj.detach().cpu().clone()
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def main(fd: int, stack_fd: int) -> None:
    """Serve the parent on socket `fd` until it closes; stacks go to file `stack_fd`."""
    os.set_inheritable(fd, False)
    os.set_inheritable(stack_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent decides, and kills
    faulthandler.enable(stack_fd, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack_fd, all_threads=False)

    connection = Connection(fd)
    setup: Setup = pickle.loads(connection.recv_bytes())
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, messages), daemon=True).start()

    torch.set_num_threads(1)
    groups = _join(setup)
    connection.send_bytes(pickle.dumps(Reply(collectives=_collectives())))
    gc.collect()
    gc.freeze()  # the collections after each task then look only at what the task made
    own_groups = set(distributed_c10d._world.pg_map)
    while True:
        message = messages.get()
        _destroy_groups_except(own_groups)
        if message.ranks not in groups:
            groups[message.ranks] = _new_group(message.ranks)
            own_groups = set(distributed_c10d._world.pg_map)
        if isinstance(message, Task):
            reply = _run(message, groups[message.ranks])
        else:
            reply = Reply(collectives=_collectives())
        connection.send_bytes(pickle.dumps(reply))


def _receive(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Read in a thread of its own, so that a parent that is gone ends even a rank that hangs."""
    try:
        while True:
            messages.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def _join(setup: Setup) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Join the world and make the groups of ranks 0..k-1, in the same order on every rank."""
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=GLOO_TIMEOUT,
    )
    groups = {tuple(range(size)): _new_group(range(size)) for size in range(1, setup.world_size)}
    groups[tuple(range(setup.world_size))] = dist.group.WORLD
    return groups


def _new_group(ranks: Any) -> Any:
    return dist.new_group(list(ranks), backend="gloo", timeout=GLOO_TIMEOUT)


def _destroy_groups_except(kept: set[dist.ProcessGroup]) -> None:
    """Destroy the groups that the last task made: each costs threads and sockets.

    Done when the next message arrives: by then every rank has returned from the task.
    """
    doomed = [group for group in distributed_c10d._world.pg_map if group not in kept]
    for group in doomed:
        dist.destroy_process_group(group)
    if doomed and "torch.distributed.tensor" in sys.modules:
        # DTensor's caches take a later task's mesh for an equal one whose groups are gone.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _collectives() -> dict[str, int]:
    world = distributed_c10d._world
    counts = {"groups made": world.group_count}
    for group in world.pg_map:
        with contextlib.suppress(RuntimeError):  # a backend that does not count
            counts[group.group_name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counts


def _run(task: Task, group: dist.ProcessGroup) -> Reply:
    try:
        sys.path[:] = task.sys_path
        with _clean_state(task.env):
            fn, args, kwargs = _load(task)
            result = fn(group, *args, **kwargs)
            buffer = io.BytesIO()
            _ResultPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(result)
        return Reply(payload=buffer.getvalue(), collectives=_collectives())
    except BaseException as error:
        return _error_reply(error)
    finally:
        fn = args = kwargs = result = None
        gc.collect()


def _load(task: Task) -> Any:
    if task.main_path is not None:
        # `fn` is defined in the parent's script: import it, once, as multiprocessing's spawn does.
        from multiprocessing.spawn import _fixup_main_from_path  # type: ignore[attr-defined]

        _fixup_main_from_path(task.main_path)
    return pickle.loads(task.payload)


@contextlib.contextmanager
def _clean_state(env: dict[str, str]) -> Any:
    """The same seeds for every task, and no task's settings left for the next."""
    saved_env, saved_dtype = dict(os.environ), torch.get_default_dtype()
    os.environ.update(env)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    try:
        yield
    finally:
        if dict(os.environ) != saved_env:
            os.environ.clear()
            os.environ.update(saved_env)
        torch.set_default_dtype(saved_dtype)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # the setter costs seconds: it imports
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)


def _error_reply(error: BaseException) -> Reply:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    kind = type(error)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    text = "".join(traceback.format_list(own)) or traceback.format_exc()
    cause = error.__cause__ or error.__context__
    if cause is not None:
        text += f"from {type(cause).__name__}: {cause}\n"
    return Reply(
        type_name=prefix + kind.__qualname__,
        message=str(error),
        traceback=text,
        exception=pickled,
        collectives=_collectives(),
    )
