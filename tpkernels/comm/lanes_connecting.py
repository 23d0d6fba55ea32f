"""How the ranks of a group connect: every pair, over TCP, once all have said where they listen.

    rank 0: listens <-- rank 1: connects, listens <-- rank 2: connects ...

Who connects proves by a token from the group's store that it is of the group, and says which rank
it is; who accepts answers with a proof of its own. Nobody listens once all are connected.
"""

# R ranks

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time

from tpkernels.comm.lanes_wire import Lane
from tpkernels.comm.peers import Meeting

_KINDS = ("data", "control")
_GREETING = struct.Struct("<II32s")  # rank, kind, proof
_ANSWER_BYTES = 32
# ASSUMPTION: all have just been heard of in the store; who is not connected by then never is.
CONNECTING_SECONDS = 10.0
_LOOPBACK = ("127.", "::1")
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class CannotConnect(OSError):
    """What kept this rank from being connected with all others."""


def connect(meeting: Meeting) -> tuple[list[Lane], str]:
    """A lane to every other rank and ``""``; or none and why not, the same on all ranks.

    Collective over the ranks at ``meeting``.

    Raises:
        CommunicationError: a rank does not come to the meeting.
    """
    listener: socket.socket | None = None
    problem = ""
    lanes: list[Lane] = []
    try:
        listener = _listener(2 * meeting.size)
    except OSError as error:
        problem = f"it cannot listen: {error}"
    token = secrets.token_hex(32) if meeting.rank == 0 else None
    place = None if listener is None else [listener.family, *listener.getsockname()[:2]]
    meeting.say("lanes", [place, token])
    try:
        heard = meeting.hear_all("lanes")
        key = bytes.fromhex(heard[0][1])
        places = [said[0] for said in heard]
        if listener is not None and None not in places:
            lanes = _mesh(meeting, listener, places, key)
    except OSError as error:
        problem = str(error)
    finally:
        if listener is not None:
            listener.close()
    meeting.next_stage()
    meeting.say("lanes outcome", problem)
    outcomes = meeting.hear_all("lanes outcome")
    if not any(outcomes):
        return lanes, ""
    for lane in lanes:
        lane.close()
    return [], "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(outcomes) if said)


def _mesh(meeting: Meeting, listener: socket.socket, places: list[list], key: bytes) -> list[Lane]:
    """Connections with all others: first to those of lower rank, then from those of higher."""
    end = time.monotonic() + CONNECTING_SECONDS
    made: dict[tuple[int, int], socket.socket] = {}
    try:
        for rank in range(meeting.rank):
            for kind in range(len(_KINDS)):
                made[rank, kind] = _connected(places[rank], meeting.rank, kind, key, rank, end)
        _accept(listener, meeting.rank, meeting.size, key, made, end)
        for rank in range(meeting.rank):
            for kind in range(len(_KINDS)):
                _check_answer(made[rank, kind], rank, kind, key, end)
    except BaseException:
        for connection in made.values():
            connection.close()
        raise
    others = [rank for rank in range(meeting.size) if rank != meeting.rank]
    return [Lane(rank, made[rank, 0], made[rank, 1]) for rank in others]


def _proof(key: bytes, who: str, rank: int, kind: int) -> bytes:
    return hmac.digest(key, f"{who} {rank} {_KINDS[kind]}".encode(), "sha256")


def _left(end: float) -> float:
    return max(0.01, end - time.monotonic())


def _connected(
    place: list, own: int, kind: int, key: bytes, rank: int, end: float
) -> socket.socket:
    family, address, port = place
    connection = socket.socket(family)
    try:
        connection.settimeout(_left(end))
        connection.connect((address, port))
        connection.sendall(_GREETING.pack(own, kind, _proof(key, "connects", own, kind)))
    except OSError as error:
        connection.close()
        raise CannotConnect(
            f"it cannot connect to rank {rank} at {address} port {port}: {error}"
        ) from error
    return connection


def _check_answer(connection: socket.socket, rank: int, kind: int, key: bytes, end: float) -> None:
    answer = b""
    try:
        while len(answer) < _ANSWER_BYTES:
            connection.settimeout(_left(end))
            chunk = connection.recv(_ANSWER_BYTES - len(answer))
            if not chunk:
                break
            answer += chunk
    except OSError as error:
        raise CannotConnect(f"rank {rank} does not answer: {error}") from error
    if not hmac.compare_digest(answer, _proof(key, "accepts", rank, kind)):
        raise CannotConnect(f"who listens at the place of rank {rank} is not of this group")


def _accept(
    listener: socket.socket,
    own: int,
    size: int,
    key: bytes,
    made: dict[tuple[int, int], socket.socket],
    end: float,
) -> None:
    """Wait for the ranks above this one. Others that connect are turned away, and delay nobody."""
    wanted = {(rank, kind) for rank in range(own + 1, size) for kind in range(len(_KINDS))}
    said: dict[socket.socket, bytes] = {}  # by those that are not known yet
    listener.setblocking(False)
    try:
        while wanted:
            if time.monotonic() > end:
                absent = ", ".join(str(rank) for rank in sorted({rank for rank, _ in wanted}))
                raise CannotConnect(f"rank {absent} did not connect to it")
            poll = select.poll()
            for connection in (listener, *said):
                poll.register(connection, select.POLLIN)
            ready = {file for file, _ in poll.poll(_left(end) * 1e3)}
            for connection in [each for each in said if each.fileno() in ready]:
                if not _greet(connection, said):
                    continue
                who = _recognised(said.pop(connection), key, wanted)
                if who is None:
                    connection.close()
                    continue
                made[who] = connection
                connection.sendall(_proof(key, "accepts", own, who[1]))
                wanted.discard(who)
            if listener.fileno() in ready:
                with contextlib.suppress(OSError):  # it has gone again
                    connection = listener.accept()[0]
                    connection.setblocking(False)
                    said[connection] = b""
    finally:
        for connection in said:
            connection.close()


def _greet(connection: socket.socket, said: dict[socket.socket, bytes]) -> bool:
    """Hear more of a greeting; whether it has ended."""
    try:
        chunk = connection.recv(_GREETING.size - len(said[connection]))
    except OSError:
        chunk = b""
    said[connection] += chunk
    return not chunk or len(said[connection]) == _GREETING.size


def _recognised(
    greeting: bytes, key: bytes, wanted: set[tuple[int, int]]
) -> tuple[int, int] | None:
    if len(greeting) < _GREETING.size:
        return None
    rank, kind, proof = _GREETING.unpack(greeting)
    if (rank, kind) not in wanted or not hmac.compare_digest(
        proof, _proof(key, "connects", rank, kind)
    ):
        return None
    return rank, kind


# --- where to listen --------------------------------------------------------------------------


def _listener(backlog: int) -> socket.socket:
    family, address = own_address()
    listener = socket.socket(family)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def own_address() -> tuple[int, str]:
    """(family, address) by which the other ranks reach this host, as Gloo has it.

    The one of ``GLOO_SOCKET_IFNAME``, else the one the host's name resolves to, unless that is
    loopback; else the one from which ``MASTER_ADDR`` is reached.

    Raises:
        OSError: there is none.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _address_of(interface)
    named = _bindable(socket.gethostname())
    if named is not None and not named[1].startswith(_LOOPBACK):
        return named
    master = os.environ.get("MASTER_ADDR")
    if master:
        family, kind, _, _, place = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: asks for the route
            return family, probe.getsockname()[0]
    if named is None:
        raise OSError(f"the host's name, {socket.gethostname()!r}, resolves to no address of it")
    return named


def _bindable(name: str) -> tuple[int, str] | None:
    """The first address of ``name`` that is this host's."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                return family, str(place[0])
    return None


def _address_of(interface: str) -> tuple[int, str]:
    """The IPv4 address of a network interface, else its global IPv6 address."""
    if not sys.platform.startswith("linux"):
        if interface == "lo0":
            return socket.AF_INET, "127.0.0.1"
        raise OSError("the address of GLOO_SOCKET_IFNAME is only found on Linux")
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.AF_INET, socket.inet_ntoa(reply[20:24])
        except OSError:
            pass
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as file:
        for address, _, _, scope, _, name in (line.split() for line in file):
            if name == interface and scope in ("00", "10"):  # global, this host
                return socket.AF_INET6, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise OSError(f"GLOO_SOCKET_IFNAME={interface!r} has no address here")
