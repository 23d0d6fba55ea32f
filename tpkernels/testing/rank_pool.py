"""A persistent pool of ranks on the CPU (Gloo): starting ranks costs seconds, a call costs less.

    with RankPool(world_size=2) as pool:
        results = pool.run(fn, x)      # [fn(group, x) on rank 0, fn(group, x) on rank 1]

No call waits for ever: a rank that hangs, raises or dies ends the call with one `RankError` that
says which rank, and where.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Self

import torch.distributed as dist

from tpkernels.testing.rank_errors import RankFailure, exit_status, rank_error
from tpkernels.testing.rank_worker import STACK_SIGNAL, MakeGroup, Reply, Setup, Task

# How long the other ranks may take to return once one has failed.
GRACE_SECONDS = 2.0
# Starting ranks is bound by importing torch, on machines of any speed; it has its own limit.
START_SECONDS = 120.0
_POLL_SECONDS = 0.05
_STACK_POLLS = 20  # a rank that is not scheduled for a second gives no stack
_IN_WORKER = "TPKERNELS_RANK_POOL_WORKER"


class RankPool:
    """`world_size` rank processes that stay up between calls of `run`.

    The processes start at the first `run`, and again after a failure that left a rank in an
    unknown state. They are spawned, never forked; each runs one thread, and none outlives the
    parent. A pool may be used from several threads: calls take turns.

    Args:
        world_size: number of ranks, at least 1.
        timeout: seconds a call of `run` may take by default.
    """

    def __init__(self, world_size: int = 4, timeout: float = 30.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if timeout <= 0:
            raise ValueError(f"timeout must be above 0 seconds, got {timeout}")
        self.world_size = world_size
        self.timeout = timeout
        self._lock = threading.RLock()
        self._ranks: list[_Rank] = []
        self._groups: set[tuple[int, ...]] = set()
        self._store: Any = None
        self._finalizer: weakref.finalize | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(group, *args, **kwargs)` on several ranks and return their results by rank.

        Before each call a rank seeds its generators with 0 (all ranks alike). Process groups that
        `fn` makes are destroyed after the call; a collective over all ranks, such as making a
        group or a mesh, needs a call on all of them.

        Args:
            fn: a module-level function; `group` is the `ProcessGroup` of the ranks that run it.
            args, kwargs: picklable; tensors arrive as they are here. A keyword that `run` takes
                itself (`timeout`, ...) must be given to `fn` by position.
            world_size: run on ranks `0 .. world_size - 1`; default all.
            ranks: run on exactly these ranks instead, ascending, such as `(0, 2)`.
            timeout: seconds, in place of the pool's.
            env: environment variables for this call only.

        Returns:
            One result a rank, in the order of the ranks. Tensors in it are detached CPU copies.

        Raises:
            RankError: a rank raised or died; `RankTimeoutError` if ranks only did not return.
        """
        chosen = self._choose(world_size, ranks)
        limit = self.timeout if timeout is None else timeout
        task = Task(
            ranks=chosen,
            payload=_pickle_call(fn, args, kwargs),
            sys_path=list(sys.path),
            main_path=_main_path(fn),
            env=dict(env or {}),
        )
        with self._lock:
            try:
                self._start()
                if chosen not in self._groups:
                    everyone = range(self.world_size)
                    self._exchange(everyone, MakeGroup(chosen), START_SECONDS)
                    self._groups.add(chosen)
                return self._results(chosen, self._exchange(chosen, task, limit))
            except KeyboardInterrupt:
                self.close()
                raise

    def close(self) -> None:
        """End the ranks. A later `run` starts them again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._finalizer = None
            self._ranks = []
            self._groups = set()
            self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _choose(self, world_size: int | None, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if ranks is None:
            size = self.world_size if world_size is None else world_size
            if not 1 <= size <= self.world_size:
                raise ValueError(
                    f"world_size must be within 1..{self.world_size} (the pool's), got {size}"
                )
            return tuple(range(size))
        chosen = tuple(ranks)
        if world_size is not None and world_size != len(chosen):
            raise ValueError(f"world_size={world_size} and ranks={chosen} disagree; give one")
        inside = all(0 <= rank < self.world_size for rank in chosen)
        if not chosen or not inside or list(chosen) != sorted(set(chosen)):
            raise ValueError(
                f"ranks must be ascending, distinct and within 0..{self.world_size - 1}, "
                f"got {chosen}"
            )
        return chosen

    def _start(self) -> None:
        if self._ranks and all(rank.process.poll() is None for rank in self._ranks):
            return
        self.close()
        if os.environ.get(_IN_WORKER):
            raise RuntimeError(
                "a RankPool was started while a rank imported your script; "
                'guard the script with `if __name__ == "__main__":`'
            )
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [_spawn(rank) for rank in range(self.world_size)]
        self._finalizer = weakref.finalize(self, _end, self._ranks, os.getpid())
        for rank in self._ranks:
            rank.send(pickle.dumps(Setup(rank.index, self.world_size, self._store.port)))
        self._collect(range(self.world_size), START_SECONDS)
        self._groups = {tuple(range(size)) for size in range(1, self.world_size + 1)}

    def _exchange(
        self, ranks: Sequence[int], message: Task | MakeGroup, limit: float
    ) -> dict[int, Reply]:
        data = pickle.dumps(message)
        for index in ranks:
            self._ranks[index].send(data)
        return self._collect(ranks, limit)

    def _collect(self, ranks: Sequence[int], limit: float) -> dict[int, Reply]:
        """Wait for one reply from each rank; a rank that dies or hangs ends the pool."""
        start = time.monotonic()
        deadline = start + limit
        replies: dict[int, Reply] = {}
        died: dict[int, RankFailure] = {}
        while pending := [index for index in ranks if index not in replies and index not in died]:
            now = time.monotonic()
            if now >= deadline:
                break
            connections = [self._ranks[index].connection for index in pending]
            multiprocessing.connection.wait(connections, min(deadline - now, _POLL_SECONDS))
            for index in pending:
                outcome = self._ranks[index].poll()
                if outcome is None:
                    continue
                if isinstance(outcome, Reply):
                    replies[index] = outcome
                else:
                    died[index] = outcome
                if index in died or replies[index].type_name:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not pending and not died:
            return replies
        failures = [*died.values(), *_hung(self._ranks, pending, time.monotonic() - start)]
        failures += [_raised(i, reply) for i, reply in replies.items() if reply.type_name]
        self.close()
        raise rank_error(failures, len(ranks))

    def _results(self, ranks: Sequence[int], replies: dict[int, Reply]) -> list[Any]:
        failures = [_raised(i, reply) for i, reply in replies.items() if reply.type_name]
        alike = not failures or (
            len(failures) == len(ranks) and len({failure.type_name for failure in failures}) == 1
        )
        # The pool is kept only if every rank returned, with the same outcome, after the same
        # number of collectives in every group: then none of them waits for another.
        if not alike or not _in_step(replies) or any(failure.lost_peer for failure in failures):
            self.close()
        if failures:
            raise rank_error(failures, len(ranks))
        return [pickle.loads(replies[index].payload or b"") for index in ranks]


@dataclass
class _Rank:
    """The parent's side of one rank process."""

    index: int
    process: subprocess.Popen[bytes]
    connection: Connection
    stacks: IO[bytes]

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it died; `poll` says so, with its exit status
            self.connection.send_bytes(data)

    def poll(self) -> Reply | RankFailure | None:
        """The rank's reply, how it died, or None while it runs."""
        ended = self.process.poll() is not None  # asked first: a last reply may be on its way
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.wait()
            ended = True
        if not ended:
            return None
        message = f"died: it {exit_status(self.process.returncode)}"
        return RankFailure(self.index, "died", message, traceback=self.stack())

    def ask_for_stack(self) -> None:
        """Have the rank write its Python stack: the handler runs even inside a collective."""
        with contextlib.suppress(OSError):
            self.process.send_signal(STACK_SIGNAL)

    def stack(self) -> str:
        """The stacks written so far, without the frames of the worker's own loop."""
        self.stacks.seek(0)
        lines = self.stacks.read().decode(errors="replace").splitlines()
        own = ("rank_worker.py", '"<string>"', "<frozen importlib", "Extension modules:")
        return "\n".join(line for line in lines if not any(name in line for name in own))


def _hung(ranks: list[_Rank], pending: Sequence[int], waited: float) -> list[RankFailure]:
    """Failures of the `pending` ranks, each with the stack it is in."""
    for index in pending:
        ranks[index].ask_for_stack()
    stacks: list[str] = []
    for _ in range(_STACK_POLLS):
        time.sleep(_POLL_SECONDS)
        previous, stacks = stacks, [ranks[index].stack() for index in pending]
        if all(stacks) and stacks == previous:
            break
    message = f"did not return within {waited:.1f} s and was killed"
    return [
        RankFailure(i, "hung", message, traceback=s) for i, s in zip(pending, stacks, strict=True)
    ]


def _spawn(index: int) -> _Rank:
    ours, theirs = socket.socketpair()
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from tpkernels.testing.rank_worker import main; "
        f"main({theirs.fileno()}, {stacks.fileno()})"
    )
    process = subprocess.Popen(
        [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno(), stacks.fileno()],
        env=_worker_env(),
    )
    theirs.close()
    return _Rank(index, process, Connection(ours.detach()), stacks)


def _worker_env() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _TORCHRUN}
    env[_IN_WORKER] = "1"
    env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = "1"
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # ranks share the cores: no spinning
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    env.setdefault("GLOO_SOCKET_IFNAME", loopback)  # all ranks are on this machine
    return env


_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _end(ranks: list[_Rank], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the parent: the ranks are not its own
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.connection.close()
        rank.stacks.close()


def _in_step(replies: dict[int, Reply]) -> bool:
    """Whether the ranks of each process group have started as many collectives in it."""
    counts: dict[str, int] = {}
    for reply in replies.values():
        for group, count in reply.collectives.items():
            if counts.setdefault(group, count) != count:
                return False
    return True


def _pickle_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"fn and its arguments must be picklable ({error}); "
            "fn must be a function at the top of an importable module"
        ) from error


def _main_path(fn: Callable[..., Any]) -> str | None:
    if getattr(fn, "__module__", "") != "__main__":
        return None
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise TypeError("fn must be in an importable module, got one typed at a prompt")
    return os.path.abspath(path)


def _raised(index: int, reply: Reply) -> RankFailure:
    exception = None
    if reply.exception is not None:
        # Where it cannot be made here, its type, text and traceback still are in the reply.
        with contextlib.suppress(Exception):
            exception = pickle.loads(reply.exception)
    return RankFailure(index, "raised", reply.message, reply.type_name, reply.traceback, exception)
