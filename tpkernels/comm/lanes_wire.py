"""One lane: two connections between this rank and another, of which one only says goodbye.

What is received is known before it comes, as exchanges start in the same order on all ranks. So
both directions are queues of memory to read from or write to, one system call moves as much as
there is, and a message's header is only compared with the one that was expected.

    message: [header: number, bytes, operation][tensor 0][tensor 1]...

The second connection bears nothing but the reason for which a rank gave up: in the first one it
would stand behind, or in the middle of, data that nobody takes any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import select
import socket
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from torch import Tensor

_HEADER = struct.Struct("<4sIQI76s")  # mark, number, bytes, crc of the operation, its first bytes
_MARK = b"TPKL"
_LENGTH = struct.Struct("<I")
_MOST_TEXT = 2000  # bytes of a goodbye: always fit in what a connection takes at once
_MOST_BUFFERS = 64  # of one system call; POSIX allows 16, Linux and macOS 1024
_WRITABLE = 0x200  # PyBUF_WRITE, CPython's object.h

_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class LostPeer(Exception):
    """The other end of a lane is gone, or not at ``operation``; the message says what it does."""

    def __init__(self, message: str, operation: str = "") -> None:
        super().__init__(message)
        self.operation = operation


class Goodbye(NamedTuple):
    """Why a rank gave up: ``text`` is what rank ``origin`` (of the group), the first, said.

    ``waits``: for which ranks the one that says it waits itself.
    """

    origin: int
    text: str
    waits: list[int]


class Owner(Protocol):
    """Whose messages they are: told when one has been moved whole."""

    operation: str

    def sent_one(self) -> None: ...
    def received_one(self) -> None: ...


class _Piece(NamedTuple):
    """Memory to send or fill. ``expected``: a header's bytes; ``of``: at a message's end, whose."""

    memory: memoryview
    expected: bytes | None
    of: Owner | None


class Lane:
    """The connections with one other rank, neither of which ever blocks.

    The kernel sizes their buffers. Measured on two hosts, 8.4 MB each way in 8 pieces between which
    92 ms are slept (2026-11-30, 1 Gbit/s, the wire alone 68 ms): 104 ms so, 104 with SO_SNDBUF and
    SO_RCVBUF of 1 to 4 MB, 112 of 512 KB, 139 of 208 KB, all that an unprivileged process can
    have by default; 144 and more with TCP_NOTSENT_LOWAT. With 4 Gbit/s: 101, 102 to 103, 104, 114.

    Args:
        peer: the other rank's number in the group.
        data, control: connected; closed by :meth:`close`.
    """

    def __init__(self, peer: int, data: socket.socket, control: socket.socket) -> None:
        self.peer, self.data, self.control = peer, data, control
        for connection in (data, control):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.outgoing: deque[_Piece] = deque()
        self.incoming: deque[_Piece] = deque()
        self._sends = self._receives = 0
        self.ended = False  # nothing more comes through `control`
        self._said = bytearray()

    def enqueue_send(self, tensors: Sequence[Tensor], operation: str, of: Owner) -> None:
        """One message of the bytes of ``tensors``, which ``of`` keeps alive."""
        memories = _memories(tensors)
        header = _header(self._sends, memories, operation)
        self._sends += 1
        self._enqueue(self.outgoing, memoryview(header), None, memories, of)

    def enqueue_receive(self, tensors: Sequence[Tensor], operation: str, of: Owner) -> None:
        """The other rank's next message, into ``tensors``."""
        memories = _memories(tensors)
        header = _header(self._receives, memories, operation)
        self._receives += 1
        self._enqueue(self.incoming, memoryview(bytearray(len(header))), header, memories, of)

    @staticmethod
    def _enqueue(
        queue: deque[_Piece],
        header: memoryview,
        expected: bytes | None,
        memories: list[memoryview],
        of: Owner,
    ) -> None:
        # What is left of a piece is shorter: the header that arrived is found in `obj`.
        queue.append(_Piece(header, expected, None if memories else of))
        queue.extend(_Piece(memory, None, None) for memory in memories[:-1])
        if memories:
            queue.append(_Piece(memories[-1], None, of))

    def send(self) -> bool:
        """Send what the connection takes now; whether that was anything.

        Raises:
            LostPeer: the other rank has closed the connection.
        """
        moved = False
        while self.outgoing:
            views = [piece.memory for piece in islice(self.outgoing, _MOST_BUFFERS)]
            try:
                count = self.data.sendmsg(views)
            except BlockingIOError:
                break
            except OSError as error:
                raise LostPeer(_gone(error.strerror)) from error
            moved = True
            whole = count == sum(map(len, views))
            for piece in _taken(self.outgoing, count):
                if piece.of is not None:
                    piece.of.sent_one()
            if not whole:  # the connection is full
                break
        return moved

    def receive(self) -> bool:
        """Take what has arrived of what is expected; whether that was anything.

        Raises:
            LostPeer: the connection is closed, or another message arrived than expected.
        """
        moved = False
        while self.incoming:
            views = [piece.memory for piece in islice(self.incoming, _MOST_BUFFERS)]
            try:
                count = self.data.recvmsg_into(views)[0]
            except BlockingIOError:
                break
            except OSError as error:
                raise LostPeer(_gone(error.strerror)) from error
            if not count:
                raise LostPeer(_gone("end of file"))
            moved = True
            for piece in _taken(self.incoming, count):
                if piece.expected is not None:
                    arrived = bytes(piece.memory.obj)  # type: ignore[arg-type]
                    if arrived != piece.expected:
                        raise _difference(arrived, piece.expected)
                if piece.of is not None:
                    piece.of.received_one()
        return moved

    def say_goodbye(self, why: Goodbye) -> None:
        """Tell the other rank, where it still can be told."""
        text = why.text.encode()[:_MOST_TEXT].decode(errors="ignore")
        message = json.dumps([why.origin, text, why.waits]).encode()
        with contextlib.suppress(OSError):
            self.control.send(_LENGTH.pack(len(message)) + message)

    def goodbye(self, seconds: float = 0.0) -> Goodbye | None:
        """What the other rank said as goodbye, for which it has ``seconds``; None: nothing."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        while not self.ended and poll.poll(seconds * 1e3):
            try:
                chunk = self.control.recv(_MOST_TEXT)
            except OSError:
                chunk = b""
            self.ended = not chunk
            self._said += chunk
            end = _LENGTH.size
            if len(self._said) >= end:
                end += _LENGTH.unpack_from(self._said)[0]
                if len(self._said) >= end:
                    return Goodbye(*json.loads(self._said[_LENGTH.size : end]))
        return None

    def operation(self) -> str:
        """What the lane is at: of its first message, to receive or else to send."""
        owners = (piece.of for piece in (*self.incoming, *self.outgoing))
        return next((owner.operation for owner in owners if owner is not None), "")

    def concerns(self, owner: Owner) -> bool:
        """Whether messages of ``owner`` are not moved yet."""
        return any(piece.of is owner for piece in (*self.incoming, *self.outgoing))

    def close(self) -> None:
        self.outgoing.clear()
        self.incoming.clear()
        for connection in (self.data, self.control):
            connection.close()


def _gone(how: str | None) -> str:
    return f"connection closed ({how})"


def _memories(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The bytes of tensors that have any, one after another, without a copy."""
    return [
        _memory_at(tensor.data_ptr(), size, _WRITABLE)
        for tensor in tensors
        if (size := tensor.numel() * tensor.element_size())
    ]


def _header(number: int, memories: list[memoryview], operation: str) -> bytes:
    name = operation.encode()
    size = sum(map(len, memories))
    return _HEADER.pack(_MARK, number & 0xFFFFFFFF, size, zlib.crc32(name), name[:76])


def _difference(arrived: bytes, expected: bytes) -> LostPeer:
    (operation, ours), (_, theirs) = _described(expected), _described(arrived)
    return LostPeer(
        f"sent {theirs}, where this rank expected {ours}: ranks called different operations or "
        "shapes, or in another order. Fix: call the same on all ranks of the group",
        operation,
    )


def _described(header: bytes) -> tuple[str, str]:
    """The operation, and the whole message in words."""
    mark, number, size, _, name = _HEADER.unpack(header)
    operation = name.rstrip(b"\0").decode(errors="ignore")
    if mark != _MARK:
        return operation, "what is no message"
    return operation, f"message {number}, {operation} of {size} bytes"


def _taken(queue: deque[_Piece], count: int) -> list[_Piece]:
    """The pieces at the head of ``queue`` of which the next ``count`` bytes are the last."""
    whole = []
    while count:
        piece = queue[0]
        size = len(piece.memory)
        if count < size:
            queue[0] = piece._replace(memory=piece.memory[count:])
            break
        count -= size
        whole.append(queue.popleft())
    return whole
