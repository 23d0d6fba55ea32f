"""N hosts on one Linux machine, joined by links of a given rate: overlap that can be measured.

    host 0 [netns] eth0 == veth ==+
                                  +-- bridge [netns]      each eth0 sends at most RATE (tc tbf)
    host 1 [netns] eth0 == veth ==+

Waiting for a shaped link costs no processor time, so that computing beside it is real overlap;
over loopback, sending is copying, and takes the core that computes. A namespace here has no name:
it is held open by a process that ends with this one, so that even a kill leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, TextIO

from tpkernels.testing.rank_errors import RankFailure, exit_status, rank_error

UNSHAPED = "unshaped"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
# One Gloo message's worth may pass at once; more would hide the rate from messages of 1 MB.
_BURST = "256kb"
_LATENCY = "50ms"  # what the queue holds at most: TCP then slows down without a loss
_COMMAND_SECONDS = 10.0
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 0.5  # for the others to say why, once one rank has failed
_LOG_LINES = 30
_TRACEBACK = "Traceback (most recent call last)"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CannotShape(RuntimeError):
    """Why this process cannot make network namespaces with shaped links."""


@dataclass(frozen=True)
class Host:
    """Where ranks run: what their command starts with, and what they are told of the network."""

    prefix: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = "127.0.0.1"


class ShapedNetwork:
    """`hosts` namespaces joined by a bridge, each sending at most `rate`, while entered.

    Args:
        hosts: from 1 to 254.
        rate: as `tc` spells it: `1gbit`, `500mbit`.

    Raises (on entering):
        CannotShape: not root, a tool that is missing, or what the kernel refused.
    """

    def __init__(self, hosts: int, rate: str) -> None:
        self.rate = rate
        self._count = hosts
        self.hosts: list[Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        reason = cannot_shape()
        if reason:
            raise CannotShape(reason)
        try:
            self._join()
        except BaseException:  # also an interrupt: what was made goes away
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that hold the namespaces; with them goes all that is in them."""
        self.hosts = []
        self._stack.close()

    def _join(self) -> None:
        switch = self._namespace()
        _run(*_within(switch), "ip", "link", "add", "br0", "type", "bridge")
        _run(*_within(switch), "ip", "link", "set", "br0", "up")
        for number in range(self._count):
            holder, port = self._namespace(), f"port{number}"
            inside, address = _within(holder), f"10.77.0.{number + 1}"
            ends = ["eth0", "netns", holder, "type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "link", "add", *ends)
            _run(*_within(switch), "ip", "link", "set", port, "master", "br0", "up")
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            shape_link(self.rate, inside, "add")
            self.hosts.append(Host(inside, "eth0", address))

    def _namespace(self) -> str:
        """A new network namespace; the id of the process that holds it open.

        `cat` reads a pipe that ends when this process does, however that ends.
        """
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then cleans up
        )
        self._stack.callback(_end, [holder])
        assert holder.stdout is not None and holder.stderr is not None
        if not holder.stdout.readline():  # it has entered its namespace, or failed
            said = holder.stderr.read().decode(errors="replace").strip()
            raise CannotShape(f"a network namespace was refused: {said or 'unshare ended'}")
        return str(holder.pid)


def shape_link(rate: str, inside: Sequence[str] = (), verb: str = "change") -> None:
    """What a host may send from now on, as `tc` spells it; also from within: by a rank of its own.

    Raises:
        CannotShape: what the kernel refused; also where this is no host of a `ShapedNetwork`.
    """
    limit = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
    _run(*inside, "tc", "qdisc", verb, "dev", "eth0", "root", *limit)


def cannot_shape() -> str | None:
    """Why namespaces cannot be tried at all; None where only trying tells."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{missing[0]!r} is not in PATH (package {_TOOLS[missing[0]]})"
    return None


def run_ranks(
    command: Sequence[str],
    hosts: Sequence[Host],
    *,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    show: TextIO | None = None,
) -> None:
    """Run `command` as one rank a host, each on a core of its own (by turns) with one thread.

    Ranks get what torchrun would set (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...) and
    `GLOO_SOCKET_IFNAME`. What rank 0 writes goes to `show` as it comes (default: stderr); what the
    others write is part of the error when one fails. None outlives this process.

    Raises:
        RankError: the first rank that failed, which ends the others; `RankTimeoutError`, naming
            those that had not ended after `seconds`.
    """
    stream = show or sys.stderr
    deadline = time.monotonic() + seconds
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # The port is free in a namespace; on loopback it is as free as the kernel just said.
    port = 29500 if hosts[0].prefix else _free_port()
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in hosts]
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        for rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
            core = cores[rank % len(cores)] if cores else None
            told = _told(rank, len(hosts), host, hosts[0].address, port)
            ranks.append(
                _start([*host.prefix, *command], core, {**told, **(environment or {})}, log)
            )
        shown = 0
        while True:
            ended = all(rank.poll() is not None for rank in ranks)
            shown = _relay(logs[0], shown, stream)
            failed = [i for i, rank in enumerate(ranks) if rank.poll()]
            if failed:
                raise rank_error(_failures(ranks, logs, failed), len(ranks))
            if ended:
                return
            if time.monotonic() > deadline:
                late = f"did not end within {seconds:g} s and was killed"
                raise rank_error(
                    [
                        RankFailure(i, "hung", late, traceback=_tail(logs[i]))
                        for i, rank in enumerate(ranks)
                        if rank.poll() is None
                    ],
                    len(ranks),
                )
            time.sleep(_POLL_SECONDS)


def _failures(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[bytes]], first: list[int]
) -> list[RankFailure]:
    """The ranks that failed: the first ones, and those that fail of it while we wait a little."""
    time.sleep(_GRACE_SECONDS)
    failed = first + [i for i, rank in enumerate(ranks) if i not in first and rank.poll()]
    failures = []
    for index in failed:
        status, tail = exit_status(ranks[index].returncode), _tail(logs[index])
        lines = tail.splitlines()
        type_name, colon, message = lines[-1].partition(": ") if lines else ("", "", "")
        if colon and _TRACEBACK in tail:  # its last line is the exception
            failures.append(RankFailure(index, "raised", message, type_name, tail))
        else:
            failures.append(RankFailure(index, "died", f"died: it {status}", traceback=tail))
    return failures


def _start(
    command: list[str], core: int | None, told: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

    def before_exec() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if core is not None:
            os.sched_setaffinity(0, {core})

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **told},
        preexec_fn=before_exec,
        start_new_session=True,
    )


def _told(rank: int, world: int, host: Host, master: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0" if host.prefix else str(rank),
        "LOCAL_WORLD_SIZE": "1" if host.prefix else str(world),
        "GROUP_RANK": str(rank) if host.prefix else "0",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": host.interface if sys.platform.startswith("linux") else "lo0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins takes the core from the sending one
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _within(holder: str) -> tuple[str, ...]:
    return ("nsenter", "--target", holder, "--net")


def _run(*command: str) -> None:
    """Run one command of the set-up.

    Raises:
        CannotShape: it failed, with what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotShape(f"`{' '.join(command)}` failed: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise CannotShape(f"`{' '.join(command)}` failed: {said[0]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _relay(log: IO[bytes], shown: int, stream: TextIO) -> int:
    """Copy what is new in `log`; returns how far it is shown."""
    new = os.pread(log.fileno(), os.fstat(log.fileno()).st_size - shown, shown)
    if new:
        stream.write(new.decode(errors="replace"))
        stream.flush()
    return shown + len(new)


def _tail(log: IO[bytes]) -> str:
    log_bytes = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
    return "\n".join(log_bytes.decode(errors="replace").rstrip().splitlines()[-_LOG_LINES:])


def module_path() -> dict[str, str]:
    """What lets `python -m tpkernels...` run from any directory, also from a plain checkout."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root}
