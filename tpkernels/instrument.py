"""What ops of ours tell whoever records them: computing, communicating, waiting, and for whom.

    with operation("gemm_all_reduce", layer, group_name, x) as op:
        op.plan = plan
        with computing("gemm", x): ...                       compute  [gemm 0][gemm 1]
        sent = communication("all_reduce", group_name, out)  comm             [all_reduce 0 ]
        with waiting("all_reduce", out): work.wait()         exposed                  [wait ]
        arrived(sent)
        with exchanging("all_reduce", group_name, out): ...  comm and exposed at once: it blocks

Nothing is recorded until :func:`record_to` was given a recorder (``tpkernels.trace``): until then
each of these is a test of one variable. An operation does one thing more, always: an error of
communication that leaves it says which layer and which operation it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, Self

import torch.distributed as dist
from torch import Tensor

from tpkernels.errors import CommunicationError


class Recorder(Protocol):
    """What records. ``kind``: operation, compute, communication or exposed.

    ``tensor`` says on which device: on CUDA an interval is one of the current stream's.
    """

    def begin(self, kind: str, name: str, tensor: Tensor, details: dict[str, Any]) -> Any:
        """An interval begins now, within those that this thread has open; a token for its end.

        ``details`` may be kept, and may not be changed where it is empty.
        """

    def end(self, token: Any, details: dict[str, Any]) -> None:
        """It ends now, in any thread, perhaps after recording did; more ``details``."""


_recorder: Recorder | None = None


def record_to(recorder: Recorder | None) -> None:
    """From now on tell ``recorder``; None: nobody."""
    global _recorder
    _recorder = recorder


def recording() -> bool:
    """Whether somebody records: for what is worth knowing only then."""
    return _recorder is not None


class operation:
    """One op of ours, forward or backward: what is inside belongs to it.

    Args:
        name: of the op; of its gradient, ``<op>.backward``.
        layer: the module it serves, by its path in the model; ``""``: not known.
        group_name: whose ranks communicate.
        tensor: one of its inputs.

    ``plan`` and ``implementation`` may be set inside; they are recorded when it ends.
    """

    __slots__ = (
        "_recorder",
        "_token",
        "group_name",
        "implementation",
        "layer",
        "name",
        "plan",
        "tensor",
    )

    def __init__(self, name: str, layer: str, group_name: str, tensor: Tensor) -> None:
        self.name, self.layer, self.group_name, self.tensor = name, layer, group_name, tensor
        self.plan: Any = None
        self.implementation: str | None = None
        self._recorder: Recorder | None = None

    def __enter__(self) -> Self:
        recorder = _recorder
        if recorder is not None:
            self._recorder = recorder  # it is told of the end, whoever records then
            details = {"layer": self.layer, "group": self.group_name}
            self._token = recorder.begin("operation", self.name, self.tensor, details)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._recorder is not None:
            plan = None if self.plan is None else str(self.plan)
            details = {"plan": plan, "implementation": self.implementation}
            if error is not None:
                details["error"] = type(error).__name__
            self._recorder.end(self._token, details)
        unnamed = isinstance(error, (CommunicationError, dist.DistBackendError))
        if unnamed and not getattr(error, "_tpkernels_named", False):
            where = f"layer {self.layer}, {self.name}" if self.layer else self.name
            named = CommunicationError(f"{where}: {error}")
            named._tpkernels_named = True  # type: ignore[attr-defined]
            raise named from error


class _Interval:
    __slots__ = ("_kind", "_name", "_recorder", "_tensor", "_token")

    def __init__(self, recorder: Recorder, kind: str, name: str, tensor: Tensor) -> None:
        self._recorder, self._kind, self._name, self._tensor = recorder, kind, name, tensor

    def __enter__(self) -> None:
        self._token = self._recorder.begin(self._kind, self._name, self._tensor, _NO_DETAILS)

    def __exit__(self, *exc_info: object) -> None:
        self._recorder.end(self._token, _NO_DETAILS)


_NO_DETAILS: dict[str, Any] = {}
_NOTHING: AbstractContextManager[None] = nullcontext()


def computing(name: str, tensor: Tensor) -> AbstractContextManager[None]:
    """An interval in which this rank computes for the operation that is open."""
    recorder = _recorder  # once: another thread may end the recording
    return _NOTHING if recorder is None else _Interval(recorder, "compute", name, tensor)


def waiting(name: str, tensor: Tensor) -> AbstractContextManager[None]:
    """An interval in which this rank waits for communication and computes nothing."""
    recorder = _recorder
    return _NOTHING if recorder is None else _Interval(recorder, "exposed", name, tensor)


def communication(
    name: str,
    group_name: str,
    tensor: Tensor,
    sent_bytes: int = -1,
    total_bytes: int | None = None,
) -> Any:
    """A collective or exchange is started; hand the result to :func:`arrived`.

    ``sent_bytes``: what this rank sends; -1: not known. ``total_bytes``: what it sends and
    receives; None: ``tensor``'s size.
    """
    recorder = _recorder
    if recorder is None:
        return None
    details = {
        "group": group_name,
        "bytes": tensor.nbytes if total_bytes is None else total_bytes,
        "sent_bytes": sent_bytes,
    }
    return recorder, recorder.begin("communication", name, tensor, details)


def arrived(token: Any) -> None:
    """What :func:`communication` gave has been completed, as far as this rank has noticed."""
    if token is not None:
        recorder, begun = token
        recorder.end(begun, _NO_DETAILS)


class _Exchange:
    __slots__ = ("_begun", "_sent", "_waited")

    def __init__(self, name: str, group_name: str, tensor: Tensor, sent_bytes: int) -> None:
        self._begun = (name, group_name, tensor, sent_bytes)

    def __enter__(self) -> None:
        name, _, tensor, _ = self._begun
        self._sent = communication(*self._begun)
        self._waited = waiting(name, tensor)
        self._waited.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._waited.__exit__(None, None, None)
        arrived(self._sent)


def exchanging(
    name: str, group_name: str, tensor: Tensor, sent_bytes: int = -1
) -> AbstractContextManager[None]:
    """A collective that this rank waits for at once: communication, and all of it exposed."""
    return _NOTHING if _recorder is None else _Exchange(name, group_name, tensor, sent_bytes)
